"""Latents in the kernels: split contexts, tiles of heads, plans that are replayed, rows to the bit. The
kit judges the backend as a whole."""

from __future__ import annotations

import math

import pytest
import torch
from triton_problem import DEVICE

from attnkit import MLAAttention, PagedKVCache, make_batch
from attnkit.backends.triton.configs import DecodeConfig
from attnkit.backends.triton.launch import DecodeWork
from attnkit.backends.triton.mla_launch import (
    choose_rows_call,
    launch_mla_decode,
    tiled_write_call,
)
from attnkit.backends.triton.mla_operands import LatentOperands, LatentPages
from attnkit.backends.triton.operands import Parts
from attnkit.contract import AttentionCGSupport, MLADimensions
from attnkit.kvcache.formats import latent_format
from attnkit.mla.plan import DecodePart
from attnkit.mla.sparse import ChosenRows, token_pages
from hard_numbers import hard_numbers

SHORT = DecodeConfig(block_m=16, block_n=16, num_warps=4, num_stages=2, segment=32)
RANK, ROPE, PAGE = 40, 24, 5
QUERY_LENS, KV_LENS = (1, 3, 0, 2, 2), (1, 150, 0, 77, 1)
"""One key, segments, an empty row, more queries than keys."""


def problem(heads: int) -> LatentOperands:
    """float32 rows in scattered pages, NaN where there is none; output and LSE start as NaN."""
    g = torch.Generator().manual_seed(heads)
    pages = [-(-n // PAGE) for n in KV_LENS]
    ids = 1 + torch.randperm(sum(pages) + 7, generator=g)
    cache = torch.full((len(ids) + 1, PAGE, RANK + ROPE), math.nan)
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for r, (n, taken) in enumerate(zip(KV_LENS, pages, strict=True)):
        table[r, :taken], ids = ids[:taken], ids[taken:]
        where = torch.arange(n)
        rows = torch.randn(n, RANK + ROPE, generator=g)
        cache[table[r].long()[where // PAGE], where % PAGE] = rows
    cache, num_tokens = cache.to(DEVICE), sum(QUERY_LENS)
    starts = torch.tensor([0, *QUERY_LENS]).cumsum(0).to(DEVICE, torch.int32)
    return LatentOperands(
        query=torch.randn(num_tokens, heads, RANK + ROPE, generator=g).to(DEVICE),
        pages=LatentPages(latent=cache[..., :RANK], rotated=cache[..., RANK:]),
        output=torch.full((num_tokens, heads, RANK), math.nan, device=DEVICE),
        lse=torch.full((num_tokens, heads), math.nan, device=DEVICE),
        query_start_loc=starts,
        kv_lens=torch.tensor(KV_LENS, dtype=torch.int32, device=DEVICE),
        block_table=table.to(DEVICE),
    )


def check(o: LatentOperands, scale: float) -> None:
    """Against the formula in float64."""
    rows = torch.cat([o.pages.latent, o.pages.rotated], -1).double().cpu()
    row = 0
    for r, (q_len, kv_len) in enumerate(zip(QUERY_LENS, KV_LENS, strict=True)):
        keys = rows[o.block_table[r].long().cpu()].flatten(0, 1)[:kv_len]
        for i in range(q_len):
            seen = keys[: max(0, kv_len - q_len + i + 1)]
            score = o.query[row].double().cpu() @ seen.T * scale
            want = torch.softmax(score, 1) @ seen[:, :RANK]
            assert o.lse is not None
            torch.testing.assert_close(o.output[row].cpu().double(), want, atol=2e-5, rtol=0)
            lse = o.lse[row].cpu().double()
            torch.testing.assert_close(lse, torch.logsumexp(score, 1), atol=2e-5, rtol=2e-5)
            row += 1


@pytest.mark.parametrize(("heads", "num_splits"), [(5, 1), (5, 2), (5, 4), (20, 1)])
def test_splits_and_tiles_of_heads(heads: int, num_splits: int) -> None:
    """Twenty heads are two tiles of ten, and each query a tile of its own."""
    operands, most = problem(heads), max(QUERY_LENS)
    parts = None
    if num_splits > 1:
        memory = torch.full((Parts.numel(operands, most, num_splits),), math.nan, device=DEVICE)
        parts = Parts.of(memory, operands, most, num_splits)
    work = DecodeWork(max_query_len=most, config=SHORT, num_splits=num_splits, parts=parts)
    launch_mla_decode(operands, 0.3, work)
    check(operands, 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_are_written_as_their_codes_and_nothing_else_is(dtype: torch.dtype) -> None:
    d = MLADimensions(kv_lora_rank=256, qk_nope_head_dim=8, qk_rope_head_dim=24, v_head_dim=8)
    stored, num_tokens = latent_format("fp8_ds_mla"), 48
    size = stored.layout(d.kv_lora_rank, d.qk_rope_head_dim).num_bytes
    got = torch.full((16, PAGE, size), 0xA5, dtype=torch.uint8, device=DEVICE)
    want, one = got.clone(), torch.ones(1, device=DEVICE)
    latents, rotated = (
        hard_numbers((num_tokens, 3, n), dtype, n).to(DEVICE)[:, 0]
        for n in (d.kv_lora_rank, d.qk_rope_head_dim)
    )
    slots = 1 + torch.randperm(16 * PAGE - 1, generator=torch.Generator().manual_seed(1))
    slots = slots[:num_tokens].to(DEVICE)
    slots[[0, 7, 47]] = -1
    tiled_write_call(latents, rotated, LatentPages.of(got, stored, d, one), slots).launch()
    stored.write(latents[:, None], rotated[:, None], want[:, None], slots, one, one)
    rotated_from = size - 2 * d.qk_rope_head_dim
    assert torch.equal(got[..., :rotated_from], want[..., :rotated_from])
    rows, others = (x[..., rotated_from:].view(torch.bfloat16) for x in (got, want))
    torch.testing.assert_close(rows, others, rtol=0, atol=0, equal_nan=True)


def test_a_captured_plan_serves_any_uniform_batch_of_decodes() -> None:
    """Lengths and pages change under a plan made for other ones, longer than the context it saw; rows
    of requests that are not there come out zero, with an LSE of -inf."""
    d = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
    kv_b_proj = torch.nn.Linear(32, 4 * 40, bias=False, device=DEVICE)
    layer = MLAAttention(4, d, kv_b_proj, backend="triton_mla", device=DEVICE, return_lse=True)
    builder, spec = layer.make_builder(), layer.get_kv_cache_spec()
    level = builder.get_cudagraph_support(layer.vllm_config, spec)
    assert level is AttentionCGSupport.UNIFORM_BATCH
    cache = PagedKVCache({layer.layer_name: spec}, 211, device=DEVICE)[layer.layer_name]
    cache.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    q, kv_c, k_pe = (torch.randn(3, *n, device=DEVICE) for n in ((4, 24), (32,), (8,)))

    def batch(query_lens: list[int], seq_lens: list[int]):
        tables = [list(range(1 + 70 * r, 71 + 70 * r)) for r in range(len(seq_lens))]
        made = make_batch(query_lens, seq_lens, tables, block_size=16)
        names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor")
        return made.replace(**{name: getattr(made, name).to(DEVICE) for name in names})

    captured = batch([1, 1, 1], [2, 2, 2])
    table = torch.zeros(3, 70, dtype=torch.int32, device=DEVICE)
    captured = captured.replace(block_table_tensor=table)
    plan = builder.build_for_cudagraph_capture(captured)
    for query_lens, seq_lens in (([1, 1, 1], [1100, 3, 40]), ([1, 1, 0], [40, 600, 0])):
        step = batch(query_lens, seq_lens)
        slots = torch.full_like(captured.slot_mapping, -1)
        slots[: sum(query_lens)] = step.slot_mapping
        captured.slot_mapping.copy_(slots)
        for name in ("query_start_loc", "seq_lens"):
            getattr(captured, name).copy_(getattr(step, name))
        table[:, : step.block_table_tensor.shape[1]] = step.block_table_tensor
        want, want_lse = layer(q[: sum(query_lens)], kv_c, k_pe, cache, builder.build(0, step))
        out, lse = layer(q, kv_c, k_pe, cache, plan)
        there = slice(0, sum(query_lens))
        torch.testing.assert_close(out[there], want, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse[there], want_lse, atol=1e-5, rtol=0)
        assert not out[there.stop :].any()
        assert bool((lse[there.stop :] == -math.inf).all())


@pytest.mark.parametrize("size", [1, 7, 40, 2100])
def test_rows_are_chosen_as_torch_does(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    query_lens, seq_lens = [1, 0, 3, 4, 1], [70, 5, 3, 2, 150]
    starts = torch.tensor([0, 1, 1, 4, 8, 9], dtype=torch.int32, device=DEVICE)
    assert starts.diff().tolist() == query_lens
    table = torch.randperm(5 * 32, generator=generator).int().view(5, 32).to(DEVICE)
    plan = DecodePart(
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        block_table=table,
        max_query_len=4,
        max_seq_len=150,
    )
    # Two queries of nobody, and positions of all kinds.
    lists = torch.randint(-3, 160, (11, size), generator=generator, dtype=torch.int32).to(DEVICE)
    if size == 40:
        lists[4] = -1
    chosen = ChosenRows.of(lists, plan, PAGE)
    cache = torch.zeros(160, PAGE, 4, device=DEVICE)[:, : PAGE - 2]
    pages, apart = token_pages(cache)
    assert pages.shape == (159 * PAGE + PAGE - 2, 1, 4)
    rows, num_chosen = torch.full_like(lists, 77), lists.new_full((11,), 77)
    choose_rows_call(lists, plan, PAGE, apart, rows, num_chosen).launch()
    assert torch.equal(num_chosen, chosen.num_chosen)
    assert torch.equal(rows, (chosen.blocks * apart + chosen.offsets).int())
