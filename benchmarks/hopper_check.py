# pyright: reportMissingImports=false
"""The hopper kernels on a card, in one call: every variant checked, then variants and rivals timed.

    python benchmarks/hopper_check.py check stress time --jobs 14 --json out.json [--peers .peers]

check: batches of ragged lengths, in processes side by side since most of the time is compilation. Free
pages, tails, the null block and keys left of every window are NaN, outputs start as NaN, and a float64
oracle on the card judges. Every case runs twenty times and must give equal bits.
stress: the same batches again and again in several processes at once, which must give equal bits: a copy
that comes too early or too late shows when others get in its way, one run in hundreds.
time: prefill and decode shapes with other tile choices, beside FlashAttention-3 and cuDNN (through
`peers.py`), all in turns; then the sweeps in which cliffs would show, the cache write and host costs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnkit.backends.hopper import cache_launch, fold_launch, launch, tuning
from attnkit.backends.hopper.config import PrefillConfig
from attnkit.backends.hopper.plan import Geometry, HopperMetadataBuilder, Plan, PrefillPlan
from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Stored
from attnkit.bench import timing
from attnkit.bench.record import write
from attnkit.contract import (
    AttentionVariant,
    CommonAttentionMetadata,
    FullAttentionSpec,
    VllmConfig,
)

DEVICE = torch.device("cuda")
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch and layer.

    Attributes:
        queries, keys: per request.
        layout: "HND" and "NHD" keep K and V of a token side by side, "split" apart as vLLM's did.
        causal: of all, or per request.
        coded: pages hold float8 codes, with a scale for each KV head.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    layout: str = "HND"
    causal: bool | tuple[bool, ...] = True
    window: int | None = None
    cap: float | None = None
    alibi: int = 0
    sinks: bool = False
    scale: float | None = None
    coded: bool = False

    @property
    def variant(self) -> AttentionVariant:
        heads = self.num_heads
        return AttentionVariant.from_impl_args(
            num_heads=heads,
            scale=self.head_size**-0.5 if self.scale is None else self.scale,
            sliding_window=self.window,
            logits_soft_cap=self.cap,
            alibi_slopes=[0.5 / (h + 1) for h in range(heads)] if self.alibi else None,
            use_alibi_sqrt=self.alibi == 2,
            sinks=torch.linspace(-2, 3, heads) if self.sinks else None,
        ).to(DEVICE)

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            num_kv_heads=self.num_kv_heads,
            group_size=self.num_heads // self.num_kv_heads,
            head_size=self.head_size,
            page_size=self.page_size,
            window=self.window,
            coded=self.coded,
        )


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What a batch is run with."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    batch: CommonAttentionMetadata
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @property
    def operands(self) -> launch.Operands:
        return launch.Operands(
            query=self.query,
            key=self.key,
            value=self.value,
            output=self.output,
            lse=self.lse,
            block_table=self.batch.block_table_tensor,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    @property
    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in float64."""
        if self.k_scale is None or self.v_scale is None:
            return self.key.double(), self.value.double()
        key, value = (
            x.view(torch.float8_e4m3fn).double() * scale[:, None, None]
            for x, scale in ((self.key, self.k_scale), (self.value, self.v_scale))
        )
        return key, value


