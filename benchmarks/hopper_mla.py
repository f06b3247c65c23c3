# pyright: reportMissingImports=false
"""The kernels over latents on a card, beside FlashMLA, FlashInfer, FlashAttention-3 and Triton kernels.

    python benchmarks/hopper_mla.py --json out.json [--peers .peers] [--only H16]

Decodes over latents, over all keys and over chosen ones, the choosing, and prompts whose latents are
expanded to heads of 192 and values of 128. The record is written after each case.

Every contender's output is compared with float32 attention of one request before it is timed, with a
cold L2 and as a replayed graph. Work is planned once a step for all layers, so no plan is timed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hopper_check import Clock

from attnkit import MLAAttention, make_batch
from attnkit.backends.hopper import latent_launch, mla_plan, plan_launch, tuning
from attnkit.backends.hopper.config import LatentConfig
from attnkit.backends.hopper.mla_prefill import HopperMLAPrefill
from attnkit.backends.hopper.tuning import latent_config
from attnkit.backends.triton.mla_prefill import TritonMLAPrefill
from attnkit.bench.record import write
from attnkit.contract import MLADimensions
from attnkit.indexer import LightningIndexer
from attnkit.mla.plan import DecodePart, PrefillPart

DEVICE = torch.device("cuda")
DIMENSIONS = MLADimensions(
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
SCALE = 192**-0.5


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch of alike requests."""

    num_reqs: int
    ctx: int
    num_heads: int
    query_len: int = 1
    page_size: int = 64
    coded: bool = False

    @property
    def name(self) -> str:
        query = f" q{self.query_len}" if self.query_len > 1 else ""
        page = f" p{self.page_size}" if self.page_size != 64 else ""
        codes = " fp8" if self.coded else ""
        return f"B{self.num_reqs} ctx{self.ctx} H{self.num_heads}{query}{page}{codes}"

    @property
    def num_bytes(self) -> float:
        return (1.0 if self.coded else 2.0) * 576 * self.num_reqs * self.ctx

    @property
    def flops(self) -> float:
        rows = self.num_reqs * self.query_len * self.num_heads
        return 2.0 * rows * self.ctx * (576 + 512)


SHAPES = (
    Shape(num_reqs=64, ctx=8192, num_heads=128),
    Shape(num_reqs=128, ctx=4096, num_heads=128),
    Shape(num_reqs=64, ctx=8192, num_heads=16),
    Shape(num_reqs=1, ctx=32768, num_heads=128),
    Shape(num_reqs=64, ctx=8192, num_heads=128, query_len=2),
    Shape(num_reqs=64, ctx=8192, num_heads=64),
    Shape(num_reqs=64, ctx=8192, num_heads=32),
    Shape(num_reqs=64, ctx=8192, num_heads=8),
    Shape(num_reqs=8, ctx=8192, num_heads=128),
    Shape(num_reqs=1, ctx=1024, num_heads=16),
    Shape(num_reqs=64, ctx=8192, num_heads=16, query_len=4),
    Shape(num_reqs=64, ctx=8192, num_heads=128, page_size=16),
    Shape(num_reqs=64, ctx=8192, num_heads=16, coded=True),
    Shape(num_reqs=64, ctx=8192, num_heads=32, coded=True),
    Shape(num_reqs=64, ctx=8192, num_heads=64, coded=True),
    Shape(num_reqs=64, ctx=8192, num_heads=128, coded=True),
    Shape(num_reqs=1, ctx=32768, num_heads=128, coded=True),
    Shape(num_reqs=64, ctx=8192, num_heads=16, query_len=4, coded=True),
)

K_SCALE = 0.5
"""Of codes; a power of two, so that bfloat16 holds what they stand for."""


def block_table(num_reqs: int, num_blocks: int) -> torch.Tensor:
    """Blocks anywhere; the null block is the first of the first request, where no step writes."""
    blocks = torch.randperm(num_reqs * num_blocks, device=DEVICE, dtype=torch.int32)
    return ((blocks - blocks[0]) % len(blocks)).view(num_reqs, -1)


