"""Chunked local attention as virtual requests: how they are cut, and what is refused.

That they answer as the mask says is judged by the kit, on every backend; here the judge is shown to see
a wrong cut.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkit import Attention, make_batch
from attnkit.backends.wrappers import chunked_local as wrap
from attnkit.backends.wrappers.chunked import ChunkedLocalBuilder, virtual_batch
from attnkit.conformance.case import Case
from attnkit.conformance.checks import check_case
from attnkit.conformance.subject import LawBroken, Subject
from attnkit.contract import (
    AttentionCGSupport,
    ChunkedLocalAttentionSpec,
    CommonAttentionMetadata,
    FullAttentionSpec,
    VllmConfig,
)
from attnkit.errors import BatchError, ConfigurationError
from attnkit.selection import resolve


def batch_of(
    query_lens: list[int], seq_lens: list[int], block_size: int
) -> CommonAttentionMetadata:
    """Request r has blocks 100 r + 1, 100 r + 2, ..."""
    tables = [[100 * r + i + 1 for i in range(-(-n // block_size))] for r, n in enumerate(seq_lens)]
    return make_batch(query_lens, seq_lens, tables, block_size)


def rows_of(batch: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
    """Query and key lengths of the rows that have tokens."""
    new, lens = batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist()
    there = [r for r, n in enumerate(new) if n]
    return [new[r] for r in there], [lens[r] for r in there]


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "chunk", "queries", "keys"),
    [
        ([4, 10, 5], [6, 17, 9], 4, [2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1]),
        ([8], [12], 4, [4, 4], [4, 4]),
        ([7], [10], 4, [1, 4, 2], [4, 4, 2]),
        ([5], [5], 10, [5], [5]),
        ([1], [5], 4, [1], [1]),
        ([1], [8], 4, [1], [4]),
        ([0, 3, 0], [0, 3, 0], 4, [3], [3]),
        ([], [], 4, [], []),
    ],
)
def test_requests_are_cut_where_positions_are_multiples(
    query_lens: list[int], seq_lens: list[int], chunk: int, queries: list[int], keys: list[int]
) -> None:
    virtual = virtual_batch(batch_of(query_lens, seq_lens, 2), chunk, 2)
    assert rows_of(virtual) == (queries, keys)
    assert virtual.query_start_loc_cpu.tolist() == virtual.query_start_loc.tolist()
    assert virtual.num_reqs == len(virtual.seq_lens) == len(virtual.block_table_tensor)


def test_a_virtual_request_has_the_pages_of_its_chunk() -> None:
    virtual = virtual_batch(batch_of([8, 1], [12, 5], 2), 4, 2)
    there = virtual.query_start_loc.diff() > 0
    # Past a request's last page its last one is repeated, which nobody reads.
    assert virtual.block_table_tensor[there].tolist()[:2] == [[3, 4], [5, 6]]
    assert virtual.block_table_tensor[there].tolist()[2][0] == 103
    assert not virtual.is_prefilling[~there].any()


def test_a_chunk_longer_than_the_block_table_takes_its_pages_alone() -> None:
    batch = batch_of([8, 1], [12, 5], 2)
    virtual = virtual_batch(batch, 2**30, 2)
    assert virtual.block_table_tensor.shape[1] == batch.block_table_tensor.shape[1]
    there = virtual.query_start_loc.diff() > 0
    assert torch.equal(virtual.block_table_tensor[there], batch.block_table_tensor)


@settings(max_examples=100, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=6),
    pages=st.integers(1, 5),
)
def test_every_query_is_in_one_row_with_the_keys_of_its_chunk(
    lens: list[tuple[int, int]], pages: int
) -> None:
    size, chunk = 3, 3 * pages
    query_lens, seq_lens = [q for q, _ in lens], [q + context if q else 0 for q, context in lens]
    batch = batch_of(query_lens, seq_lens, size)
    virtual = virtual_batch(batch, chunk, size)
    positions = [p for q, n in zip(query_lens, seq_lens, strict=True) for p in range(n - q, n)]
    owners = [r for r, q in enumerate(query_lens) for _ in range(q)]
    starts = virtual.query_start_loc.tolist()
    assert starts[-1] == sum(query_lens)
    for row, kv_len in enumerate(virtual.seq_lens.tolist()):
        tokens = range(starts[row], starts[row + 1])
        assert len(tokens) <= kv_len <= chunk or not tokens
        for i, token in enumerate(tokens):
            in_chunk = kv_len - len(tokens) + i
            assert positions[token] % chunk == in_chunk
            page = positions[token] // size
            block = virtual.block_table_tensor[row, in_chunk // size]
            assert block == batch.block_table_tensor[owners[token], page]


def test_a_device_may_know_better_where_a_request_stands() -> None:
    """Drafts were rejected: the host's bound is above the true length, which decides the chunk."""
    batch = batch_of([2, 1], [9, 4], 2)
    late = batch.replace(seq_lens_cpu_upper_bound=torch.tensor([12, 4], dtype=torch.int32))
    here, there = virtual_batch(batch, 4, 2), virtual_batch(late, 4, 2)
    assert rows_of(here) == ([1, 1, 1], [4, 1, 4])
    assert rows_of(there) == rows_of(here)
    assert there.num_reqs == here.num_reqs


