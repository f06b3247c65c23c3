"""Variants of hopper's plain Triton kernels, to be compiled for a GPU that need not be here.

Out: names and `KernelCall`s, made by the launchers from tensors without memory. The Gluon kernels beside
them are compiled by the backend's own tests, which read what the assembler made of their loops.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnkit.backends.hopper import cache_launch, fold_launch, launch, plan_launch, tuning
from attnkit.backends.hopper.config import ScoreConfig
from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Stored
from attnkit.conformance.meta import empty

_REQS, _TOKENS, _HEADS, _KV_HEADS, _PROGRAMS = 64, 512, 32, 8, 264
_LSE = ScoreConfig(lse=True)


def hopper_variants() -> Iterator[tuple[str, KernelCall]]:
    """Around attention: writes, pages of codes, plans, and splits put together, at each head size."""
    for size in tuning.HEAD_SIZES:
        for coded in (False, True):
            yield from _around_cache(size, coded)
        yield from _splits(size)
        yield from _decodes(size)
    yield from _latents()


def _around_cache(size: int, coded: bool) -> Iterator[tuple[str, KernelCall]]:
    bf16, codes = torch.bfloat16, torch.uint8
    pool = empty(1024, _KV_HEADS, 16, 2 * size, dtype=codes if coded else bf16)
    scale = empty(_KV_HEADS, dtype=torch.float32) if coded else None
    key, value = pool.split(size, dim=-1)
    stored = Stored(key=key, value=value, k_scale=scale, v_scale=scale)
    new = empty(_TOKENS, _KV_HEADS, size, dtype=bf16)
    slots = empty(_TOKENS, dtype=torch.int64)
    name = f"d{size}-codes" if coded else f"d{size}"
    yield f"hopper-write-{name}", cache_launch.write_call(new, new, stored, slots)
    if coded:
        query = empty(_TOKENS, _HEADS, size, dtype=bf16)
        operands = launch.Operands(
            query=query,
            key=key,
            value=value,
            output=query,
            lse=None,
            block_table=empty(_REQS, 64, dtype=torch.int32),
        )
        pages, numbers = empty(2, 1024, dtype=torch.int32), pool.to(bf16)
        lens = empty(_REQS, dtype=torch.int32)
        yield f"hopper-unpack-{name}", cache_launch.unpack_call(operands, pages, lens, numbers)


def _splits(size: int) -> Iterator[tuple[str, KernelCall]]:
    config = tuning.prefill_config(size, _HEADS // _KV_HEADS, 16, _LSE, split=True)
    for num_lists, name in ((3, "whole"), (6, "split")):
        work = empty(133 + num_lists * 256, dtype=torch.int32)
        records = empty(256, 16, dtype=torch.int32)
        call = plan_launch.row_tiles_call(work, 256, 133, records, _lengths(), config)
        yield f"hopper-row-tiles-d{size}-{name}", call
    parts = launch.Parts.make(256, config, "meta")
    output, lse = _output(size)
    sinks = empty(_HEADS, dtype=torch.float32)
    yield (
        f"hopper-merge-d{size}",
        launch.merge_call(parts, records, output, lse, None, config),
    )
    yield (
        f"hopper-merge-d{size}-sinks",
        launch.merge_call(parts, records, output, None, sinks, config),
    )


def _decodes(size: int) -> Iterator[tuple[str, KernelCall]]:
    config = tuning.decode_config(size, _HEADS // _KV_HEADS, 16, _LSE, 64)
    units = empty(_REQS * _KV_HEADS, 8, dtype=torch.int32)
    share = empty(16 + 16 * _PROGRAMS, dtype=torch.int32)
    pieces = empty(_PROGRAMS + units.shape[0], 16, dtype=torch.int32)
    yield (
        f"hopper-share-d{size}",
        plan_launch.share_decodes_call(
            share, pieces, _lengths(), _KV_HEADS, _PROGRAMS, 16, config, units
        ),
    )
    states = launch.States.make(_PROGRAMS, config, "meta")
    sinks = empty(_HEADS, dtype=torch.float32)
    for num_units in (1, 8, 512):
        work = fold_launch.FoldWork(
            share=share,
            units=units[:num_units],
            acc=states.acc,
            sums=states.sums,
            num_rows=config.tile_rows,
        )
        call = fold_launch.fold_call(work, *_output(size), config, 0.1, sinks=sinks)
        yield f"hopper-fold-d{size}-units{num_units}", call


def _latents() -> Iterator[tuple[str, KernelCall]]:
    config = tuning.latent_config(16, 64, 16, lse=True, scaled=True)
    units = empty(_REQS, 8, dtype=torch.int32)
    share = empty(16 + 16 * _PROGRAMS, dtype=torch.int32)
    pieces = empty(_PROGRAMS + _REQS, 16, dtype=torch.int32)
    yield (
        "hopper-share-latents",
        plan_launch.share_decodes_call(share, pieces, _lengths(), 1, _PROGRAMS, 8, config, units),
    )
    work = fold_launch.FoldWork(
        share=share,
        units=units,
        acc=empty(2 * _PROGRAMS, 16, 512, dtype=torch.float32),
        sums=empty(2 * _PROGRAMS, 16, 2, dtype=torch.float32),
        num_rows=16,
    )
    scale = empty(1, dtype=torch.float32)
    call = fold_launch.fold_call(work, *_output(512), config, 0.1, k_scale=scale)
    yield "hopper-fold-latents", call


def _output(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        empty(_TOKENS, _HEADS, size, dtype=torch.bfloat16),
        empty(_TOKENS, _HEADS, dtype=torch.float32),
    )


def _lengths() -> plan_launch.Lengths:
    return plan_launch.Lengths(
        query_start_loc=empty(_REQS + 1, dtype=torch.int32),
        seq_lens=empty(_REQS, dtype=torch.int32),
        causal=empty(_REQS, dtype=torch.bool),
        window=1024,
    )
