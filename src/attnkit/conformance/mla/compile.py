"""Variants of the kernels over latents, to be compiled for a GPU that need not be here.

In: a GPU's limits. Out: names and `KernelCall`s, made by the launchers from tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnkit.backends.hopper import latent_gather_launch
from attnkit.backends.hopper.latent_launch import LatentWork
from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.triton import configs, index_launch, mla_launch
from attnkit.backends.triton.launch import DecodeWork
from attnkit.backends.triton.mla_operands import LatentOperands, LatentPages
from attnkit.backends.triton.operands import Parts
from attnkit.conformance.meta import empty
from attnkit.contract import MLADimensions
from attnkit.kvcache.formats import latent_format
from attnkit.mla.plan import DecodePart

_DEEPSEEK = MLADimensions(
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
_SMALL = MLADimensions(kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)


def mla_variants(gpu: configs.Gpu) -> Iterator[tuple[str, KernelCall]]:
    """Few and many heads, one and several queries, every kind of row."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for heads in (16, 128):
        for split in (False, True):
            name = f"mla-bf16-h{heads}" + ("-split" if split else "")
            yield from _decode(gpu, name, heads, bf16, "bfloat16", split=split)
        for stored in ("fp8", "fp8_ds_mla"):
            yield from _decode(gpu, f"mla-bf16-h{heads}-{stored}", heads, bf16, stored)
    yield from _decode(gpu, "mla-bf16-h128-page16", 128, bf16, "bfloat16", page=16)
    for stored in ("bfloat16", "fp8_ds_mla"):  # Chosen rows are pages of one token.
        yield from _decode(gpu, f"mla-bf16-h128-{stored}-rows", 128, bf16, stored, page=1)
    yield from _decode(gpu, "mla-bf16-h128-cache-fp32", 128, bf16, "float32")
    yield from _decode(gpu, "mla-fp16-h128-cache-bf16", 128, fp16, "bfloat16")
    yield from _decode(gpu, "mla-bf16-h20", 20, bf16, "bfloat16")
    yield from _decode(gpu, "mla-bf16-h128-256", 128, bf16, "bfloat16", dimensions=_SMALL)
    yield from _decode(gpu, "mla-fp16-h128-fp8_ds_mla", 128, fp16, "fp8_ds_mla")
    yield from _decode(gpu, "mla-fp32-h16-split", 16, fp32, "float32", split=True)
    yield from _decode(gpu, "mla-fp32-h16-fp8_ds_mla", 16, fp32, "fp8_ds_mla")
    kv_c, k_pe = empty(4096, 512, dtype=bf16), empty(4096, 64, dtype=bf16)
    pages = _pages(gpu, _DEEPSEEK, "fp8_ds_mla", 64)
    slots = empty(4096, dtype=torch.int64)
    yield "mla-write-fp8_ds_mla", mla_launch.tiled_write_call(kv_c, k_pe, pages, slots)
    lists, lens = empty(64, 2048, dtype=torch.int32), empty(64, dtype=torch.int32)
    plan = DecodePart(
        query_start_loc=empty(65, dtype=torch.int32),
        seq_lens=lens,
        block_table=empty(64, 1024, dtype=torch.int32),
        max_query_len=1,
        max_seq_len=65_536,
    )
    yield "mla-choose", mla_launch.choose_rows_call(lists, plan, 64, 64, lists, lens)
    for stored in ("bfloat16", "fp8", "fp8_ds_mla"):
        yield f"mla-gather-{stored}", _gather(gpu, stored, lists, plan.block_table)
    owners = empty(64, 2, dtype=torch.int32)
    yield (
        "mla-gather-lens",
        latent_gather_launch.chosen_lens_call(
            owners, lens, plan.query_start_loc, lens, 0, 2048, distinct=True
        ),
    )
    yield from _index(gpu, "index-bf16-fp8", bf16, torch.uint8)
    yield from _index(gpu, "index-bf16-fp8-page16", bf16, torch.uint8, page=16)
    yield from _index(gpu, "index-bf16", bf16, bf16)
    yield from _index(gpu, "index-fp32", fp32, fp32)