def test_what_chunks_cannot_do_is_refused() -> None:
    ranges = batch_of([4], [4], 2).replace(mm_req_doc_ranges={0: [(1, 2)]})
    with pytest.raises(BatchError, match="has mm_req_doc_ranges"):
        virtual_batch(ranges, 4, 2)
    tree = batch_of([4], [4], 2).replace(tree_mask=torch.ones(4, dtype=torch.int64))
    with pytest.raises(BatchError, match="has tree_mask"):
        virtual_batch(tree, 4, 2)
    shares = batch_of([4], [4], 2).replace(dcp_local_seq_lens=torch.ones(1, dtype=torch.int32))
    with pytest.raises(BatchError, match="has dcp_local_seq_lens"):
        virtual_batch(shares, 4, 2)
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    builder = wrap(resolve("reference")).get_builder_cls()
    with pytest.raises(ConfigurationError, match="takes its chunk size from"):
        builder(FullAttentionSpec(block_size=4, **shape), ["a"], VllmConfig(), torch.device("cpu"))
    spec = ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=6, **shape)
    with pytest.raises(ConfigurationError, match="6 is no multiple of block_size 4"):
        builder(spec, ["a"], VllmConfig(), torch.device("cpu"))
    assert builder.get_cudagraph_support(VllmConfig(), spec) is AttentionCGSupport.NEVER


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size 0 is not allowed"),
        (
            {"attention_chunk_size": 2**40},
            "attention_chunk_size 1099511627776 is not allowed; .* 1 to 2147483647",
        ),
        ({"attention_chunk_size": 24}, "24 is no multiple of block_size 16"),
        ({"sliding_window": 4}, "attention_chunk_size and sliding_window exclude"),
        ({"use_mm_prefix": True}, "attention_chunk_size and use_mm_prefix exclude"),
        ({"attn_type": "encoder_only"}, "attention_chunk_size is for decoder layers"),
    ],
)
def test_layers_of_chunks_that_mean_nothing_are_refused(
    arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Attention(4, 16, backend="reference", **{"attention_chunk_size": 32, **arguments})


def test_a_layer_of_chunks_keeps_a_backend_and_a_spec_of_its_own() -> None:
    layer = Attention(4, 16, backend="reference", attention_chunk_size=32)
    inner = resolve("reference")
    assert layer.backend is wrap(inner)
    assert issubclass(layer.backend, inner)
    assert layer.backend.get_name() == inner.get_name()
    assert layer.backend.full_cls_name() != inner.full_cls_name()
    spec = layer.get_kv_cache_spec()
    assert isinstance(spec, ChunkedLocalAttentionSpec)
    assert spec.attention_chunk_size == 32


def from_the_first_query(
    batch: CommonAttentionMetadata, chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """Wrong: chunks counted from where this step's queries begin, as if nothing were cached."""
    context = batch.seq_lens - batch.naive_query_lens()
    shifted = context // chunk_size * chunk_size + batch.naive_query_lens()
    return virtual_batch(batch.replace(seq_lens=shifted.to(torch.int32)), chunk_size, block_size)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_judge_sees_a_wrong_cut(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    case = Case(name="cut", query_lens=(7, 1), seq_lens=(40, 19), chunk_pages=1)
    subject = Subject.of(backend)
    check_case(subject, case)
    monkeypatch.setitem(
        ChunkedLocalBuilder.build.__globals__, "virtual_batch", from_the_first_query
    )
    with pytest.raises(LawBroken):
        check_case(subject, case)