def tensors(s: Shape) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    num_blocks = -(-s.ctx // s.page_size)
    pool = s.num_reqs * num_blocks
    new = {"device": DEVICE, "dtype": torch.bfloat16}
    cache = torch.randn(pool, s.page_size, 576, **new)
    codes = (cache / K_SCALE).to(torch.float8_e4m3fn)
    return {
        "q": torch.randn(s.num_reqs * s.query_len, s.num_heads, 576, **new),
        "cache": codes.to(torch.bfloat16) * K_SCALE if s.coded else cache,
        "codes": codes.view(torch.uint8),
        "k_scale": torch.full((1,), K_SCALE, device=DEVICE),
        "table": block_table(s.num_reqs, num_blocks),
        "lens": torch.full((s.num_reqs,), s.ctx, device=DEVICE, dtype=torch.int32),
        "starts": torch.arange(s.num_reqs + 1, device=DEVICE, dtype=torch.int32) * s.query_len,
    }


def expected(s: Shape, t: dict[str, torch.Tensor], request: int) -> torch.Tensor:
    keys = t["cache"][t["table"][request].long()].reshape(-1, 576)[: s.ctx].float()
    q = t["q"][request * s.query_len : (request + 1) * s.query_len].float()
    scores = torch.einsum("qhd,kd->qhk", q, keys) * SCALE
    last = torch.arange(s.query_len, device=DEVICE) + s.ctx - s.query_len
    unseen = torch.arange(s.ctx, device=DEVICE)[None] > last[:, None]
    scores.masked_fill_(unseen[:, None], float("-inf"))
    return torch.einsum("qhk,kd->qhd", scores.softmax(-1), keys[:, :512])


def ours(
    s: Shape,
    t: dict[str, torch.Tensor],
    spare: int | None = None,
    *,
    coded: bool = False,
    rows: int | None = None,
    programs: int = 1,
    **changes: int,
) -> dict[str, Any]:
    """Our kernels, and the first of them alone.

    Args:
        spare: another `SPARE`.
        coded: over codes.
        rows: another height of row tiles.
        programs: of the decode kernel on a multiprocessor.
        changes: of the config.
    """

    def changed(*shape: int, **kwargs: bool) -> LatentConfig:
        config = replace(latent_config(*shape, **kwargs), **changes)
        return replace(config, rows=math.gcd(config.page_size, config.block_n))

    usual = plan_launch.SPARE, mla_plan.latent_rows, mla_plan.code_rows
    if spare is not None:
        plan_launch.SPARE = spare
    if rows is not None:
        mla_plan.latent_rows = mla_plan.code_rows = lambda *given: rows
    mla_plan.latent_config = changed
    part = DecodePart(
        query_start_loc=t["starts"],
        seq_lens=t["lens"],
        block_table=t["table"],
        max_query_len=s.query_len,
        max_seq_len=s.ctx,
    )
    planner = mla_plan.LatentPlanner(DEVICE, s.num_reqs, s.page_size)
    planner._num_programs *= programs
    work = planner.plan(part, t["q"].shape[0], mla_plan.Layers(s.num_heads, coded))
    plan_launch.SPARE, mla_plan.latent_rows, mla_plan.code_rows = usual
    mla_plan.latent_config = latent_config
    q = t["q"]
    operands = latent_launch.LatentOperands(
        query=q[..., :512],
        query_rope=q[..., 512:],
        cache=t["codes"] if coded else t["cache"],
        output=torch.full(q[..., :512].shape, float("nan"), device=DEVICE, dtype=q.dtype),
        lse=None,
        block_table=t["table"],
        scale=SCALE,
        k_scale=t["k_scale"] if coded else None,
    )
    config = changed(s.num_heads, s.page_size, work.tile_rows, lse=False, coded=coded)
    attend = latent_launch.latent_decode_call(operands, work, config)
    fold = latent_launch.fold_latents_call(operands, work, config)

    def run() -> torch.Tensor:
        attend.launch()
        fold.launch()
        return operands.output

    return {"run": run, "attend": attend.launch}


def variants(s: Shape) -> dict[str, dict[str, Any]]:
    """What else a shape may be run with: arguments of `ours`."""
    rows = s.query_len * s.num_heads
    narrow = rows <= 16
    # Registers of two programs on a multiprocessor.
    two = {"programs": 2, "maxnreg": 128, "consumer_registers": 216, "producer_registers": 40}
    found: dict[str, dict[str, Any]] = {}
    if s.coded:
        found["over numbers"] = {}
        if narrow:
            found["two programs of 2 blocks of 64"] = {**two, "block_n": 64, "stages": 2}
            found["4 blocks of 64"] = {"block_n": 64, "stages": 4}
        elif rows <= 32:
            found["4 blocks of 64"] = {"stages": 4}
        else:
            found["32 rows"] = {"rows": 32}
            found["64 rows"] = {"rows": 64}
        for who, what in found.items():
            what["coded"] = who != "over numbers"
    elif narrow:
        found["4 blocks of 32"] = {"block_n": 32, "stages": 4}
        found["5 blocks of 32"] = {"block_n": 32, "stages": 5}
    return found


def triton_mla(s: Shape, t: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Our portable backend, through its layer's impl."""
    from attnkit.backends.triton import launch as triton_launch
    from attnkit.backends.triton import mla_launch
    from attnkit.backends.triton.configs import mla_decode_config
    from attnkit.backends.triton.mla_operands import LatentOperands, LatentPages
    from attnkit.backends.triton.operands import Parts
    from attnkit.kvcache.formats import latent_format

    gpu = triton_launch.gpu_of(DEVICE)
    cache, name = (t["codes"].view(torch.float8_e4m3fn), "fp8") if s.coded else (t["cache"], "auto")
    operands = LatentOperands(
        query=t["q"],
        pages=LatentPages.of(cache, latent_format(name), DIMENSIONS, t["k_scale"], has_e4m3=True),
        output=t["q"].new_empty(*t["q"].shape[:2], 512),
        lse=None,
        query_start_loc=t["starts"],
        kv_lens=t["lens"],
        block_table=t["table"],
    )
    config = mla_decode_config(512, 64, 2, cache.element_size(), s.num_heads, s.page_size, gpu)
    _, tiles = mla_launch.head_tiles(s.num_heads, config.block_m)
    splits = max(1, min(gpu.num_sms // (s.num_reqs * tiles), config.max_segments))
    parts = None
    if splits > 1:
        numel = Parts.numel(operands, s.query_len, splits)
        memory = torch.empty(numel, device=DEVICE)
        parts = Parts.of(memory, operands, s.query_len, splits)
    work = triton_launch.DecodeWork(
        max_query_len=s.query_len, config=config, num_splits=splits, parts=parts
    )

    def run() -> torch.Tensor:
        mla_launch.launch_mla_decode(operands, SCALE, work)
        return operands.output

    return run


def rivals(s: Shape, t: dict[str, torch.Tensor], peers: Any) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    batch, q = s.num_reqs, t["q"]
    if peers.FMLA and s.page_size == 64:
        meta, _ = peers.FMLA.get_mla_metadata()
        q4 = q.view(batch, s.query_len, s.num_heads, 576)
        cache = t["cache"][:, :, None]
        found["FlashMLA"] = lambda: peers.FMLA.flash_mla_with_kvcache(
            q4,
            cache,
            t["table"],
            t["lens"],
            512,
            meta,
            softmax_scale=SCALE,
            causal=s.query_len > 1,
        )[0]
    if peers.FI:
        space = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = peers.FI.mla.BatchMLAPagedAttentionWrapper(space, backend="fa3")
        blocks = t["table"].shape[1]
        wrapper.plan(
            t["starts"],
            torch.arange(0, batch + 1, dtype=torch.int32, device=DEVICE) * blocks,
            t["table"].flatten(),
            t["lens"],
            s.num_heads,
            512,
            64,
            s.page_size,
            s.query_len > 1,
            SCALE,
            torch.bfloat16,
            torch.bfloat16,
        )
        nope, rope = q[..., :512].contiguous(), q[..., 512:].contiguous()
        latent, k_rope = t["cache"][..., :512], t["cache"][..., 512:]
        found["FlashInfer"] = lambda: wrapper.run(nope, rope, latent, k_rope)
    if peers.TD and s.query_len == 1:
        splits = 8
        o = torch.empty(batch, s.num_heads, 512, device=DEVICE, dtype=torch.bfloat16)
        lse = torch.empty(batch, s.num_heads, device=DEVICE)
        parts = torch.empty(batch, s.num_heads, splits, 513, device=DEVICE)
        cache = t["cache"][:, :, None]

        def vllm() -> torch.Tensor:
            peers.TD(
                q,
                cache,
                cache[..., :512],
                o,
                lse,
                t["table"],
                t["lens"],
                parts,
                splits,
                SCALE,
                s.page_size,
                is_mla=True,
            )
            return o

        # Its wrapper makes a tensor on the host, which no graph can hold.
        found["vLLM Triton"] = vllm
    return found


def right(s: Shape, t: dict[str, torch.Tensor], run: Callable[[], Any]) -> float:
    """Worst relative error of the first and last request."""
    out = run().reshape(s.num_reqs, s.query_len, s.num_heads, 512)
    errors = []
    for request in (0, s.num_reqs - 1):
        want = expected(s, t, request)
        errors.append(float((out[request].float() - want).norm() / want.norm()))
    return max(errors)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts of one length, whose tokens attend to themselves."""

    num_reqs: int
    length: int
    num_heads: int

    @property
    def name(self) -> str:
        return f"prompts B{self.num_reqs} S{self.length} H{self.num_heads}"

    @property
    def flops(self) -> float:
        return 1.0 * self.num_reqs * self.num_heads * self.length**2 * (192 + 128)


PROMPTS = (
    Prompts(num_reqs=1, length=8192, num_heads=128),
    Prompts(num_reqs=1, length=8192, num_heads=16),
    Prompts(num_reqs=8, length=1024, num_heads=128),
    Prompts(num_reqs=1, length=32768, num_heads=16),
)


class InTurns(HopperMLAPrefill):
    """Ours with consumers that issue their products in turns."""

    @staticmethod
    def get_name() -> str:
        return "hopper, in turns,"

    def _config(self) -> Any:
        return replace(super()._config(), turns=True)


class Short(HopperMLAPrefill):
    """Ours with tiles of 64 keys."""

    @staticmethod
    def get_name() -> str:
        return "hopper, 64 keys,"

    def _config(self) -> Any:
        return replace(super()._config(), block_n=64, rows=64, page_size=64, stages=4)


def race_prompts(clock: Clock, p: Prompts, peers: Any, errors: dict[str, float]) -> None:
    """Ours as its layer calls it, the work shared out by an earlier layer; the rivals over the same."""
    torch.manual_seed(0)
    new = {"device": DEVICE, "dtype": torch.bfloat16}
    total = p.num_reqs * p.length
    q, k = (torch.randn(total, p.num_heads, 192, **new) for _ in range(2))
    # Values as they come out of the projection, beside the keys' columns.
    v = torch.randn(total, p.num_heads, 256, **new)[..., 128:]
    starts = torch.arange(p.num_reqs + 1, dtype=torch.int32) * p.length
    plan = PrefillPart(
        num_tokens=total,
        query_start_loc=starts.to(DEVICE),
        max_query_len=p.length,
        max_seq_len=p.length,
        own_rows=None,
        chunks=(),
        query_start_loc_cpu=starts.numpy().astype("int64"),
    )
    contenders: dict[str, Callable[[], torch.Tensor]] = {}
    for backend in (HopperMLAPrefill, TritonMLAPrefill, InTurns, Short):
        output = torch.full((total, p.num_heads, 128), float("nan"), **new)
        lse = torch.empty(total, p.num_heads, device=DEVICE)
        made = backend(p.num_heads, SCALE, DIMENSIONS)

        def run(made: Any = made, output: Any = output, lse: Any = lse) -> torch.Tensor:
            made.run_prefill_new_tokens(q, k, v, plan, output, lse)
            return output

        contenders[f"{backend.get_name()} prefill"] = run
    cu = plan.query_start_loc
    if peers is not None and peers.FA3:
        contenders["FlashAttention-3"] = lambda: peers.FA3(
            q,
            k,
            v,
            p.length,
            cu,
            p.length,
            cu_seqlens_k=cu,
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
        )
    if peers is not None and peers.FI:
        space = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = peers.FI.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend="fa3")
        wrapper.plan(
            cu,
            cu,
            p.num_heads,
            p.num_heads,
            192,
            head_dim_vo=128,
            causal=True,
            sm_scale=SCALE,
            q_data_type=torch.bfloat16,
        )
        contenders["FlashInfer"] = lambda: wrapper.run(q, k, v)
    head, rows = p.num_heads - 1, min(p.length, 1024)
    want = torch.nn.functional.scaled_dot_product_attention(
        q[:rows, head][None, None].float(),
        k[:rows, head][None, None].float(),
        v[:rows, head][None, None].float(),
        is_causal=True,
        scale=SCALE,
    )[0, 0]
    tail = slice(total - 16, total)
    scores = q[tail, head].float() @ k[total - p.length :, head].float().T * SCALE
    unseen = torch.ones_like(scores, dtype=torch.bool).triu(p.length - 15)
    last = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    last = last @ v[total - p.length :, head].float()
    good = {}
    for who, attend in contenders.items():
        try:
            out = attend()
            pairs = ((out[:rows, head].float(), want), (out[tail, head].float(), last))
            error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        except Exception as failure:  # noqa: BLE001 (one must not stop the others)
            print(p.name, who, repr(failure)[:300], flush=True)
            continue
        errors[f"{p.name} {who}"] = error
        if error < 2e-2:
            good[who] = attend
        else:
            print(f"{p.name} {who}: wrong by {error}", flush=True)
    clock.race(p.name, good, flops=p.flops)
    torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A batch of decodes whose queries are told `topk` of their keys, beside one that attends to all."""

    num_reqs: int
    ctx: int
    num_heads: int
    topk: int
    stored: str = "auto"

    @property
    def name(self) -> str:
        stored = "" if self.stored == "auto" else f" {self.stored}"
        return f"chosen {self.topk} of ctx{self.ctx} B{self.num_reqs} H{self.num_heads}{stored}"


CHOSEN = (
    Chosen(num_reqs=1, ctx=65536, num_heads=128, topk=2048),
    Chosen(num_reqs=8, ctx=65536, num_heads=128, topk=2048),
    Chosen(num_reqs=8, ctx=65536, num_heads=16, topk=2048),
    Chosen(num_reqs=1, ctx=65536, num_heads=128, topk=2048, stored="fp8_ds_mla"),
    Chosen(num_reqs=8, ctx=65536, num_heads=128, topk=2048, stored="fp8_ds_mla"),
    Chosen(num_reqs=8, ctx=65536, num_heads=16, topk=2048, stored="fp8_ds_mla"),
    Chosen(num_reqs=8, ctx=65536, num_heads=128, topk=2048, stored="fp8"),
    Chosen(num_reqs=64, ctx=16384, num_heads=128, topk=2048),
    Chosen(num_reqs=256, ctx=4096, num_heads=128, topk=2048),
)


def chosen_cache(
    c: Chosen, t: dict[str, torch.Tensor], layer: MLAAttention
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of the layer's format, and the last request's rows as numbers."""
    blocks = t["table"][-1].long()
    if c.stored == "auto":
        return t["cache"], t["cache"][blocks].reshape(-1, 576)[: c.ctx].float()
    if c.stored == "fp8":
        layer._k_scale.fill_(K_SCALE)
        cache = t["codes"].view(torch.float8_e4m3fn)
        return cache, cache[blocks].reshape(-1, 576)[: c.ctx].float() * K_SCALE
    pool = t["cache"].shape[0]
    cache = torch.zeros(pool, 64, 656, device=DEVICE, dtype=torch.uint8)
    numbers = t["cache"].view(-1, 576)
    slots = torch.arange(pool * 64, device=DEVICE)
    scale = layer._k_scale
    impl: Any = layer.impl
    impl.do_kv_cache_update(numbers[:, :512], numbers[:, None, 512:], cache, slots, c.stored, scale)
    rows = cache[blocks].reshape(-1, 1, 656)[: c.ctx]
    parts = impl.layer.cache_format.decode(rows, 512, 64, scale, scale)
    return cache, torch.cat(parts, dim=-1)[:, 0].float()


def race_chosen(clock: Clock, c: Chosen, errors: dict[str, float]) -> None:
    """Decodes as layers call them, the plan made by an earlier one; the lists are given. Dense ones
    read a cache of numbers, whatever the sparse ones read."""
    s = Shape(num_reqs=c.num_reqs, ctx=c.ctx, num_heads=c.num_heads)
    t = tensors(s)
    order = torch.rand(s.num_reqs, s.ctx, device=DEVICE).argsort(dim=1)[:, : c.topk]
    lists = order.sort(dim=1).values.int()
    batch = make_batch(
        [1] * s.num_reqs, [s.ctx] * s.num_reqs, t["table"].tolist(), 64, device=DEVICE
    )
    projection = torch.nn.Linear(512, s.num_heads * 256, bias=False, device=DEVICE)
    projection.to(torch.bfloat16)
    good = {}
    kinds = ("", ", no gather", ", 16 queries at once")
    names = ["hopper_mla", *(f"hopper_mla_sparse{kind}" for kind in kinds[: 2 + (c.num_reqs > 16)])]
    at_once = tuning.MAX_CHOSEN_TOKENS
    for name in (*names, "triton_mla_sparse"):
        backend, _, kind = name.partition(", ")
        is_sparse = backend.endswith("sparse")
        indexer: Any = SimpleNamespace(topk_indices_buffer=lists) if is_sparse else None
        layer = MLAAttention(
            s.num_heads,
            DIMENSIONS,
            projection,
            SCALE,
            backend=backend,
            dtype=torch.bfloat16,
            device=DEVICE,
            block_size=64,
            kv_cache_dtype=c.stored if is_sparse else "auto",
            indexer=indexer,
        )
        kept = c if is_sparse else replace(c, stored="auto")
        cache, keys = chosen_cache(kept, t, layer)
        if kind == "16 queries at once":
            tuning.MAX_CHOSEN_TOKENS = 16
        plan = layer.make_builder().build(0, batch)

        def run(layer: Any = layer, plan: Any = plan, cache: Any = cache) -> torch.Tensor:
            return layer.impl.forward_mqa(t["q"], cache, plan, layer)[0]

        out = run()[-1].float()
        tuning.MAX_CHOSEN_TOKENS = at_once
        keys = keys[lists[-1].long()] if is_sparse else keys
        want = (t["q"][-1].float() @ keys.T * SCALE).softmax(-1) @ keys[:, :512]
        errors[f"{c.name} {name}"] = error = float((out - want).norm() / want.norm())
        if error < 2e-2:
            good[name] = run
        else:
            print(f"{c.name} {name}: wrong by {error}", flush=True)
        if kind == "no gather":
            impl: Any = layer.impl
            impl._gather = lambda *args: None
    clock.race(c.name, good, num_bytes=s.num_bytes)
    clock.race(c.name, good, num_bytes=s.num_bytes, graph=True)
    torch.cuda.empty_cache()


INDEXED = ((1, 65536), (8, 65536), (64, 8192))
"""Requests and their lengths, for an indexer of 64 heads of 128 as DeepSeek-V3.2's."""


def race_indexer(clock: Clock, num_reqs: int, ctx: int, errors: dict[str, float]) -> None:
    """What choosing 2,048 keys takes: this step's keys written, scores, and the best of them. The lists
    are compared with those of torch's kernels over the same cache, where they may differ in ties of
    rounding only."""
    torch.manual_seed(0)
    case = f"indexer of ctx{ctx} B{num_reqs}"
    num_blocks = -(-ctx // 64)
    new = {"device": DEVICE, "dtype": torch.bfloat16}
    q, k = torch.randn(num_reqs, 64, 128, **new), torch.randn(num_reqs, 128, **new)
    weights = torch.rand(num_reqs, 64, device=DEVICE)
    tables = block_table(num_reqs, num_blocks).tolist()
    batch = make_batch([1] * num_reqs, [ctx] * num_reqs, tables, 64, device=DEVICE)
    lists, cache = {}, None
    for backend in ("torch", "triton"):
        indexer = LightningIndexer(
            64, 128, 2048, dtype=torch.bfloat16, device=DEVICE, block_size=64, backend=backend
        )
        if cache is None:
            cache = torch.zeros(num_reqs * num_blocks, 1, 64, 132, **{**new, "dtype": torch.uint8})
            rows = torch.randn(num_reqs * num_blocks * 64, 128, **new)
            slots = torch.arange(rows.shape[0], device=DEVICE)
            indexer.kernels.write(rows, cache[:, 0], slots)

        def run(indexer: Any = indexer, cache: Any = cache) -> torch.Tensor:
            return indexer.choose(q, k, weights, cache, batch)

        lists[backend] = run().clone()
    same = [
        len(set(a) & set(b)) / len(b)
        for a, b in zip(*(lists[x].tolist() for x in ("triton", "torch")), strict=True)
    ]
    errors[f"{case} lists that differ"] = 1.0 - min(same)
    num_bytes = 132.0 * num_reqs * ctx
    clock.race(case, {"indexer (triton)": run}, num_bytes=num_bytes)
    clock.race(case, {"indexer (triton)": run}, num_bytes=num_bytes, graph=True)
    torch.cuda.empty_cache()


def race_shape(clock: Clock, s: Shape, peers: Any, errors: dict[str, float]) -> None:
    """Decodes over all keys."""
    t = tensors(s)
    mine = ours(s, t, coded=s.coded)
    contenders = {"hopper_mla": mine["run"]}
    if peers is not None:
        contenders |= rivals(s, t, peers)
    contenders["hopper_mla, even shares"] = ours(s, t, spare=0, coded=s.coded)["run"]
    for who, what in variants(s).items():
        contenders[f"hopper_mla, {who}"] = ours(s, t, **what)["run"]
    contenders["triton_mla"] = triton_mla(s, t)
    good = {}
    for who, run in contenders.items():
        try:
            errors[f"{s.name} {who}"] = error = right(s, t, run)
        except Exception as failure:  # noqa: BLE001 (one must not stop the others)
            print(s.name, who, repr(failure)[:300], flush=True)
            continue
        if error < 2e-2:
            good[who] = run
        else:
            print(f"{s.name} {who}: wrong by {error}", flush=True)
    good["hopper_mla, no fold"] = mine["attend"]
    amounts: Any = {"flops": s.flops} if s.num_heads > 32 else {"num_bytes": s.num_bytes}
    clock.race(s.name, good, **amounts)
    clock.race(s.name, good, **amounts, graph=True)
    torch.cuda.empty_cache()


def cases(peers: Any) -> Iterator[tuple[str, Callable[[Clock, dict[str, float]], None]]]:
    """Name and race of each case, those of chosen keys first."""
    for c in CHOSEN:
        yield c.name, lambda clock, errors, c=c: race_chosen(clock, c, errors)
    for num_reqs, ctx in INDEXED:
        name = f"indexer of ctx{ctx} B{num_reqs}"
        yield name, lambda clock, errors, n=num_reqs, x=ctx: race_indexer(clock, n, x, errors)
    for p in PROMPTS:
        yield p.name, lambda clock, errors, p=p: race_prompts(clock, p, peers, errors)
    for s in SHAPES:
        yield s.name, lambda clock, errors, s=s: race_shape(clock, s, peers, errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--peers", help="folder of peers.py")
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    options = parser.parse_args()
    import triton

    peers = None
    if options.peers:
        sys.path.insert(0, options.peers)
        import peers as module

        peers = module
        peers.load_peers()
    clock = Clock()
    errors: dict[str, float] = {}
    for name, race in cases(peers):
        if options.only not in name:
            continue
        race(clock, errors)
        # After each case: a run that is cut off loses its last one only.
        record = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": options.commit,
            "errors": errors,
            "rows": clock.rows,
        }
        write(record, options.json)
    own_names = ("hopper_mla", "hopper_mla_sparse", "hopper prefill")
    # Of chosen keys the sparse one: it comes behind the dense one.
    mine = {r["case"] + str(r.get("graph")): r for r in clock.rows if r["who"] in own_names}
    for r in clock.rows:
        own = mine.get(r["case"] + str(r.get("graph")))
        if own and r.get("ms") and r is not own:
            print(
                f"{r['case']:28s} {'graph' if r['graph'] else '':5s} {r['who']:26s} / ours "
                f"{r['ms'] / own['ms']:.2f}"
            )


if __name__ == "__main__":
    main()