def _pages(gpu: configs.Gpu, d: MLADimensions, name: str, page: int) -> LatentPages:
    made = latent_format(name)
    assert made.dtype is not None
    row = made.layout(d.kv_lora_rank, d.qk_rope_head_dim).num_bytes // made.dtype.itemsize
    cache = empty(1024, page, row, dtype=made.dtype)
    one = empty(1, dtype=torch.float32)
    return LatentPages.of(cache, made, d, one, has_e4m3=gpu.has_e4m3)


def _decode(
    gpu: configs.Gpu,
    name: str,
    heads: int,
    dtype: torch.dtype,
    stored: str,
    *,
    page: int = 64,
    dimensions: MLADimensions = _DEEPSEEK,
    split: bool = False,
) -> Iterator[tuple[str, KernelCall]]:
    d, num_reqs = dimensions, 64
    operands = LatentOperands(
        query=empty(num_reqs, heads, d.latent_size, dtype=dtype),
        pages=_pages(gpu, d, stored, page),
        output=empty(num_reqs, heads, d.kv_lora_rank, dtype=dtype),
        lse=empty(num_reqs, heads, dtype=torch.float32),
        query_start_loc=empty(num_reqs + 1, dtype=torch.int32),
        kv_lens=empty(num_reqs, dtype=torch.int32),
        block_table=empty(num_reqs, 256, dtype=torch.int32),
    )
    config = configs.mla_decode_config(
        d.kv_lora_rank,
        d.qk_rope_head_dim,
        dtype.itemsize,
        operands.pages.latent.element_size(),
        heads,
        page,
        gpu,
    )
    parts = None
    if split:
        memory = empty(Parts.numel(operands, 1, 4), dtype=torch.float32)
        parts = Parts.of(memory, operands, 1, 4)
    work = DecodeWork(max_query_len=1, config=config, num_splits=4 if split else 1, parts=parts)
    yield name, mla_launch.mla_decode_call(operands, 0.07, work)
    if split:
        yield f"{name}-merge", mla_launch.mla_merge_call(operands, 0.07, work)


def _gather(gpu: configs.Gpu, stored: str, lists: torch.Tensor, table: torch.Tensor) -> KernelCall:
    """Rows for the Gluon decode of 128 heads; the kernel itself is a portable one."""
    i32, f32 = torch.int32, torch.float32
    work = LatentWork(
        share=empty(16 + 16 * 132, dtype=i32),
        pieces=empty(132 + 128, 16, dtype=i32),
        units=empty(128, 8, dtype=i32),
        acc=empty(264, 64, 512, dtype=f32),
        sums=empty(264, 64, 2, dtype=f32),
        num_rows=64,
    )
    return latent_gather_launch.gather_call(
        lists,
        table,
        _pages(gpu, _DEEPSEEK, stored, 64),
        empty(64 * 32, 64, 576, dtype=torch.bfloat16),
        empty(64, 2, dtype=i32),
        work,
        2,
    )


def _index(
    gpu: configs.Gpu, name: str, dtype: torch.dtype, stored: torch.dtype, *, page: int = 64
) -> Iterator[tuple[str, KernelCall]]:
    """DeepSeek-V3.2's indexer: 64 heads of 128, 2048 keys of 64k."""
    size = 132 if stored is torch.uint8 else 128
    pages = index_launch.IndexPages.of(empty(1024, page, size, dtype=stored), 128)
    slots = empty(256, dtype=torch.int64)
    yield (
        f"{name}-write",
        index_launch.index_write_call(empty(256, 128, dtype=dtype), pages, slots, gpu),
    )
    step = index_launch.IndexStep(
        q=empty(256, 64, 128, dtype=dtype),
        weights=empty(256, 64, dtype=torch.float32),
        query_start_loc=empty(65, dtype=torch.int32),
        seq_lens=empty(64, dtype=torch.int32),
        block_table=empty(64, 1 << 16, dtype=torch.int32),
        lists=empty(256, 2048, dtype=torch.int32),
    )
    part = step.parts(page, 1 << 16)[0]
    yield f"{name}-score", index_launch.index_score_call(step, part, pages, gpu)
    for kernel, call in index_launch.index_list_calls(step, part, gpu).items():
        yield f"{name}-{kernel}", call
