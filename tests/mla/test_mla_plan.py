"""Batches cut into decodes and prefills, contexts into chunks of a bounded workspace."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkit.batch import make_batch
from attnkit.contract import (
    MLAAttentionSpec,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from attnkit.mla.builder import MLAMetadataBuilder
from attnkit.mla.plan import MLAMetadata, plan_chunks
from attnkit.mla.prefill import merge_into

PAGE = 16


def builder(config: VllmConfig | None = None, page: int = PAGE) -> MLAMetadataBuilder:
    spec = MLAAttentionSpec(block_size=page, head_size=40, dtype=torch.float32)
    return MLAMetadataBuilder(spec, ["layer"], config or VllmConfig(), torch.device("cpu"))


def plan_of(query_lens, seq_lens, made: MLAMetadataBuilder | None = None) -> MLAMetadata:
    ids = itertools.count(1)
    tables = [[next(ids) for _ in range(-(-s // PAGE))] for s in seq_lens]
    return (made or builder()).build(0, make_batch(query_lens, seq_lens, tables, PAGE))


@settings(max_examples=200, deadline=None)
@given(
    contexts=st.lists(st.integers(-3, 200), max_size=6),
    page=st.sampled_from([1, 3, 16, 64]),
    room=st.integers(1, 9),
)
def test_chunks_are_a_partition_within_bounds(contexts, page, room) -> None:
    chunks = plan_chunks(np.array(contexts, dtype=np.int64), page, room)
    covered = [0] * len(contexts)
    for chunk in chunks:
        assert 0 < sum(span.num_pages for span in chunk) <= room
        for i, span in enumerate(chunk):
            # From the left on, without a gap, and only the first span continues another chunk's.
            assert covered[span.request] == span.first_page * page
            assert i == 0 or span.first_page == 0
            assert (span.num_pages - 1) * page < span.num_tokens <= span.num_pages * page
            covered[span.request] += span.num_tokens
        assert len({span.request for span in chunk}) == len(chunk)
    assert covered == [max(0, n) for n in contexts]
    assert all(sum(s.num_pages for s in chunk) == room for chunk in chunks[:-1])


def test_decodes_come_first_and_by_length_alone() -> None:
    plan = plan_of([1, 1, 5, 1], [30, 1, 40, 9])
    assert (plan.num_decodes, plan.num_decode_tokens) == (2, 2)
    # The decode behind a prefill counts as one.
    assert (plan.num_prefills, plan.num_prefill_tokens) == (2, 6)
    assert plan.decode is not None
    assert plan.prefill is not None
    assert plan.decode.seq_lens.tolist() == [30, 1]
    assert plan.prefill.query_start_loc.tolist() == [0, 5, 6]


def test_drafts_are_decodes() -> None:
    drafts = VllmConfig(speculative_config=SpeculativeConfig(num_speculative_tokens=3))
    made = builder(drafts)
    assert made.reorder_batch_threshold == 4
    plan = plan_of([4, 1, 5], [30, 12, 40], made)
    assert (plan.num_decodes, plan.num_decode_tokens, plan.num_prefill_tokens) == (2, 5, 5)


def test_ranks_share_decodes_of_one_token_only() -> None:
    config = VllmConfig(
        speculative_config=SpeculativeConfig(num_speculative_tokens=3),
        parallel_config=ParallelConfig(decode_context_parallel_size=2),
    )
    assert builder(config).reorder_batch_threshold == 1


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([], []), ([0, 0], [0, 0]), ([1, 1], [4, 5]), ([7], [7])]
)
def test_a_part_without_tokens_is_none(query_lens, seq_lens) -> None:
    plan = plan_of(query_lens, seq_lens)
    assert (plan.decode is None) == (plan.num_decode_tokens == 0)
    assert (plan.prefill is None) == (plan.num_prefill_tokens == 0)


def test_a_chunk_is_a_small_paged_batch() -> None:
    made = builder()
    made.workspace_tokens = 3 * PAGE
    batch = make_batch([4, 6, 3], [4 + 40, 6, 3 + 33], [[9, 7, 5], [2], [8, 3, 6]], PAGE)
    plan = made.build(0, batch)
    assert plan.prefill is not None
    first, second = plan.prefill.chunks
    # Three pages of the first request; then, with a chunk of its own, those of the third.
    assert first.pages.tolist() == [9, 7, 5]
    assert (first.rows, first.query_start_loc.tolist()) == (slice(0, 4), [0, 4])
    assert (first.kv_lens.tolist(), first.block_table.tolist()) == ([40], [[0, 1, 2]])
    assert second.pages.tolist() == [8, 3, 6]
    assert (second.rows, second.kv_lens.tolist()) == (slice(10, 13), [33])
    made.workspace_tokens = 4 * PAGE
    plan = made.build(0, batch)
    assert plan.prefill is not None
    first, second = plan.prefill.chunks
    assert first.pages.tolist() == [9, 7, 5, 8]
    # The request in between has no context, and its rows take part with no keys.
    assert (first.rows, first.query_start_loc.tolist()) == (slice(0, 13), [0, 4, 10, 13])
    assert first.kv_lens.tolist() == [40, 0, 16]
    assert first.block_table.tolist() == [[0, 1, 2], [0, 0, 0], [3, 0, 0]]
    assert (second.pages.tolist(), second.kv_lens.tolist()) == ([3, 6], [17])


def test_the_workspace_is_bounded_and_no_larger_than_of_use() -> None:
    long = VllmConfig(model_config=ModelConfig(max_model_len=1 << 20))
    assert builder(long).workspace_tokens == MLAMetadataBuilder.max_workspace_tokens
    small = VllmConfig(
        model_config=ModelConfig(max_model_len=100),
        scheduler_config=SchedulerConfig(max_num_seqs=2),
    )
    assert builder(small).workspace_tokens == 100
    assert builder(small, page=256).workspace_tokens == 512


def test_queries_before_their_sequence_have_no_own_tokens() -> None:
    starts = torch.tensor([0, 5, 8], dtype=torch.int32)
    seq_lens = torch.tensor([2, 9], dtype=torch.int32)
    batch = make_batch([2, 3], [2, 9], [[1], [2]], PAGE).replace(
        query_start_loc=starts, query_start_loc_cpu=starts, max_query_len=5, num_actual_tokens=8
    )
    plan = builder().build(0, batch.replace(seq_lens_cpu_upper_bound=seq_lens))
    assert plan.prefill is not None
    assert plan.prefill.own_rows is not None
    assert plan.prefill.own_rows.tolist() == [3, 4, 5, 6, 7]
    assert plan.prefill.query_start_loc.tolist() == [0, 2, 5]
    # Without host lengths the device is asked.
    asked = builder().build(0, batch.replace(seq_lens=seq_lens, seq_lens_cpu_upper_bound=None))
    assert asked.prefill is not None
    assert asked.prefill.query_start_loc.tolist() == [0, 2, 5]


def test_merging_is_attention_over_all_keys() -> None:
    score, value = torch.randn(4, 3, 30), torch.randn(30, 5)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        weights = score[..., keys].softmax(-1).nan_to_num(0)
        return weights @ value[keys], score[..., keys].logsumexp(-1)

    whole = part(slice(0, 30))
    for cuts in ([0, 30], [0, 0, 7, 30], [0, 1, 2, 30, 30]):
        out, lse = torch.zeros(4, 3, 5), torch.full((4, 3), -torch.inf)
        for start, end in itertools.pairwise(cuts):
            merge_into(out, lse, *part(slice(start, end)))
        torch.testing.assert_close(out, whole[0])
        torch.testing.assert_close(lse, whole[1])


def test_empty_parts_change_no_bit() -> None:
    out, lse = torch.randn(2, 3, 5), torch.randn(2, 3)
    lse[0, 0], out[0, 0] = -torch.inf, 0.0
    before = out.clone(), lse.clone()
    merge_into(out, lse, torch.zeros(2, 3, 5), torch.full((2, 3), -torch.inf))
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
