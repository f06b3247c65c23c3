"""Latents of which a row stands for several tokens: what a batch becomes, beside a window, under an
indexer, and what is refused. The kit has a law that judges every backend."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from attnkit import MLAAttention, PagedKVCache, make_batch
from attnkit.backends.wrappers.compressed import batch_of_states
from attnkit.conformance.simulator import GraphSimulator
from attnkit.contract import (
    AttentionCGSupport,
    MLADimensions,
    ModelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from attnkit.errors import BatchError, ConfigurationError
from attnkit.indexer import LightningIndexer

SIZES = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
HEADS = 2


def layer_of(**changes: Any) -> MLAAttention:
    torch.manual_seed(0)  # One projection for all.
    kv_b_proj = nn.Linear(32, HEADS * 40, bias=False)
    return MLAAttention(HEADS, SIZES, kv_b_proj, **{"return_lse": True, **changes})


def cache_of(layer: Any) -> torch.Tensor:
    name = layer.layer_name
    return PagedKVCache({name: layer.get_kv_cache_spec()}, 9, poison=True)[name]


def step_tensors(num_tokens: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(num_tokens)
    return [torch.randn(num_tokens, *n, generator=g) for n in ((HEADS, 24), (32,), (8,))]


def over(layer: MLAAttention, q: torch.Tensor, kv_c: Any, k_pe: Any, keys: list[int]) -> Any:
    """Scores (heads, n) and values (n, heads, size) of one query and some rows."""
    key, value = layer.projection.expand(kv_c[keys], k_pe[keys])
    return torch.einsum("hd,nhd->hn", q, key) * 24**-0.5, value


def test_a_batch_of_tokens_becomes_one_of_states() -> None:
    """Blocks of 8 tokens, states of 4: a chunk from position 6 on, a new prompt of 4 whose last slot is
    not to be written, an empty request, a decode at position 11, two rows of padding."""
    batch = make_batch([3, 4, 0, 1], [9, 4, 0, 12], [[5, 2], [7], [1], [3, 6]], 8)
    slots = torch.cat([batch.slot_mapping, torch.tensor([-1, -1])])
    slots[6] = -1
    batch = batch.replace(slot_mapping=slots, num_actual_tokens=10, positions=None)
    made = batch_of_states(batch, 4)
    assert made.seq_lens.tolist() == [1, 2, 2, 0, 0, 0, 1, 3, 0, 0]
    assert made.slot_mapping.tolist() == [-1, 5 * 2 + 1, -1, -1, -1, -1, -1, 6 * 2, -1, -1]
    assert made.block_table_tensor[:8].tolist() == [[5, 2]] * 3 + [[7, 0]] * 4 + [[3, 6]]
    assert made.query_start_loc.tolist() == list(range(11))
    assert (made.num_reqs, made.max_query_len, made.max_seq_len, made.block_size) == (10, 1, 3, 2)
    # Positions that are given win, as of a branch of drafts; padding has none.
    positions = torch.tensor([6, 7, 8, 0, 1, 2, 3, 8, 99, 99])
    given = batch_of_states(batch.replace(positions=positions), 4)
    assert given.seq_lens.tolist() == [1, 2, 2, 0, 0, 0, 1, 2, 0, 0]
    assert given.slot_mapping.tolist() == [-1, 11, *[-1] * 8]


def test_states_and_a_window_merge_by_their_lse() -> None:
    """C128A: softmax over the whole states and over the last tokens together. A prompt of 300."""
    num_tokens, window = 300, 5
    states = layer_of(block_size=256, tokens_per_state=128)
    assert states.get_kv_cache_spec().page_size_bytes == 2 * 40 * 4
    assert states.get_cudagraph_support() is AttentionCGSupport.NEVER
    assert states.prefill_selection is None
    lists = torch.arange(num_tokens)[:, None] - torch.arange(window)
    recent = layer_of(
        block_size=64, indexer=SimpleNamespace(topk_indices_buffer=lists.int().contiguous())
    )
    tensors = step_tensors(num_tokens)
    parts = []
    for layer, table in ((states, [4, 2]), (recent, [1, 8, 3, 5, 7])):
        batch = make_batch([num_tokens], [num_tokens], [table], layer.block_size)
        parts.append(layer(*tensors, cache_of(layer), layer.build(batch)))
    (out, lse), (near, near_lse) = parts
    assert bool((lse[:127] == -math.inf).all())
    assert not out[:127].any()
    both = torch.logaddexp(lse, near_lse)
    merged = sum(x * (y - both).exp()[..., None] for x, y in ((out, lse), (near, near_lse)))
    q, kv_c, k_pe = tensors
    for t in (0, 3, 126, 127, 128, 254, 255, 299):
        keys = [j for j in (127, 255) if j <= t] + list(range(max(0, t - window + 1), t + 1))
        score, value = over(states, q[t], kv_c, k_pe, keys)
        want = torch.einsum("hn,nhd->hd", torch.softmax(score, 1), value)
        torch.testing.assert_close(merged[t], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_an_indexer_chooses_among_states(kernels: str) -> None:
    """Blocks of 8 tokens hold 2 states of 4; three of up to six are chosen."""
    if kernels == "triton":
        pytest.importorskip("triton")
    every, num_tokens = 4, 24
    indexer = LightningIndexer(
        1, 4, 3, kv_cache_dtype="auto", block_size=2, backend=kernels, max_num_batched_tokens=24
    )
    layer = layer_of(block_size=8, tokens_per_state=every, indexer=indexer)
    batch = make_batch([num_tokens], [num_tokens], [[6, 1, 3]], 8)
    index_keys = torch.full((num_tokens, 4), math.nan)
    index_keys[every - 1 :: every] = torch.tensor([5.0, 1, 4, 2, 6, 3])[:, None]
    lists = indexer.choose(
        torch.ones(num_tokens, 1, 4),
        index_keys,
        torch.ones(num_tokens, 1),
        cache_of(indexer),
        batch_of_states(batch, every),
    )
    assert lists[[2, 3, 15, 19, 23]].tolist() == [
        [-1, -1, -1],
        [0, -1, -1],
        [0, 2, 3],
        [0, 2, 4],
        [0, 2, 4],
    ]
    q, kv_c, k_pe = step_tensors(num_tokens)
    out, lse = layer(q, kv_c, k_pe, cache_of(layer), layer.build(batch))
    for t, chosen in ((3, [0]), (15, [0, 2, 3]), (22, [0, 2, 4])):
        score, value = over(layer, q[t], kv_c, k_pe, [every * j + every - 1 for j in chosen])
        torch.testing.assert_close(lse[t], score.logsumexp(1), atol=1e-5, rtol=1e-5)
        want = torch.einsum("hn,nhd->hd", torch.softmax(score, 1), value)
        torch.testing.assert_close(out[t], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_a_captured_step_replays_other_lengths(width: int) -> None:
    """Three requests of up to `width` queries; some complete a state, one ends and leaves padding, and
    prompts of other sizes come in between."""
    pytest.importorskip("triton")
    config = VllmConfig(
        model_config=ModelConfig(max_model_len=64),
        speculative_config=SpeculativeConfig(num_speculative_tokens=width - 1),
    )
    made = {"block_size": 8, "tokens_per_state": 4, "backend": "triton_mla", "vllm_config": config}
    layer, eager = layer_of(**made), layer_of(**made)
    assert layer.get_cudagraph_support() is AttentionCGSupport.UNIFORM_BATCH
    cache = cache_of(layer).normal_()
    other = cache_of(eager).copy_(cache)
    tables, num_tokens = [[6, 1, 3, 8], [2, 5, 7, 4], [0]], 3 * width
    batch = make_batch([width] * 3, [32] * 3, [[1, 1, 1, r] for r in (2, 3, 4)], 8)
    static = {
        name: getattr(batch, name)
        for name in (
            "query_start_loc",
            "seq_lens",
            "block_table_tensor",
            "slot_mapping",
            "positions",
        )
    }
    given = step_tensors(num_tokens)
    out, lse = torch.empty(num_tokens, HEADS, 24), torch.empty(num_tokens, HEADS)
    builder, name = layer.make_builder(), layer.layer_name
    capture = batch.replace(max_seq_len=64, slot_mapping=batch.slot_mapping.fill_(-1))
    plans = {name: builder.build_for_cudagraph_capture(capture)}
    q, kv_c, k_pe = given[0], given[1][:, None], given[2][:, None]
    graph = GraphSimulator().record(
        lambda: layer._run(q, kv_c, k_pe, out, lse, cache, plans[name]), plans
    )
    for lens in ((10, 7), (11, 8), (12, 26), (13, 27), (16, 0)):
        builder.build(0, make_batch([5], [5], [[1]], 8))
        query_lens = [min(width, n) for n in lens] + [0]
        needed = [table[: -(-n // 8)] for table, n in zip(tables, (*lens, 0), strict=True)]
        step = make_batch(query_lens, [*lens, 0], needed, 8)
        real, columns = sum(query_lens), step.block_table_tensor.shape[1]
        static["slot_mapping"].fill_(-1)[:real] = step.slot_mapping
        static["positions"].zero_()[:real] = step.positions
        static["block_table_tensor"].zero_()[:, :columns] = step.block_table_tensor
        for field in ("query_start_loc", "seq_lens"):
            static[field].copy_(getattr(step, field))
        for x, new in zip(given, step_tensors(num_tokens + sum(lens)), strict=True):
            x.copy_(new[:num_tokens])
        batch = step.replace(num_actual_tokens=num_tokens, **static)
        graph.replay({name: builder.build(0, batch)})
        want, want_lse = eager(*(x[:real] for x in given), other, eager.build(step))
        torch.testing.assert_close(out[:real], want, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(lse[:real], want_lse, atol=1e-6, rtol=1e-6)
        assert torch.equal(cache, other)


def test_what_does_not_fit_is_refused() -> None:
    for wrong, reason in (
        ({"tokens_per_state": 0}, "tokens_per_state"),
        ({"tokens_per_state": 128, "block_size": 64}, "no whole number of states of 128"),
        ({"tokens_per_state": 4, "prefill_backend": "torch"}, "every query is a decode"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            layer_of(**wrong)
    layer = layer_of(tokens_per_state=4)
    batch = make_batch([3], [5], [[1]], 16)
    for field, value, reason in (
        ("positions", torch.zeros(3, 3, dtype=torch.int64), "one a token"),
        ("dcp_local_seq_lens", batch.seq_lens, "dcp_local_seq_lens"),
    ):
        with pytest.raises(BatchError, match=reason):
            layer.build(batch.replace(**{field: value}))
    cache = PagedKVCache({"plain": layer_of(layer_name="plain").get_kv_cache_spec()}, 2)["plain"]
    with pytest.raises(BatchError, match=r"its blocks are \(1, 4, 40\)"):
        layer(*step_tensors(3), cache, layer.build(batch))