def views_of(pool: torch.Tensor, b: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (pages, heads, tokens, size) of a pool in one of the layouts."""
    if b.layout == "split":
        key, value = (x.transpose(1, 2) for x in pool.unbind(1))
    elif b.layout == "NHD":
        key, value = pool.transpose(1, 2).split(b.head_size, dim=-1)
    else:
        key, value = pool.split(b.head_size, dim=-1)
    return key, value


def make(b: Batch, *, poison: bool, seed: int = 0) -> Tensors:
    """Random tensors; with `poison`, NaN wherever nothing may be read."""
    torch.manual_seed(seed)
    pages = [-(-n // b.page_size) for n in b.keys]
    total = sum(pages) + 5
    heads, size, page = b.num_kv_heads, b.head_size, b.page_size
    shapes = {
        "split": (total, 2, page, heads, size),
        "NHD": (total, page, heads, 2 * size),
        "HND": (total, heads, page, 2 * size),
    }
    pool = torch.randn(shapes[b.layout], device=DEVICE, dtype=b.dtype)
    key, value = views_of(pool, b)
    ids = torch.randperm(total - 1)[: sum(pages)] + 1
    table = torch.zeros(len(pages), max(pages, default=0) + 3, dtype=torch.int32)
    for r, own in enumerate(ids.split(pages)):
        table[r, : len(own)] = own
    if poison:
        free = torch.ones(total, dtype=torch.bool)
        free[ids] = False
        for x in (key, value):
            x[free.to(DEVICE)] = NAN
            for r, n in enumerate(b.keys):
                if n % page:
                    x[table[r, n // page], :, n % page :] = NAN
                first = n - b.queries[r] - b.window + 1 if b.window else 0
                for p in range(max(first, 0) // page + 1 if first > 0 else 0):
                    x[table[r, p], :, : max(0, min(page, first - p * page))] = NAN
        for r, n in enumerate(b.keys):
            if b.window:
                table[r, : max(0, n - b.queries[r] - b.window + 1) // page] = 0
    k_scale = v_scale = None
    if b.coded:
        key, value = views_of(pool.to(torch.float8_e4m3fn).view(torch.uint8), b)
        k_scale, v_scale = torch.linspace(0.5, 1.5, 2 * heads, device=DEVICE).split(heads)
    starts = torch.tensor([0, *itertools.accumulate(b.queries)], dtype=torch.int32)
    num_tokens = int(starts[-1])
    shape = (num_tokens + 3, b.num_heads, size)
    query = torch.randn(shape, device=DEVICE, dtype=b.dtype)
    query[num_tokens:] = NAN
    seq_lens = torch.tensor(b.keys, dtype=torch.int32)
    causal = b.causal
    batch = CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(DEVICE),
        num_reqs=len(b.keys),
        num_actual_tokens=num_tokens,
        max_query_len=max(b.queries, default=0),
        max_seq_len=max(b.keys, default=0),
        block_table_tensor=table.to(DEVICE),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=DEVICE),
        causal=torch.tensor(causal, device=DEVICE) if isinstance(causal, tuple) else causal,
        seq_lens_cpu_upper_bound=seq_lens,
    )
    return Tensors(
        query=query,
        key=key,
        value=value,
        output=torch.full(shape, NAN, device=DEVICE, dtype=b.dtype),
        lse=torch.full(shape[:2], NAN, device=DEVICE),
        batch=batch,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def make_builder(b: Batch) -> HopperMetadataBuilder:
    spec = FullAttentionSpec(
        block_size=b.page_size,
        num_kv_heads=b.num_kv_heads,
        head_size=b.head_size,
        dtype=b.dtype,
    )
    return HopperMetadataBuilder(spec, ["layer"], VllmConfig(), DEVICE)


def calls(b: Batch, t: Tensors, plan: Plan) -> list[KernelCall]:
    """The launches of one layer; the LSE is always written, as the rivals do."""
    variant = b.variant
    score = launch.score_config(variant, lse=True)
    g = b.geometry
    shape = (g.head_size, g.group_size, g.page_size, score)
    found, merges = [], 0
    if plan.prefill is not None:
        found += prefill_calls(b, t, plan.prefill, tuning.prefill_config(*shape, scaled=b.coded))
        # Decodes that start beside prompts follow them, before their splits are put together.
        merges = len(found) - (plan.prefill.parts is not None)
    if plan.decode is not None:
        d = plan.decode
        config = tuning.decode_config(*shape, d.tile_rows, coded=b.coded, beside=d.beside)
        work = (d.share, d.pieces, d.states)
        found.insert(merges, launch.decode_call(t.operands, variant, *work, config))
        if d.fold is not None:
            scale, sinks = launch.log2_scale(variant), variant.sinks
            call = fold_launch.fold_call(d.fold, t.output, t.lse, config, scale, sinks=sinks)
            found.insert(merges + 1, call)
    return found


def prefill_calls(b: Batch, t: Tensors, p: PrefillPlan, config: PrefillConfig) -> list[KernelCall]:
    """Those of the prompts: of float8 pages first into others, and splits of row tiles put together."""
    found, operands = [], t.operands
    if b.coded:
        assert p.pages is not None
        size, num_pages = b.head_size, p.pages.shape[1]
        pool = t.query.new_empty(num_pages, b.num_kv_heads, b.page_size, 2 * size)
        found.append(cache_launch.unpack_call(operands, p.pages, t.batch.seq_lens, pool))
        operands = replace(
            operands, key=pool[..., :size], value=pool[..., size:], block_table=p.page_table
        )
    if p.parts is not None:
        operands = replace(operands, output=p.parts.output, lse=p.parts.lse)
        config = replace(config, split=True, score=replace(config.score, sinks=False, lse=True))
    work = (p.starts, p.num_programs, p.records, config)
    found.append(launch.prefill_call(operands, b.variant, *work))
    if p.parts is not None:
        sinks = b.variant.sinks
        found.append(launch.merge_call(p.parts, p.records, t.output, t.lse, sinks, config))
    return found


def expected(b: Batch, t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in float64, request by request, from gathered pages."""
    v = b.variant
    group = b.num_heads // b.num_kv_heads
    numbers = t.numbers
    out = torch.zeros(t.query.shape, dtype=torch.float64, device=DEVICE)
    lse = torch.full(t.query.shape[:2], -math.inf, dtype=torch.float64, device=DEVICE)
    row = 0
    for r, (q_len, n) in enumerate(zip(b.queries, b.keys, strict=True)):
        rows = slice(row, row + q_len)
        row += q_len
        causal = b.causal[r] if isinstance(b.causal, tuple) else b.causal
        pages = t.batch.block_table_tensor[r, : -(-n // b.page_size)].long()
        k, value = (
            x[pages].transpose(1, 2).flatten(0, 1)[:n].repeat_interleave(group, 1) for x in numbers
        )
        for part in range(0, q_len, 256):
            some = slice(rows.start + part, min(rows.start + part + 256, rows.stop))
            at = n - q_len + part + torch.arange(some.stop - some.start, device=DEVICE)
            ahead = torch.arange(n, device=DEVICE)[None, :] - at[:, None]
            s = torch.einsum("qhd,khd->hqk", t.query[some].double(), k) * v.scale
            if v.logits_soft_cap is not None:
                s = v.logits_soft_cap * torch.tanh(s / v.logits_soft_cap)
            if v.alibi_slopes is not None:
                far = -(-ahead).clamp(min=0).double().sqrt() if v.use_alibi_sqrt else ahead
                s = s + v.alibi_slopes[:, None, None].double() * far
            seen = torch.ones_like(ahead, dtype=torch.bool)
            if causal:
                seen &= ahead <= 0
            if b.window is not None:
                seen &= ahead > -b.window
                if not causal:
                    seen &= ahead < b.window
            s = s.masked_fill(~seen, -math.inf)
            sink = s.new_full((b.num_heads, s.shape[1], 1), -math.inf)
            if v.sinks is not None:
                sink = v.sinks.double()[:, None, None].expand_as(sink)
            logits = torch.cat([s, sink], dim=2)
            lse[some] = logits.logsumexp(2).T
            weights = logits.softmax(2).nan_to_num(0.0)[..., :-1]
            used = torch.where(seen.any(0)[:, None, None], value, 0.0)
            out[some] = torch.einsum("hqk,khd->qhd", weights, used)
    return out, lse


def judge(b: Batch, t: Tensors, want: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Relative error of the output, largest error of an element and of an LSE.

    Raises:
        AssertionError: something is wrong.
    """
    num = sum(b.queries)
    out, lse = (x[:num] for x in want)
    got, got_lse = t.output[:num].double(), t.lse[:num].double()
    assert t.output[num:].isnan().all(), "padding rows were written"
    if not num:
        return {"err": 0.0, "worst": 0.0, "lse": 0.0}
    assert not got.isnan().any(), f"{int(got.isnan().any(2).sum())} rows are NaN"
    assert torch.equal(got_lse.isinf(), lse.isinf()), "LSE is infinite elsewhere"
    off = (got - out).abs()
    finite = lse.isfinite()
    measured = {
        "err": float(off.norm() / out.norm().clamp(min=1e-30)),
        "worst": float((off.amax(2) / out.abs().amax(2).clamp(min=0.02)).max()),
        "lse": float((got_lse - lse)[finite].abs().max()) if finite.any() else 0.0,
    }
    bf16 = b.dtype == torch.bfloat16
    limits = {"err": 4e-3 if bf16 else 6e-4, "worst": 6e-2 if bf16 else 8e-3, "lse": 2e-4}
    bad = {k: v for k, v in measured.items() if not v <= limits[k]}
    if bad:
        row, head = divmod(int(off.amax(2).argmax()), b.num_heads)
        raise AssertionError(f"{bad} over {limits}; worst at row {row}, head {head}")
    return measured


def check_one(work: tuple[str, Batch, PrefillConfig | None]) -> dict[str, Any]:
    """Run one case twenty times against the oracle, with the usual prefill config or another."""
    name, b, choice = work
    started = time.perf_counter()
    report: dict[str, Any] = {"name": name}
    try:
        t = make(b, poison=True)
        want = expected(b, t)
        builder = make_builder(b)
        first = None
        for _ in range(20):
            t.output.fill_(NAN)
            t.lse.fill_(NAN)
            plan = builder.build(0, t.batch).plan(b.geometry)
            if choice is None:
                for call in calls(b, t, plan):
                    call.launch()
            else:
                _other_choice(b, t, choice)()
            torch.cuda.synchronize()
            report.update(judge(b, t, want))
            now = t.output.clone().view(torch.int16)
            assert first is None or torch.equal(first, now), "bits differ between runs"
            first = now
        report["ok"] = True
    except Exception as error:  # noqa: BLE001 (one bad case must not hide the others)
        report |= {"ok": False, "error": repr(error)[:400], "trace": traceback.format_exc()[-1500:]}
    return report | {"seconds": time.perf_counter() - started}


def check_cases() -> Iterator[tuple[str, Batch]]:
    """Shapes in which every branch of the kernels runs: loops of zero and of many turns, both ends of a
    window, boxes of all sizes, and units of one to many pieces."""
    ragged = Batch(
        queries=(200, 1, 0, 300, 129, 5, 700, 1, 64),
        keys=(200, 777, 0, 1000, 129, 4096, 2100, 33, 64),
    )
    for size, group in itertools.product((64, 128, 256), (4, 1)):
        b = replace(ragged, head_size=size, num_kv_heads=8 // group)
        yield f"ragged D{size} group {group}", b
        yield f"ragged fp16 D{size} group {group}", replace(b, dtype=torch.float16)
    many = Batch(queries=(1024,) * 20 + (700, 40), keys=(1024,) * 20 + (2100, 8000), num_heads=16)
    for size in (64, 128, 256):
        yield f"many row tiles D{size}", replace(many, head_size=size, num_kv_heads=4)
    yield "many row tiles MHA", replace(many, num_kv_heads=16)
    for page, layout in itertools.product((16, 32, 48, 64, 128, 160, 256), ("HND", "NHD", "split")):
        yield f"page {page} {layout}", replace(ragged, page_size=page, layout=layout)
    for heads, kv_heads in ((7, 1), (6, 2), (8, 1), (24, 2), (64, 1), (40, 8)):
        yield f"heads {heads}/{kv_heads}", replace(ragged, num_heads=heads, num_kv_heads=kv_heads)
    for size, window in itertools.product((64, 128, 256), (1, 100, 128, 1000)):
        b = replace(ragged, head_size=size, window=window)
        yield f"window {window} D{size}", b
    yield "window page 256", replace(ragged, window=300, page_size=256)
    yield "window page 48", replace(ragged, window=77, page_size=48)
    for size in (64, 128, 256):
        b = replace(ragged, head_size=size)
        yield f"sinks D{size}", replace(b, sinks=True)
        yield f"sinks and window D{size}", replace(b, sinks=True, window=128)
        yield f"cap D{size}", replace(b, cap=20.0, scale=0.3)
        yield f"cap and window D{size}", replace(b, cap=20.0, window=400)
        yield f"alibi D{size}", replace(b, alibi=1)
        yield f"alibi sqrt D{size}", replace(b, alibi=2)
    yield "negative scale", replace(ragged, scale=-0.1)
    yield "everything", replace(ragged, cap=20.0, window=300, alibi=1, sinks=True)
    yield "not causal", replace(ragged, causal=False)
    yield "not causal, window", replace(ragged, causal=False, window=90)
    flags = tuple(r % 2 == 0 for r in range(len(ragged.keys)))
    yield "causal per request", replace(ragged, causal=flags, window=333)
    yield "more queries than keys", replace(ragged, queries=(300, 40, 5), keys=(150, 0, 2))
    yield "one token", replace(ragged, queries=(1,), keys=(1,))
    rng = random.Random(1)
    mixed = [rng.choice((1, 1, 1, 2, 5, 16)) for _ in range(64)]
    for size, group in ((64, 4), (128, 4), (128, 1), (128, 8), (256, 4)):
        heads: Any = {"num_heads": 8, "num_kv_heads": 8 // group, "head_size": size}
        yield (
            f"decode 64 ragged D{size} group {group}",
            Batch(queries=tuple(mixed), keys=tuple(rng.randint(q, 5000) for q in mixed), **heads),
        )
        yield f"decode one long D{size} group {group}", Batch(queries=(1,), keys=(32768,), **heads)
        yield (
            f"decode 300 short D{size} group {group}",
            Batch(queries=(1,) * 300, keys=tuple(rng.randint(1, 200) for _ in range(300)), **heads),
        )
    short = Batch(queries=(1, 2, 0, 4, 1, 3), keys=(777, 2, 0, 4096, 33, 20000))
    for size in (64, 128, 256):
        b = replace(short, head_size=size)
        yield f"short D{size} sinks and window", replace(b, sinks=True, window=128)
        yield f"short D{size} cap and window", replace(b, cap=20.0, window=400, page_size=48)
        yield f"short D{size} alibi", replace(b, alibi=1, dtype=torch.float16)
        yield f"short D{size} alibi sqrt", replace(b, alibi=2, layout="split")
        yield f"short D{size} not causal", replace(b, causal=False, page_size=256)
        for num in (130, 256, 300):
            alike = replace(b, queries=(1,) * num, keys=(1000,) * num)
            yield f"alike {num} D{size}", alike
        for layout in ("HND", "NHD", "split"):
            coded = replace(ragged, head_size=size, coded=True, layout=layout)
            yield f"codes D{size} {layout}", coded
        coded = replace(short, head_size=size, coded=True)
        yield f"codes D{size} window and cap", replace(coded, window=400, cap=20.0, page_size=48)
        yield f"codes D{size} sinks fp16", replace(coded, sinks=True, dtype=torch.float16)
        yield f"codes D{size} alibi", replace(coded, alibi=1, page_size=256)
        one = {"head_size": size, "coded": True}
        yield f"codes D{size} one long", Batch(queries=(1,), keys=(32768,), **one)
        yield f"codes D{size} 16 queries", Batch(queries=(16,) * 9, keys=(3000,) * 9, **one)
    yield "decode window", Batch(queries=(1, 4, 16), keys=(9000, 20000, 300), window=4096)
    long = Batch(queries=(1, 1, 2) * 34, keys=tuple(rng.randint(20, 20000) for _ in range(102)))
    for size in (64, 128, 256):
        b = replace(long, head_size=size)
        yield f"small shares D{size}", b
        yield f"small shares D{size} codes", replace(b, coded=True)
    few = Batch(queries=(128, 20), keys=(20000, 9000))
    beside = Batch(queries=(512, *(1,) * 40), keys=(9000, *(3000,) * 40))
    for size in (64, 128, 256):
        b = replace(few, head_size=size)
        yield f"splits D{size}", b
        yield f"splits D{size} sinks and window", replace(b, sinks=True, window=1500)
        yield f"splits D{size} cap and window", replace(b, cap=20.0, window=400, page_size=48)
        yield f"splits D{size} alibi", replace(b, alibi=1, dtype=torch.float16)
        yield f"splits D{size} not causal", replace(b, causal=False, page_size=256)
        yield f"splits D{size} codes", replace(b, coded=True)
        heads = {"num_heads": 32, "num_kv_heads": 8, "head_size": size}
        yield f"beside D{size}", replace(beside, **heads)
        yield f"beside D{size} splits", replace(beside, queries=(200, *(1,) * 40), **heads)
        yield f"beside D{size} codes", replace(beside, coded=True, **heads)
    for size in (64, 128, 256):
        b = replace(ragged, head_size=size, num_kv_heads=8, page_size=128, layout="split")
        yield f"page 128 MHA D{size}", b
    for b in (ragged, replace(ragged, num_kv_heads=8), replace(ragged, head_size=256)):
        # A cut batch, in which no request has more than one row tile or K/V tile.
        lens = (17, 30, 128, 100)
        yield (
            f"one tile each D{b.head_size} {b.num_kv_heads} KV heads",
            replace(b, queries=lens, keys=lens),
        )


def check_graph(num: int) -> dict[str, Any]:
    """Decodes of `num` queries captured once and replayed with other lengths and pages, against float64.
    12 queries of 4 heads are tiles of 64 rows, which a kernel of their own folds."""
    report: dict[str, Any] = {"name": f"graph replay of {num} queries", "ok": False}
    shape: Any = {"num_heads": 8, "num_kv_heads": 2}
    most = 8 * num
    batches = [
        Batch(queries=(num,) * 8, keys=(100, 5000, 17, 300, 2000, num, 64, 900), **shape),
        Batch(queries=(num,) * 5 + (0,) * 3, keys=(70, num, 8000, 33, 40, 0, 0, 0), **shape),
    ]
    try:
        builder = make_builder(batches[0])
        made = [make(b, poison=True, seed=i) for i, b in enumerate(batches)]
        pages = max(t.key.shape[0] for t in made)
        static = make(replace(batches[0], keys=(16 * (pages // 8 + 1),) * 8), poison=False)
        width = max(t.batch.block_table_tensor.shape[1] for t in made)
        table = torch.zeros(8, width, dtype=torch.int32, device=DEVICE)
        batch = static.batch.replace(block_table_tensor=table)
        static = replace(static, batch=batch)

        def load(t: Tensors) -> None:
            own = t.batch.block_table_tensor
            table.zero_()
            table[:, : own.shape[1]] = own
            batch.seq_lens.copy_(t.batch.seq_lens)
            batch.query_start_loc.copy_(t.batch.query_start_loc)
            static.query[:most].zero_()
            static.query[: t.batch.num_actual_tokens].copy_(t.query[: t.batch.num_actual_tokens])
            static.key[: t.key.shape[0]] = t.key
            static.value[: t.value.shape[0]] = t.value
            static.output.fill_(NAN)

        load(made[0])
        plan = builder.build_for_cudagraph_capture(batch).plan(batches[0].geometry)
        run = calls(batches[0], static, plan)
        for call in run:
            call.launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in run:
                call.launch()
        for b, t in zip(batches, made, strict=True):
            load(t)
            builder.build(0, batch)
            graph.replay()
            torch.cuda.synchronize()
            out, _ = expected(b, t)
            live = sum(b.queries)
            error = (static.output[:live].double() - out[:live]).norm() / out.norm()
            assert error < 4e-3, f"replay of {b.keys} is off by {error:.2e}"
            assert static.output[live:most].isnan().all(), "a padded row was written"
        report["ok"] = True
    except Exception as error:  # noqa: BLE001 (reported beside the others)
        report |= {"error": repr(error)[:400], "trace": traceback.format_exc()[-1500:]}
    return report


def check_choices() -> Iterator[tuple[str, Batch, PrefillConfig]]:
    """The other configs that are timed, on prompts alone: a launch of theirs has no decodes."""
    prompts = Batch(queries=(200, 300, 129, 700, 1024), keys=(200, 1000, 129, 2100, 1024))
    for size, kv_heads in {(s[4], 8 * s[3] // s[2]) for s in PREFILL.values()}:
        b = replace(prompts, head_size=size, num_kv_heads=kv_heads)
        score = launch.score_config(b.variant, lse=True)
        config = tuning.prefill_config(size, 8 // kv_heads, 16, score)
        for who, choice in prefill_variants(config).items():
            yield f"{who} D{size} {8}/{kv_heads}", b, choice


def check(jobs: int) -> list[dict[str, Any]]:
    cases = [*check_choices(), *((name, b, None) for name, b in check_cases())]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        reports = pool.map(check_one, cases, 1)
    reports += [check_graph(num) for num in (1, 12)]
    for r in reports:
        if not r["ok"]:
            print("BAD ", r["name"], r["error"], flush=True)
    good = [r for r in reports if r["ok"]]
    worst = max((r.get("err", 0.0) for r in good), default=0.0)
    print(f"check: {len(good)} of {len(reports)} right, worst relative error {worst:.2e}")
    return reports


def stress_some(work: tuple[str, float]) -> dict[str, tuple[int, int]]:
    """Run the cases whose name begins so for some seconds: runs of each, and those with other bits."""
    prefix, seconds = work
    cases = [(name, b) for name, b in check_cases() if name.startswith(prefix)]
    made = [(name, b, make(b, poison=True), make_builder(b)) for name, b in cases]
    first: dict[str, torch.Tensor] = {}
    counts = {name: (0, 0) for name, _ in cases}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, b, t, builder in made:
            for _ in range(20):
                t.output.fill_(NAN)
                for call in calls(b, t, builder.build(0, t.batch).plan(b.geometry)):
                    call.launch()
                now = t.output.view(torch.int16)
                same = torch.equal(first.setdefault(name, now.clone()), now)
                num_runs, num_bad = counts[name]
                counts[name] = (num_runs + 1, num_bad + (not same))
    return counts


def stress(seconds: float = 25.0) -> dict[str, tuple[int, int]]:
    """Eight processes: four of decodes, four of everything."""
    found: dict[str, tuple[int, int]] = {}
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        for counts in pool.imap_unordered(stress_some, [("decode", seconds), ("", seconds)] * 4):
            for name, pair in counts.items():
                before = found.get(name, (0, 0))
                found[name] = (before[0] + pair[0], before[1] + pair[1])
    bad = {name: pair for name, pair in found.items() if pair[1]}
    print(
        f"stress: {sum(p[0] for p in found.values())} runs; with other bits: {bad or 'none'}",
        flush=True,
    )
    return found


# Timing


PREFILL = {
    "B16 S1024 16/16 D128": (16, 1024, 16, 16, 128),
    "B4 S4096 16/16 D128": (4, 4096, 16, 16, 128),
    "B1 S16384 16/16 D128": (1, 16384, 16, 16, 128),
    "B4 S4096 32/8 D128": (4, 4096, 32, 8, 128),
    "B1 S16384 32/32 D64": (1, 16384, 32, 32, 64),
    "B1 S16384 8/8 D256": (1, 16384, 8, 8, 256),
}
DECODE = {
    "B1 ctx32768 32/8 D128": (1, 32768, 32, 8, 128),
    "B8 ctx8192 32/8 D128": (8, 8192, 32, 8, 128),
    "B64 ctx4096 32/8 D128": (64, 4096, 32, 8, 128),
    "B256 ctx1024 32/8 D128": (256, 1024, 32, 8, 128),
    "B128 ctx8192 64/8 D128": (128, 8192, 64, 8, 128),
    "B64 ctx4096 32/32 D128": (64, 4096, 32, 32, 128),
    "B64 ctx4096 32/8 D64": (64, 4096, 32, 8, 64),
    "B1 ctx1024 32/8 D128": (1, 1024, 32, 8, 128),
}


def prefill_variants(config: PrefillConfig) -> dict[str, PrefillConfig]:
    """Other choices to measure beside the one that `tuning` makes."""
    found = {
        "turns" if not config.turns else "no turns": replace(config, turns=not config.turns),
    }
    if config.head_size < 256:
        found["two Q"] = replace(config, q_stages=2)
    if config.head_size == 64:
        two = replace(
            config,
            num_consumers=2,
            block_n=128,
            rows=math.gcd(config.page_size, 128),
            stages=2,
            maxnreg=168,
            consumer_registers=240,
            producer_registers=24,
        )
        found["2 consumers"] = two
        found["2 consumers, no turns"] = replace(two, turns=False)
        found["Q in memory"] = replace(config, q_in_registers=False)
    return found


class Clock:
    """Medians of calls, kept as rows. Contenders take turns, because the card is power limited."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def race(
        self,
        case: str,
        contenders: dict[str, Callable[[], Any]],
        *,
        flops: float = 0.0,
        num_bytes: float = 0.0,
        graph: bool = False,
    ) -> None:
        """Time calls with a cold L2, or replays of their graphs; one that fails is left out."""
        ready = {}
        for who, run in contenders.items():
            try:
                run()
                torch.cuda.synchronize()
                ready[who] = timing.capture(run, 200.0) if graph else run
            except Exception as error:  # noqa: BLE001 (one contender must not stop the others)
                self.rows.append({"case": case, "who": who, "error": repr(error)[:200]})
                print(f"{case:28s} {who:26s} {error!r:.200}", flush=True)
        effort = timing.Effort(seconds=0.02, min_rounds=12, max_rounds=60)
        times = (timing.time_graphs if graph else timing.time_cold)(ready, effort, DEVICE)
        for who, t in times.items():
            ms = t.median_us / 1e3
            row = {"case": case, "who": who, "graph": graph, "ms": ms, "p10_us": t.p10_us}
            row |= {"p90_us": t.p90_us, "tflops": flops / ms / 1e9, "tbs": num_bytes / ms / 1e9}
            self.rows.append(row)
            rate = f"{row['tflops']:7.1f} TFLOP/s" if flops else f"{row['tbs']:6.3f} TB/s"
            print(
                f"{case:28s} {who:26s} {t.median_us:9.1f} us "
                f"({t.p10_us:.1f}-{t.p90_us:.1f}) {rate} {'graph' if graph else ''}",
                flush=True,
            )


def time_prefill(clock: Clock, rivals: dict[str, Any]) -> None:
    for case, (num, length, heads, kv_heads, size) in PREFILL.items():
        b = Batch(
            queries=(length,) * num,
            keys=(length,) * num,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            layout="split",
        )
        flops = 2.0 * num * heads * size * length * length
        for page in (16, 128):
            paged = replace(b, page_size=page)
            t = make(paged, poison=False)
            contenders = _prefill_rivals(paged, t, rivals)
            if page == 128:
                contenders = {k: v for k, v in contenders.items() if "paged" in k}
            reference = contenders["FA3 paged"]() if "FA3 paged" in contenders else None
            score = launch.score_config(b.variant, lse=True)
            config = tuning.prefill_config(b.head_size, b.num_heads // b.num_kv_heads, page, score)
            choices = (
                {"hopper": config, **prefill_variants(config)} if page == 16 else {"hopper": config}
            )
            for who, choice in choices.items():
                contenders[who] = _other_choice(paged, t, choice)
                contenders[who]()
                _compare(case, who, t, reference)
            named = {f"{who} p{page}": run for who, run in contenders.items()}
            clock.race(case, named, flops=flops)
            del t, contenders, reference
            torch.cuda.empty_cache()


def _other_choice(b: Batch, t: Tensors, config: PrefillConfig) -> Callable[[], object]:
    """A launch with another config, planned for it."""
    usual = tuning.prefill_config
    from attnkit.backends.hopper import plan as planning

    planning.prefill_config = lambda *shape: config
    try:
        plan = make_builder(b).build(0, t.batch).plan(b.geometry).prefill
    finally:
        planning.prefill_config = usual
    assert plan is not None
    found = prefill_calls(b, t, plan, config)
    return lambda: [call.launch() for call in found]


def _compare(case: str, who: str, t: Tensors, reference: torch.Tensor | None) -> None:
    if reference is None:
        return
    num = t.batch.num_actual_tokens
    want = reference.reshape(t.output[:num].shape).float()
    error = float((t.output[:num].float() - want).norm() / want.norm())
    if not error < 6e-3:
        print(f"{case} {who}: WRONG, differs from FA3 by {error:.2e}", flush=True)


def _prefill_rivals(b: Batch, t: Tensors, rivals: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    num, length = len(b.keys), b.keys[0]
    q = t.query[: t.batch.num_actual_tokens]
    k, v = (x.transpose(1, 2) for x in (t.key, t.value))
    starts, table = t.batch.query_start_loc, t.batch.block_table_tensor
    found: dict[str, Callable[[], Any]] = {}
    if rivals.get("fa3"):
        fa3 = rivals["fa3"]
        found["FA3 paged"] = lambda: fa3(
            q,
            k,
            v,
            length,
            starts,
            length,
            seqused_k=t.batch.seq_lens,
            block_table=table,
            causal=True,
            fa_version=3,
        )
        ids = table[:, : length // b.page_size].long().flatten()
        dense = [x[ids].flatten(0, 1).contiguous() for x in (k, v)]
        found["FA3 dense"] = lambda: fa3(
            q, *dense, length, starts, length, cu_seqlens_k=starts, causal=True, fa_version=3
        )
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q4, k4, v4 = (
            x.view(num, length, -1, b.head_size).transpose(1, 2).contiguous() for x in (q, *dense)
        )
        gqa = b.num_heads != b.num_kv_heads

        def cudnn() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    q4, k4, v4, is_causal=True, enable_gqa=gqa
                )

        found["cuDNN dense"] = cudnn
    return found


def time_decode(clock: Clock, rivals: dict[str, Any]) -> None:
    for case, (num, context, heads, kv_heads, size) in DECODE.items():
        b = Batch(
            queries=(1,) * num,
            keys=(context,) * num,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            layout="split",
        )
        _decode_case(clock, rivals, case, b)
        _decode_case(clock, {}, f"codes {case}", replace(b, coded=True))
    base = Batch(queries=(1,), keys=(4096,), num_heads=32, num_kv_heads=8, layout="HND")
    for q in (1, 2, 4, 8, 16):
        for num, context in ((1, 32768), (64, 4096)):
            b = replace(base, queries=(q,) * num, keys=(context,) * num)
            _decode_case(clock, {}, f"verify q{q} B{num} ctx{context}", b)
    for num in (1, 2, 3, 4, 6, 8, 12, 16, 24, 33, 48, 64, 96, 128, 192, 256):
        b = replace(base, queries=(1,) * num, keys=(4096,) * num)
        _decode_case(clock, {}, f"sweep B{num} ctx4096", b, cold=False)
    for context in (128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000):
        b = replace(base, queries=(1,) * 8, keys=(context,) * 8)
        _decode_case(clock, {}, f"sweep B8 ctx{context}", b, cold=False)
    rng = random.Random(7)
    keys = tuple(int(64 * 2 ** rng.uniform(0, 8)) for _ in range(64))
    _decode_case(
        clock, rivals, "B64 ctx 64..16k log-uniform", replace(base, queries=(1,) * 64, keys=keys)
    )
    b = replace(base, queries=(2048,) + (1,) * 63, keys=(8192,) + (4096,) * 63)
    _decode_case(clock, rivals, "mixed 2048@8k + 63x4k", b, reads=False)
    for q in (17, 64, 128):
        b = replace(base, queries=(q,), keys=(32768,))
        _decode_case(clock, rivals, f"chunk {q}@32k", b, reads=False)


def _decode_case(
    clock: Clock,
    rivals: dict[str, Any],
    case: str,
    b: Batch,
    *,
    cold: bool = True,
    reads: bool = True,
) -> None:
    t = make(b, poison=False)
    num_bytes = (2.0 if b.coded else 4.0) * sum(b.keys) * b.num_kv_heads * b.head_size * reads
    plan = make_builder(b).build(0, t.batch).plan(b.geometry)
    run = calls(b, t, plan)

    def ours() -> None:
        for call in run:
            call.launch()

    contenders: dict[str, Callable[[], Any]] = {"hopper": ours}
    if rivals.get("fa3"):
        contenders["FA3"] = _fa3_decode(b, t, rivals)
        if reads:
            contenders |= _other_plans(b, t)
    if b.coded:
        contenders |= _other_coded(b, t)
    if cold:
        clock.race(case, contenders, num_bytes=num_bytes)
    if reads:
        clock.race(case, contenders, num_bytes=num_bytes, graph=True)
    if rivals.get("fa3"):
        reference = contenders["FA3"]()
        ours()
        _compare(case, "hopper", t, reference)
    torch.cuda.empty_cache()


def _other_plans(b: Batch, t: Tensors) -> dict[str, Callable[[], Any]]:
    """Decodes with tiles of 64 rows."""
    from attnkit.backends.hopper import plan as planning

    usual = planning.decode_rows
    planning.decode_rows = lambda group_size, query_len: 64
    try:
        run = calls(b, t, make_builder(b).build(0, t.batch).plan(b.geometry))
    finally:
        planning.decode_rows = usual
    return {"64 rows": lambda: [call.launch() for call in run]}


def _other_coded(b: Batch, t: Tensors) -> dict[str, Callable[[], Any]]:
    """Decodes of codes with more programs a multiprocessor, deeper rings, and tiles of more keys."""
    from attnkit.backends.hopper import plan as planning

    config_of, programs_of = tuning.decode_config, planning.decode_programs
    found = {}
    for who, changes, programs in (
        (
            "3 programs",
            {"maxnreg": 80, "consumer_registers": 120, "producer_registers": 40},
            lambda config, num_sms: 3 * num_sms,
        ),
        ("6 stages", {"stages": 6}, programs_of),
        ("tiles of 64", {"block_n": 64, "rows": math.gcd(b.page_size, 64)}, programs_of),
        ("tiles of 128", {"block_n": 128, "rows": math.gcd(b.page_size, 128)}, programs_of),
    ):
        if b.head_size == 256 and who != "tiles of 128":
            continue

        def changed(*shape: Any, changes: dict[str, Any] = changes, **facts: Any) -> Any:
            return replace(config_of(*shape, **facts), **changes)

        tuning.decode_config = planning.decode_config = changed
        planning.decode_programs = programs
        try:
            run = calls(b, t, make_builder(b).build(0, t.batch).plan(b.geometry))
        finally:
            tuning.decode_config = planning.decode_config = config_of
            planning.decode_programs = programs_of
        found[who] = lambda run=run: [call.launch() for call in run]
    return found


def _fa3_decode(b: Batch, t: Tensors, rivals: dict[str, Any]) -> Callable[[], Any]:
    fa3 = rivals["fa3"]
    q = t.query[: t.batch.num_actual_tokens]
    k, v = (x.transpose(1, 2) for x in (t.key, t.value))
    batch = t.batch
    plan = rivals["fa3_plan"](
        batch_size=len(b.keys),
        max_seqlen_q=max(b.queries),
        max_seqlen_k=max(b.keys),
        num_heads_q=b.num_heads,
        num_heads_kv=b.num_kv_heads,
        headdim=b.head_size,
        cache_seqlens=batch.seq_lens,
        qkv_dtype=b.dtype,
        cu_seqlens_q=batch.query_start_loc,
        page_size=b.page_size,
        causal=True,
    )
    return lambda: fa3(
        q,
        k,
        v,
        max(b.queries),
        batch.query_start_loc,
        max(b.keys),
        seqused_k=batch.seq_lens,
        block_table=batch.block_table_tensor,
        causal=True,
        fa_version=3,
        scheduler_metadata=plan,
    )


def time_host(clock: Clock) -> None:
    """Cache write at copy speed, and what a step and a layer cost on the host."""
    b = Batch(queries=(1,), keys=(65536,), num_heads=32, num_kv_heads=8)
    t = make(b, poison=False)
    for num in (256, 8192, 32768):
        key, value = (torch.randn(num, 8, 128, device=DEVICE, dtype=b.dtype) for _ in range(2))
        slots = torch.randperm(65536, device=DEVICE)[:num] + 16
        call = cache_launch.write_call(key, value, Stored(key=t.key, value=t.value), slots)
        clock.race("write", {f"{num} tokens": call.launch}, num_bytes=8.0 * num * 8 * 128)
    cases = {
        "256 decodes": Batch(queries=(1,) * 256, keys=(1000,) * 256, num_heads=32, num_kv_heads=8),
        "8192-token prompt": Batch(queries=(8192,), keys=(8192,), num_heads=32, num_kv_heads=8),
        "mixed": Batch(
            queries=(2048,) + (1,) * 63, keys=(8192,) + (4096,) * 63, num_heads=32, num_kv_heads=8
        ),
    }
    for name, batch in cases.items():
        tensors = make(batch, poison=False)
        builder = make_builder(batch)
        builder.build(0, tensors.batch).plan(batch.geometry)
        run = calls(batch, tensors, builder.build(0, tensors.batch).plan(batch.geometry))

        def layer(
            batch: Batch = batch,
            tensors: Tensors = tensors,
            builder: HopperMetadataBuilder = builder,
        ) -> None:
            plan = builder.build(0, tensors.batch).plan(batch.geometry)
            for call in calls(batch, tensors, plan):
                call.launch()

        build = _host_us(lambda: builder.build(0, tensors.batch))  # noqa: B023
        launches = _host_us(lambda: [call.launch() for call in run])  # noqa: B023
        whole = _host_us(layer)
        clock.rows.append({"case": f"host {name}", "build_us": build, "launch_us": launches})
        print(
            f"host {name:20s} build {build:6.1f} us, launches of a layer {launches:6.1f} us, "
            f"build and one layer {whole:6.1f} us",
            flush=True,
        )


def _host_us(run: Callable[[], Any]) -> float:
    """Median host time of a call in microseconds, the device kept from falling behind."""
    times = []
    for _ in range(60):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2] * 1e6


def load_rivals(folder: str | None) -> dict[str, Any]:
    """FlashAttention-3 as `peers.py` finds it; empty where there is none."""
    if folder is None:
        return {}
    sys.path.insert(0, folder)
    import peers

    peers.load_peers()
    if peers.FA3 is None:
        return {}
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    return {"fa3": peers.FA3, "fa3_plan": get_scheduler_metadata}


def table(rows: list[dict[str, Any]]) -> None:
    """Ours over the best rival per case: times the rival takes."""
    print("\ncase                          ours us   best rival          rival us  rival/ours")
    for case in dict.fromkeys(r["case"] for r in rows):
        for graph, page in itertools.product((False, True), ("p16", "p128", "")):
            some = [
                r
                for r in rows
                if r["case"] == case
                and r.get("graph") == graph
                and r.get("ms")
                and (r["who"].endswith(page) if page else not r["who"].split()[-1].startswith("p"))
            ]
            ours = [r for r in some if r["who"].startswith("hopper")]
            others = [r for r in some if r["who"].startswith(("FA3", "cuDNN"))]
            if not ours or not others:
                continue
            mine = min(r["ms"] for r in ours)
            best = min(others, key=lambda r: r["ms"])
            mode = "graph" if graph else page
            print(
                f"{case:28s} {mode:5s} {mine * 1e3:8.1f}  {best['who']:20s} "
                f"{best['ms'] * 1e3:8.1f}  {best['ms'] / mine:5.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", nargs="+", choices=["check", "stress", "time", "prefill", "decode", "host"]
    )
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--json", type=Path, default=Path("hopper-check.json"))
    parser.add_argument("--peers", help="folder of peers.py")
    options = parser.parse_args()
    import triton

    started = time.perf_counter()
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    clock = Clock()
    try:
        if "check" in options.what:
            record["checks"] = check(options.jobs)
            print(f"{time.perf_counter() - started:.0f} s", flush=True)
        if "stress" in options.what:
            record["stress"] = stress()
        what = {"prefill", "decode", "host"} if "time" in options.what else set(options.what)
        rivals = load_rivals(options.peers) if what & {"prefill", "decode"} else {}
        if "prefill" in what:
            time_prefill(clock, rivals)
            print(f"{time.perf_counter() - started:.0f} s", flush=True)
        if "decode" in what:
            time_decode(clock, rivals)
            print(f"{time.perf_counter() - started:.0f} s", flush=True)
        if "host" in what:
            time_host(clock)
    finally:
        record["rows"] = clock.rows
        write(record, options.json)
    if clock.rows:
        table(clock.rows)
    failed = [r["name"] for r in record.get("checks", []) if not r["ok"]]
    print(f"{time.perf_counter() - started:.0f} s; failed: {failed or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
