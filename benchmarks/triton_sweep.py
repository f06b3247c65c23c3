"""Times tile choices of the Triton kernels on a GPU; what `backends/triton/configs.py` was chosen by.

Each config is checked against torch's float32 attention before it is timed (ragged lengths, pages
shuffled, free slots NaN). Prints one line per config and writes all of them as JSON lines.

    python benchmarks/triton_sweep.py prefill decode --json sweep.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from functools import partial
from typing import Any

import torch
import triton

from attnkit.backends.stored import Stored
from attnkit.backends.triton import cache_launch, configs, launch
from attnkit.contract import AttentionVariant
from attnkit.kvcache.formats import cache_format

PREFILL = [
    (4, 4096, 32, 8, 128),
    (16, 1024, 16, 16, 128),
    (1, 16384, 32, 32, 64),
    (1, 16384, 8, 8, 256),
]
DECODE = [
    (64, 4096, 32, 8, 128),
    (1, 32768, 32, 8, 128),
    (8, 8192, 32, 8, 128),
    (256, 1024, 32, 8, 128),
    (64, 4096, 32, 32, 128),
    (64, 4096, 32, 8, 64),
]


DECODE_TILES = [
    (64, 2, 2),
    (64, 2, 3),
    (64, 2, 4),
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (128, 4, 2),
    (128, 2, 2),
    (32, 2, 4),
    (32, 1, 3),
]


def operands(query_lens, kv_lens, heads, kv_heads, size, cache_dtype, page=16):
    """A batch over shuffled pages of a cache format; slots past the lengths read as NaN."""
    device = "cuda"
    pages = [-(-n // page) for n in kv_lens]
    total = sum(pages) + 1
    dtype, stored = torch.bfloat16, cache_format(cache_dtype)
    assert stored.dtype is not None
    content = stored.layout(size, size).num_bytes // stored.dtype.itemsize
    pool = torch.zeros(total, page, kv_heads, content, device=device, dtype=stored.dtype)
    cache = pool.permute(0, 2, 1, 3)
    scale = torch.full((1,), 0.02, device=device)
    views = Stored.of(cache, stored, size, size, scale, scale)
    for first in range(0, total * page, 1 << 18):
        slots = torch.arange(first, min(first + (1 << 18), total * page), device=device)
        k, v = torch.randn(2, len(slots), kv_heads, size, device=device, dtype=dtype)
        cache_launch.launch_write(k, v, views, slots)
    pool = pool.view(torch.uint8)
    ids = (torch.randperm(total - 1, device=device) + 1).to(torch.int32)
    table = torch.zeros(len(kv_lens), max(pages), device=device, dtype=torch.int32)
    first = 0
    for r, n in enumerate(pages):
        table[r, :n] = ids[first : first + n]
        first += n
        if kv_lens[r] % page:
            pool[table[r, n - 1].long(), kv_lens[r] % page :] = 0xFF
    pool[0] = 0xFF
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], device=device, dtype=torch.int32)
    num_tokens = sum(query_lens)
    return launch.Operands(
        query=torch.randn(num_tokens, heads, size, device=device, dtype=dtype),
        stored=views,
        output=torch.full((num_tokens, heads, size), float("nan"), device=device, dtype=dtype),
        lse=torch.empty(num_tokens, heads, device=device),
        query_start_loc=starts,
        kv_lens=torch.tensor(kv_lens, device=device, dtype=torch.int32),
        block_table=table,
        causal=True,
    )


def error(o: launch.Operands, scale: float, requests: list[int], cache_dtype: str) -> float:
    """Relative error of some requests against float32 attention."""
    worst = 0.0
    page, size, stored = o.stored.key.shape[2], o.query.shape[2], cache_format(cache_dtype)
    scale_of_codes = torch.full((1,), 0.02, device=o.query.device)
    assert o.block_table is not None
    assert o.lse is not None
    assert stored.dtype is not None
    assert isinstance(o.output, torch.Tensor)
    for r in requests:
        a, b = o.query_start_loc[r : r + 2].tolist()
        n = int(o.kv_lens[r])
        ids = o.block_table[r, : -(-n // page)].long()
        # The content of a token is one run of bytes from its key on.
        first = o.stored.key.view(torch.uint8)
        content = stored.layout(size, size).num_bytes
        whole = first.as_strided((*first.shape[:3], content), first.stride())
        tokens = whole[ids].transpose(1, 2).flatten(0, 1)[:n].view(stored.dtype)
        k, v = stored.decode(tokens, size, size, scale_of_codes, scale_of_codes)
        q = o.query[a:b].float()
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        s = (q.transpose(0, 1) @ k.transpose(1, 2)) * scale
        seen = (
            torch.arange(n, device=q.device)
            <= torch.arange(n - (b - a), n, device=q.device)[:, None]
        )
        s = s.masked_fill(~seen, float("-inf"))
        expected = (s.softmax(-1) @ v).transpose(0, 1)
        got = o.output[a:b].float()
        worst = max(worst, ((got - expected).norm() / expected.norm()).item())
        lse = s.logsumexp(-1).transpose(0, 1)
        worst = max(worst, ((o.lse[a:b] - lse).abs().max() / 10).item())
    return worst


def timed(fn, graph: bool) -> Any:
    if not graph:
        return triton.testing.do_bench(fn, warmup=15, rep=60, return_mode="median")
    with torch.cuda.stream(torch.cuda.Stream()):
        return triton.testing.do_bench_cudagraph(fn, rep=40, return_mode="median")


def report(rows: list[dict], handle, **row) -> None:
    rows.append(row)
    print(
        " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
        flush=True,
    )
    if handle:
        handle.write(json.dumps(row) + "\n")
        handle.flush()


def sweep_prefill(rows, handle, deadline, cache_dtype):
    for batch, length, heads, kv_heads, size in PREFILL:
        variant = AttentionVariant(scale=size**-0.5)
        ragged = operands(
            [1, 300, 0, 77, 129], [17, 300, 0, 477, 2129], heads, kv_heads, size, cache_dtype
        )
        big = operands([length] * batch, [length] * batch, heads, kv_heads, size, cache_dtype)
        flops = 2 * batch * length * length * heads * size
        grid = {
            64: [
                (128, 64, 4, 3),
                (128, 64, 8, 3),
                (128, 128, 8, 2),
                (64, 64, 4, 3),
                (128, 128, 8, 3),
            ],
            128: [
                (128, 64, 8, 2),
                (128, 64, 8, 3),
                (128, 64, 4, 2),
                (128, 128, 8, 2),
                (64, 64, 4, 2),
                (64, 64, 4, 3),
                (128, 32, 8, 3),
                (64, 128, 4, 2),
            ],
            256: [
                (128, 64, 8, 2),
                (128, 32, 8, 3),
                (64, 64, 4, 2),
                (128, 32, 8, 2),
                (64, 32, 4, 2),
            ],
        }[size]
        for m, n, warps, stages in grid:
            if time.monotonic() > deadline:
                return
            config = configs.KernelConfig(block_m=m, block_n=n, num_warps=warps, num_stages=stages)
            try:
                launch.launch_attention(ragged, variant, config=config)
                err = error(ragged, variant.scale, [0, 1, 3, 4], cache_dtype)
                run = partial(launch.launch_attention, big, variant, config=config)
                run()
                ms = timed(run, False)
            except (triton.runtime.errors.OutOfResources, RuntimeError) as failed:
                report(
                    rows,
                    handle,
                    what="prefill",
                    size=size,
                    tile=(m, n, warps, stages),
                    failed=str(failed)[:80],
                )
                continue
            report(
                rows,
                handle,
                what="prefill",
                shape=(batch, length, heads, kv_heads, size),
                tile=(m, n, warps, stages),
                err=err,
                ms=ms,
                tflops=flops / ms / 1e9,
            )


def sweep_decode(rows, handle, deadline, cache_dtype):
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for batch, length, heads, kv_heads, size in DECODE:
        variant = AttentionVariant(scale=size**-0.5)
        ragged = operands([1] * 4, [17, 300, 4477, 2129], heads, kv_heads, size, cache_dtype)
        big = operands([1] * batch, [length] * batch, heads, kv_heads, size, cache_dtype)
        moved = batch * length * kv_heads * cache_format(cache_dtype).layout(size, size).num_bytes
        for (n, warps, stages), segment, factor in itertools.product(
            DECODE_TILES, (512, 1024), (1, 2)
        ):
            if time.monotonic() > deadline:
                return
            config = configs.DecodeConfig(
                block_m=16,
                block_n=n,
                num_warps=warps,
                num_stages=stages,
                segment=segment,
                max_segments=32 * factor,
            )
            fill = configs.num_splits(batch * kv_heads, factor * sms, 32 * factor)
            if factor == 2 and fill == configs.num_splits(batch * kv_heads, sms, 32):
                continue
            for splits in (fill,):
                try:
                    for o, check in ((ragged, True), (big, False)):
                        parts = None
                        if splits > 1:
                            memory = torch.empty(
                                launch.Parts.numel(o, 1, config.max_segments), device="cuda"
                            )
                            parts = launch.Parts.of(memory, o, 1, config.max_segments)
                        run = partial(
                            launch.launch_decode,
                            o,
                            variant,
                            max_query_len=1,
                            num_splits=splits,
                            parts=parts,
                            config=config,
                        )
                        run()
                        if check:
                            err = error(o, variant.scale, [0, 1, 2, 3], cache_dtype)
                    cold, graph = timed(run, False), timed(run, True)
                except (triton.runtime.errors.OutOfResources, RuntimeError) as failed:
                    report(
                        rows,
                        handle,
                        what="decode",
                        size=size,
                        tile=(n, warps, stages, segment),
                        failed=str(failed)[:80],
                    )
                    continue
                report(
                    rows,
                    handle,
                    what="decode",
                    cache=cache_dtype,
                    shape=(batch, length, heads, kv_heads, size),
                    tile=(n, warps, stages, segment),
                    splits=splits,
                    err=err,
                    cold_us=cold * 1e3,
                    graph_us=graph * 1e3,
                    tbs=moved / cold / 1e9,
                    tbs_graph=moved / graph / 1e9,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=["prefill", "decode"])
    parser.add_argument("--json")
    parser.add_argument("--cache", default="bfloat16", help="format of the pages")
    parser.add_argument(
        "--seconds", type=float, default=240, help="stop each sweep after this long"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict] = []
    handle = open(args.json, "a") if args.json else None  # noqa: SIM115
    for what in args.what:
        sweep = sweep_prefill if what == "prefill" else sweep_decode
        sweep(rows, handle, time.monotonic() + args.seconds, args.cache)


if __name__ == "__main__":
    main()
