"""make_batch: tensors that agree with each other; a contradiction is refused before any is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkit.batch import make_batch
from attnkit.errors import BatchError, ConfigurationError


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], int]:
    """(query_lens, seq_lens, block_tables, block_size) with blocks in no order and spare ids."""
    block_size = draw(st.sampled_from([1, 3, 16]))
    seq_lens = draw(st.lists(st.integers(0, 40), max_size=6))
    query_lens = [draw(st.integers(0, n)) for n in seq_lens]
    pages = [-(-n // block_size) for n in seq_lens]
    spare = [draw(st.integers(0, 2)) for _ in seq_lens]
    free = draw(st.permutations(range(1, sum(pages) + sum(spare) + 5)))
    tables = []
    for count in map(sum, zip(pages, spare, strict=True)):
        tables.append(list(free[:count]))
        free = free[count:]
    return query_lens, seq_lens, tables, block_size


@settings(max_examples=150, deadline=None)
@given(_batches())
def test_slots_invert_the_block_table(batch: Any) -> None:
    query_lens, seq_lens, tables, block_size = batch
    made = make_batch(query_lens, seq_lens, tables, block_size)
    starts = made.query_start_loc.tolist()
    width = made.block_table_tensor.shape[1]
    for r, (q, n, table) in enumerate(zip(query_lens, seq_lens, tables, strict=True)):
        assert starts[r + 1] - starts[r] == q
        for i in range(q):
            token, position = starts[r] + i, n - q + i
            block, offset = divmod(int(made.slot_mapping[token]), block_size)
            assert block == table[position // block_size]
            assert int(made.block_table_tensor[r, position // block_size]) == block
            assert offset == position % block_size
            assert int(made.positions[token]) == position
        pages = -(-n // block_size)
        assert made.block_table_tensor[r].tolist() == table[:pages] + [0] * (width - pages)
    assert made.slot_mapping.unique().numel() == sum(query_lens)
    assert made.compute_num_computed_tokens().tolist() == [
        n - q for q, n in zip(query_lens, seq_lens, strict=True)
    ]


@settings(max_examples=50, deadline=None)
@given(_batches())
def test_counts_dtypes_and_bounds(batch: Any) -> None:
    query_lens, seq_lens, tables, block_size = batch
    made = make_batch(query_lens, seq_lens, tables, block_size)
    assert made.num_reqs == made.batch_size() == len(query_lens)
    assert made.num_actual_tokens == int(made.query_start_loc_cpu[-1]) == sum(query_lens)
    assert made.max_query_len == max(query_lens, default=0)
    assert made.max_seq_len == max(seq_lens, default=0)
    assert made.is_prefilling is not None
    assert made.is_prefilling.tolist() == [
        q == n > 0 for q, n in zip(query_lens, seq_lens, strict=True)
    ]
    int32 = (made.query_start_loc, made.query_start_loc_cpu, made.seq_lens)
    assert {t.dtype for t in (*int32, made.block_table_tensor)} == {torch.int32}
    assert made.positions is not None
    assert made.seq_lens_cpu_upper_bound is not None
    assert made.slot_mapping.dtype == made.positions.dtype == torch.int64
    assert made.seq_lens_cpu_upper_bound.tolist() == seq_lens
    assert made.block_table_tensor.shape[0] == len(query_lens)
    assert made.block_table_tensor.shape[1] >= 1
    for tensor in (*int32, made.slot_mapping, made.positions, made.block_table_tensor):
        assert tensor.is_contiguous()
        assert not tensor.numel() or tensor.data_ptr() % 8 == 0


def test_numbers_may_come_as_arrays_and_tensors() -> None:
    lists = make_batch([2, 1], [5, 17], [[3], [1, 2]], 16)
    other = make_batch(
        np.array([2, 1], dtype=np.uint8),  # type: ignore[arg-type]
        torch.tensor([5, 17]),  # type: ignore[arg-type]
        [np.array([3]), torch.tensor([1, 2], dtype=torch.int32)],  # type: ignore[list-item]
        16,
    )
    assert torch.equal(lists.slot_mapping, other.slot_mapping)
    assert torch.equal(lists.block_table_tensor, other.block_table_tensor)


def test_pages_may_be_shared_and_freed_where_nothing_is_written() -> None:
    """Block 0 stands for pages behind a window; block 5 is a prefix of both."""
    made = make_batch([1, 1], [33, 40], [[5, 0, 7], [5, 2, 9]], 16)
    assert made.slot_mapping.tolist() == [7 * 16, 9 * 16 + 7]


def test_a_chunk_in_the_middle_of_a_prompt_can_say_so() -> None:
    made = make_batch(
        [4, 1, 0], [20, 9, 0], [[3, 1], [2], []], 16, is_prefilling=[True, False, True]
    )
    assert made.is_prefilling is not None
    assert made.is_prefilling.tolist() == [True, False, False], "a padding row never is"


def test_causality_per_request_lies_with_the_batch() -> None:
    mask = torch.tensor([True, False])
    made = make_batch([1, 1], [1, 1], [[1], [2]], 16, causal=mask)
    assert isinstance(made.causal, torch.Tensor)
    assert torch.equal(made.causal, mask)
    assert make_batch([1], [1], [[1]], 16, causal=False).causal is False


def test_ids_up_to_the_largest_int32_are_kept() -> None:
    last = 2**31 - 1
    made = make_batch([1], [1], [[last]], 16)
    assert made.block_table_tensor.tolist() == [[last]]
    assert made.slot_mapping.tolist() == [last * 16]


GOOD: dict[str, Any] = {
    "query_lens": [2, 1],
    "seq_lens": [5, 17],
    "block_tables": [[3], [1, 2]],
    "block_size": 16,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query_lens": [2]}, "1 query lengths, 2 sequence lengths and 2 block tables"),
        ({"seq_lens": [5, 17, 1]}, "3 sequence lengths"),
        ({"block_tables": [[3]]}, "1 block tables"),
        ({"block_size": 0}, "block_size 0 is not allowed"),
        ({"block_size": -16}, "block_size -16"),
        ({"block_size": 16.0}, "block_size 16.0 is not allowed"),
        ({"block_tables": [1, 2]}, r"block_tables is \[1, 2\]; give one list"),
        ({"block_tables": 3}, "block_tables is 3; give one list"),
        ({"query_lens": [[1], [1, 2]]}, "query_lens is .*; give whole numbers"),
        ({"is_prefilling": ["yes", "no"]}, "is_prefilling is <U3"),
        ({"mm_req_doc_ranges": [(0, 3)]}, r"mm_req_doc_ranges is .* give \{request: \[\(first"),
        ({"mm_req_doc_ranges": {0: (0, 3)}}, r"mm_req_doc_ranges of row 0 is \(0, 3\)"),
        ({"tree_parents": [-1, 0]}, r"tree_parents is \[-1, 0\]; give \{request"),
        ({"tree_parents": {0: [-1, None]}}, "tree_parents of request 0 is object"),
        ({"query_lens": [6, 1]}, "request 0 has 6 new tokens but 5 in all"),
        ({"query_lens": [2, -1]}, "request 1 has -1 new tokens"),
        ({"query_lens": [0, 1], "seq_lens": [-1, 17]}, "request 0 has 0 new tokens but -1"),
        ({"query_lens": [1.5, 1]}, "query_lens is float64"),
        ({"seq_lens": [5.0, 17]}, "seq_lens is float64"),
        ({"query_lens": [[2], [1]]}, r"query_lens is int64 of shape \(2, 1\)"),
        ({"query_lens": [True, True]}, "query_lens is bool"),
        (
            {"block_tables": [[3], [1]]},
            "request 1 has 17 tokens, which need 2 blocks of 16.* has 1",
        ),
        ({"block_tables": [[], [1, 2]]}, "request 0 has 5 tokens, which need 1"),
        ({"block_tables": [[3.0], [1, 2]]}, "the block table of request 0 is float64"),
        ({"block_tables": [[3], [1, -2]]}, "request 1 has block id -2; ids count from 0"),
        ({"block_tables": [[2**31], [1, 2]]}, "request 0 has block id 2147483648"),
        ({"block_tables": [[3], [1, 0]]}, "request 1 would write position 16 into block 0"),
        (
            {"seq_lens": [5, 5], "block_tables": [[3], [3]]},
            "requests 0 and 1 would write positions 4 and 4 into the same place of block 3",
        ),
        (
            {"query_lens": [2, 17], "block_tables": [[3], [1, 1]]},
            "requests 1 and 1 would write positions 0 and 16 into the same place of block 1",
        ),
        (
            {"is_prefilling": [True]},
            r"is_prefilling is bool of shape \(1,\); give one bool for each of the 2",
        ),
        ({"causal": torch.tensor([True])}, r"causal is a tensor of shape \(1,\)"),
        ({"causal": torch.tensor([1, 0])}, "torch.int64; give a bool, or one torch.bool"),
        ({"seq_lens": [2**40, 17]}, "request 0 has 2 new tokens but 1099511627776"),
        (
            {"seq_lens": [2**32, 17], "block_size": 2**31 - 1, "block_tables": [[3, 4, 5], [1]]},
            "request 0 has 2 new tokens but 4294967296 in all",
        ),
        ({"block_size": 2**31}, "block_size 2147483648"),
        ({"rswa_prefix_lens": [5]}, "1 rswa_prefix_lens were given for 2 requests"),
        ({"rswa_prefix_lens": [5, 18]}, "row 1 is 18, and the request has 17 tokens"),
        ({"rswa_prefix_lens": [-1, 0]}, "row 0 is -1"),
        ({"mm_req_doc_ranges": {2: [(0, 1)]}}, "names row 2; the batch has 2 rows"),
        ({"mm_req_doc_ranges": {0: [(3, 2)]}}, r"row 0: \(3, 2\) is reversed"),
        ({"mm_req_doc_ranges": {0: [(3, 5)]}}, r"\(3, 5\) is not inside the request's 5 tokens"),
        ({"mm_req_doc_ranges": {1: [(-1, 2)]}}, r"row 1: \(-1, 2\) is not inside"),
        (
            {"mm_req_doc_ranges": {1: [(7, 9), (0, 3), (3, 6)]}},
            r"row 1: \(0, 3\) and \(3, 6\) overlap",
        ),
        (
            {"causal": [True, False]},
            r"causal is \[True, False\]; give a bool, or one torch.bool",
        ),
        ({"tree_parents": {2: [-1]}}, "names request 2; the batch has 2 of them"),
        ({"tree_parents": {0: [-1]}}, "request 0 has 1 entries for 2 new tokens"),
        ({"tree_parents": {0: [-1, 1]}}, "token 1 of a tree has parent 1; give an earlier token"),
        ({"tree_parents": {0: [-2, 0]}}, "token 0 of a tree has parent -2"),
        (
            {
                "query_lens": [2, 65],
                "seq_lens": [2, 65],
                "block_tables": [[3], [1, 2, 4, 5, 6]],
                "tree_parents": {1: [-1] * 65},
            },
            "a tree of 65 tokens was given; give at most 64",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BatchError, match=named):
        make_batch(**{**GOOD, **changes})


@pytest.mark.parametrize("device", ["gpu", "meta"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(ConfigurationError, match=device):
        make_batch(**GOOD, device=device)


def test_trees_become_one_word_per_token() -> None:
    parents = [-1, 0, 0, 2, -1]
    made = make_batch([1, 5], [5, 17], [[3], [1, 2]], 16, tree_parents={1: parents})
    assert made.tree_mask is not None
    assert made.tree_mask.dtype == torch.int64
    assert made.tree_mask.tolist() == [0, 0b1, 0b11, 0b101, 0b1101, 0b10000]
    assert make_batch(**GOOD).tree_mask is None
    tokens = [-1, *range(63)]
    chain = make_batch([64], [64], [[1, 2, 3, 4]], 16, tree_parents={0: tokens})
    assert chain.tree_mask is not None
    assert chain.tree_mask.tolist()[-2:] == [(1 << 63) - 1, -1]


def test_ranges_become_one_per_token() -> None:
    ranges = {0: [(2, 3)], 1: [(14, 15), (16, 16)]}
    made = make_batch([2, 3], [5, 17], [[3], [1, 2]], 16, mm_req_doc_ranges=ranges)
    spans = made.mm_token_spans()
    assert spans is not None
    assert spans.dtype == torch.int32
    # Positions 3, 4 and 14, 15, 16, each with its range's end past the last key.
    assert spans.tolist() == [[2, 4], [1 << 30, 0], [14, 16], [14, 16], [16, 17]]
    assert made.mm_token_spans() is spans


def test_ranges_that_no_new_token_lies_in_cost_nothing() -> None:
    """A decode behind an image, and padding behind the last token."""
    made = make_batch([2, 1], [5, 17], [[3], [1, 2]], 16, mm_req_doc_ranges={1: [(0, 15)]})
    assert made.mm_token_spans() is None
    assert make_batch(**GOOD, mm_req_doc_ranges={}).mm_token_spans() is None
    padded = made.replace(mm_req_doc_ranges={1: [(3, 16)]}, num_actual_tokens=5)
    spans = padded.mm_token_spans()
    assert spans is not None
    assert spans.tolist()[2:] == [[3, 17], [1 << 30, 0], [1 << 30, 0]]


def test_ranges_on_a_device_need_lengths_on_the_host() -> None:
    made = make_batch(**GOOD, mm_req_doc_ranges={0: [(0, 4)]})
    gone = made.replace(seq_lens_cpu_upper_bound=None)
    spans = gone.mm_token_spans()
    assert spans is not None
    assert spans.tolist() == [[0, 5], [0, 5], [1 << 30, 0]]
    elsewhere = gone.replace(seq_lens=gone.seq_lens.to("meta"))
    with pytest.raises(BatchError, match="set seq_lens_cpu_upper_bound"):
        elsewhere.mm_token_spans()


def test_nothing_of_the_callers_is_changed_or_kept() -> None:
    queries, tables = [2, 1], [[3], [1, 2]]
    made = make_batch(queries, [5, 17], tables, 16)
    made.slot_mapping.fill_(-1)
    made.block_table_tensor.fill_(9)
    assert (queries, tables) == ([2, 1], [[3], [1, 2]])
