"""CommonAttentionMetadata: copies drop what was derived, and no field gets lost on the way."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkit.contract import COMMON_METADATA_FIELDS, CommonAttentionMetadata

PER_REQ = 4
NUM_TOKENS = 10


def _full() -> CommonAttentionMetadata:
    """Every field set: three requests of 2, 5 and 1 tokens, a padding row, two padding tokens.

    Per-request fields have 4 entries and per-token fields 10, and every tensor other numbers.
    """

    def per_req(seed: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.arange(seed, seed + PER_REQ).to(dtype)

    return CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 2, 7, 8, 8], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 2, 7, 8, 8], dtype=torch.int32),
        seq_lens=torch.tensor([9, 5, 30, 0], dtype=torch.int32),
        num_reqs=PER_REQ,
        num_actual_tokens=NUM_TOKENS,
        max_query_len=5,
        max_seq_len=30,
        block_table_tensor=torch.arange(PER_REQ * 3, dtype=torch.int32).view(PER_REQ, 3),
        slot_mapping=torch.arange(100, 100 + NUM_TOKENS),
        causal=torch.tensor([True, False, True, True]),
        logits_indices_padded=torch.tensor([1, 6, 7, 7], dtype=torch.int32),
        num_logits_indices=3,
        max_logits_per_req=1,
        encoder_seq_lens=per_req(20),
        encoder_seq_lens_cpu=np.arange(20, 20 + PER_REQ),
        dcp_local_seq_lens=per_req(30),
        dcp_local_seq_lens_cpu_upper_bound=per_req(40),
        positions=torch.arange(200, 200 + NUM_TOKENS),
        is_prefilling=torch.tensor([False, True, False, False]),
        seq_lens_cpu_upper_bound=per_req(50),
        req_idx=np.arange(60, 60 + PER_REQ),
        mm_req_doc_ranges={0: [(1, 2)], 2: [(3, 4), (6, 9)], 3: [(0, 1)]},
        rswa_prefix_lens=per_req(70),
        replayssm_decode_base_cpu=per_req(80),
        tree_mask=torch.arange(300, 300 + NUM_TOKENS),
        block_size=16,
        freed_cpu=np.arange(90, 90 + 2 * PER_REQ).reshape(PER_REQ, 2),
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    return a == b


def test_every_field_is_set_in_these_tests() -> None:
    batch = _full()
    assert [name for name in COMMON_METADATA_FIELDS if getattr(batch, name) is None] == []
    private = [f.name for f in fields(batch) if f.name not in COMMON_METADATA_FIELDS]
    assert private == [
        "_num_computed_tokens_cache",
        "_token_to_req_indices_cache",
        "_mm_token_spans_cache",
    ]


def test_replace_changes_what_is_named_and_nothing_else() -> None:
    batch, lens = _full(), torch.tensor([9, 9, 9, 9], dtype=torch.int32)
    copy = batch.replace(seq_lens=lens)
    assert torch.equal(copy.seq_lens, lens)
    assert torch.equal(batch.seq_lens, _full().seq_lens)
    for name in COMMON_METADATA_FIELDS:
        if name != "seq_lens":
            assert getattr(copy, name) is getattr(batch, name), name


def test_replace_drops_what_was_derived() -> None:
    batch = _full()
    computed = batch.compute_num_computed_tokens()
    rows = batch.token_to_req_indices(torch.zeros(NUM_TOKENS, dtype=torch.int32))
    copy = batch.replace(
        seq_lens=batch.seq_lens + 1,
        query_start_loc=torch.tensor([0, 1, 7, 8, 8], dtype=torch.int32),
    )
    assert copy.compute_num_computed_tokens().tolist() == [9, 0, 30, 1]
    fresh = copy.token_to_req_indices(torch.zeros(NUM_TOKENS, dtype=torch.int32))
    assert fresh.tolist() == [0, 1, 1, 1, 1, 1, 1, 2, 0, 0]
    assert batch.compute_num_computed_tokens() is computed
    assert rows.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 0, 0]


def test_replace_keeps_a_cache_that_is_handed_over() -> None:
    batch = _full()
    rows = batch.token_to_req_indices(torch.zeros(NUM_TOKENS, dtype=torch.int32))
    other_pages = batch.replace(
        block_table_tensor=batch.block_table_tensor + 1, _token_to_req_indices_cache=rows
    )
    unused = torch.full((NUM_TOKENS,), -7, dtype=torch.int32)
    assert other_pages.token_to_req_indices(unused).data_ptr() == rows.data_ptr()
    assert (unused == -7).all()


@pytest.mark.parametrize("reqs", [0, 1, 3, 4])
def test_unpadded_loses_no_field(reqs: int) -> None:
    """Whatever field is added later must be kept whole or cut to the rows or tokens that are left."""
    batch = _full()
    tokens = int(batch.query_start_loc_cpu[reqs])
    cut = batch.unpadded(tokens, reqs)
    counted = {"num_reqs": reqs, "num_actual_tokens": tokens}
    for name in COMMON_METADATA_FIELDS:
        before, after = getattr(batch, name), getattr(cut, name)
        if name in counted:
            assert after == counted[name]
        elif name == "mm_req_doc_ranges":
            assert after == {r: ranges for r, ranges in before.items() if r < reqs}
        elif name.startswith("query_start_loc"):
            assert _same(after, before[: reqs + 1])
        elif name in ("slot_mapping", "positions", "tree_mask"):
            assert _same(after, before[:tokens])
        elif name == "logits_indices_padded" or isinstance(before, (int, tuple)):
            assert _same(after, before)
        else:
            assert before.shape[0] == PER_REQ, f"{name} is neither per request nor per token"
            assert _same(after, before[:reqs]), name


@pytest.mark.parametrize(("first", "end"), [(0, 2), (1, 3), (1, 4), (2, 2)])
def test_rows_are_a_batch_of_their_own(first: int, end: int) -> None:
    batch = _full()
    part = batch.rows(first, end)
    starts = batch.query_start_loc_cpu
    tokens = slice(int(starts[first]), NUM_TOKENS if end == PER_REQ else int(starts[end]))
    assert (part.num_reqs, part.num_actual_tokens) == (end - first, tokens.stop - tokens.start)
    assert part.max_query_len == max(starts.diff()[first:end].tolist(), default=0)
    assert part.logits_indices_padded is None
    for name in COMMON_METADATA_FIELDS:
        before, after = getattr(batch, name), getattr(part, name)
        if name in ("slot_mapping", "positions", "tree_mask"):
            assert _same(after, before[tokens])
        elif name.startswith("query_start_loc"):
            assert _same(after, before[first : end + 1] - before[first])
        elif name == "mm_req_doc_ranges":
            assert after == {r - first: x for r, x in before.items() if first <= r < end}
        elif isinstance(before, (torch.Tensor, np.ndarray)) and before.shape[0] == PER_REQ:
            assert name == "logits_indices_padded" or _same(after, before[first:end]), name


def test_unpadded_keeps_absent_fields_absent_and_positions_of_three_axes_whole() -> None:
    batch = _full()
    bare = batch.replace(
        **{
            f.name: f.default
            for f in fields(batch)
            if f.default is None and f.name in COMMON_METADATA_FIELDS
        }
    )
    cut = bare.unpadded(7, 2)
    assert all(
        getattr(cut, name) is None for name in COMMON_METADATA_FIELDS if getattr(bare, name) is None
    )
    axes = batch.replace(positions=torch.arange(30).view(3, NUM_TOKENS), causal=False).unpadded(
        7, 2
    )
    assert axes.positions is not None
    assert axes.positions.shape == (3, 7)
    assert axes.causal is False


def test_unpadded_derives_anew() -> None:
    batch = _full()
    batch.compute_num_computed_tokens()
    batch.token_to_req_indices(torch.zeros(NUM_TOKENS, dtype=torch.int32))
    cut = batch.unpadded(7, 2)
    assert cut.compute_num_computed_tokens().tolist() == [7, 0]
    rows = cut.token_to_req_indices(torch.zeros(7, dtype=torch.int32))
    assert rows.tolist() == [0, 0, 1, 1, 1, 1, 1]


def test_lengths_come_from_the_device() -> None:
    """Under adaptive verification the host knows only the total."""
    batch = _full().replace(query_start_loc=torch.tensor([0, 4, 7, 8, 8], dtype=torch.int32))
    assert batch.naive_query_lens().tolist() == [4, 3, 1, 0]
    assert batch.compute_num_computed_tokens().tolist() == [5, 2, 29, 0]
    assert batch.compute_num_computed_tokens().dtype == torch.int32
    assert batch.compute_num_computed_tokens() is batch.compute_num_computed_tokens()
    rows = batch.token_to_req_indices(torch.zeros(NUM_TOKENS, dtype=torch.int32))
    assert rows.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 0, 0]
    assert batch.batch_size() == 4


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    padding=st.integers(0, 4),
    slack=st.integers(0, 3),
)
def test_rows_without_tokens_own_none_and_padding_maps_to_row_0(
    lens: list[int], padding: int, slack: int
) -> None:
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    num_tokens = sum(lens) + padding
    batch = _full().replace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        num_reqs=len(lens),
        num_actual_tokens=num_tokens,
    )
    buffer = torch.full((num_tokens + slack,), -7, dtype=torch.int32)
    rows = batch.token_to_req_indices(buffer)
    expected = [r for r, n in enumerate(lens) for _ in range(n)] + [0] * padding
    assert rows.tolist() == expected
    assert rows.dtype == torch.int32
    assert rows.data_ptr() == buffer.data_ptr() or not num_tokens
    assert (buffer[num_tokens:] == -7).all()


def test_more_mapped_tokens_than_are_asked_for_are_kept_for_later() -> None:
    batch = _full().replace(num_actual_tokens=3)
    buffer = torch.zeros(8, dtype=torch.int32)
    assert batch.token_to_req_indices(buffer).tolist() == [0, 0, 1]
    assert buffer.tolist() == [0, 0, 1, 1, 1, 1, 1, 2]
    batch.num_actual_tokens = 7
    assert (
        batch.token_to_req_indices(torch.zeros(1, dtype=torch.int32)).tolist() == [0, 0] + [1] * 5
    )


@pytest.mark.parametrize(
    ("buffer", "named"),
    [
        (torch.zeros(9, dtype=torch.int32), "holds 9 tokens, needs 10"),
        (torch.zeros(10, dtype=torch.int64), "torch.int64, not int32"),
    ],
)
def test_a_buffer_that_does_not_fit_is_our_callers_fault(buffer: torch.Tensor, named: str) -> None:
    with pytest.raises(AssertionError, match=named):
        _full().token_to_req_indices(buffer)


@pytest.mark.parametrize(
    ("cached", "named"),
    [
        (torch.zeros(9, dtype=torch.int32), "fewer tokens"),
        (torch.zeros(10), "another dtype"),
        (torch.zeros(10, dtype=torch.int32, device="meta"), "another device"),
    ],
)
def test_a_cache_of_another_batch_is_not_believed(cached: torch.Tensor, named: str) -> None:
    batch = _full().replace(_token_to_req_indices_cache=cached)
    with pytest.raises(AssertionError, match=named):
        batch.token_to_req_indices(torch.zeros(10, dtype=torch.int32))
