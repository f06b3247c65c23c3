"""Chunked local attention over any backend: a query sees only keys of its own chunk of positions.

In: a backend that attends to whole requests. Out: one that is given a virtual request for every chunk
that a request's queries touch: these queries, and the keys of that chunk. A virtual request is an
ordinary one (its queries stand at its end, its pages are some of the request's), so the wrapped backend
needs to know nothing, and a chunk's bits depend on the chunk alone.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from attnkit.backends.wrappers.builder import WrappingBuilder
from attnkit.contract import (
    AttentionBackend,
    ChunkedLocalAttentionSpec,
    CommonAttentionMetadata,
    KVCacheSpec,
    subclass_attention_backend_with_overrides,
)
from attnkit.errors import BatchError, ConfigurationError


@functools.cache
def chunked_local(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """`backend` for layers whose cache spec is a `ChunkedLocalAttentionSpec`, which says the chunk size.

    Layers get it with `attention_chunk_size`; the same class every time.
    """

    class Builder(ChunkedLocalBuilder):
        inner_cls = backend.get_builder_cls()

    return subclass_attention_backend_with_overrides(
        "ChunkedLocal",
        backend,
        {
            "get_builder_cls": staticmethod(lambda: Builder),
            # How many rows there may be is counted from the host's lengths.
            "supports_device_cpu_query_lens_mismatch": classmethod(lambda cls: False),
            "supports_tree_mask": classmethod(lambda cls: False),
        },
    )


class ChunkedLocalBuilder(WrappingBuilder):
    """Cuts requests into virtual ones and lets the wrapped builder plan those.

    Not for captured graphs: how many virtual requests there are depends on where requests stand.
    """

    def inner_spec(self, kv_cache_spec: KVCacheSpec) -> KVCacheSpec:
        if not isinstance(kv_cache_spec, ChunkedLocalAttentionSpec):
            raise ConfigurationError(
                f"layers {', '.join(self.layer_names)} keep {kv_cache_spec.kind}; chunked local "
                "attention takes its chunk size from a ChunkedLocalAttentionSpec"
            )
        check_chunk_size(kv_cache_spec.attention_chunk_size, kv_cache_spec.block_size)
        self._chunk_size = kv_cache_spec.attention_chunk_size
        return kv_cache_spec

    @classmethod
    def view_of(cls, kv_cache_spec: KVCacheSpec) -> str:
        assert isinstance(kv_cache_spec, ChunkedLocalAttentionSpec), kv_cache_spec
        return f"chunks of {kv_cache_spec.attention_chunk_size} tokens"

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Plan a batch. A common prefix is not handed on: virtual requests do not begin with it.

        Raises:
            BatchError: as `virtual_batch`.
        """
        batch = virtual_batch(common_attn_metadata, self._chunk_size, self.kv_cache_spec.block_size)
        return self.inner.build(0, self.shown(batch), fast_build)


def check_chunk_size(chunk_size: int, block_size: int) -> None:
    """Refuse chunks that begin inside a block: a virtual request's pages begin with its keys.

    Raises:
        ConfigurationError: it is no multiple of the block size.
    """
    if chunk_size % block_size:
        raise ConfigurationError(
            f"attention_chunk_size {chunk_size} is no multiple of block_size {block_size}; choose a "
            "block size that divides it"
        )


def virtual_batch(
    batch: CommonAttentionMetadata, chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """A batch of one request per chunk that the queries of a request touch, its tokens as before.

    There are as many rows as the host can tell that there may be; those left over are empty. Lengths
    are computed where they are known, on the device, without waiting for it.

    Args:
        batch: to cut.
        chunk_size: positions in a chunk, a multiple of `block_size`.
        block_size: tokens in a block of the block table.

    Raises:
        BatchError: the batch has ranges, which may cross chunks, or shares of lengths over ranks, or a
            tree mask, or no lengths on the host.
    """
    for name in ("mm_req_doc_ranges", "dcp_local_seq_lens", "tree_mask"):
        if getattr(batch, name) is not None:
            raise BatchError(
                f"the batch has {name}, which chunked local attention does not do; leave it out"
            )
    num_reqs = batch.num_reqs
    query_lens = np.diff(batch.query_start_loc_cpu[: num_reqs + 1].numpy()).astype(np.int64)
    # A query in the last place of a chunk and the next ones: one chunk more than they fill.
    most = np.minimum(query_lens, -(-(query_lens - 1) // chunk_size) + 1)
    num_rows = int(most.sum())
    here = _cut(batch.query_start_loc, batch.seq_lens, num_reqs, num_rows, chunk_size)
    host = here
    host_lens = batch.host_seq_lens("chunked local attention")
    if host_lens is not batch.seq_lens:
        host = _cut(batch.query_start_loc_cpu, host_lens, num_reqs, num_rows, chunk_size)
    request, chunk, query_start_loc, seq_lens = here

    width = batch.block_table_tensor.shape[1]
    pages = chunk_size // block_size
    # A chunk longer than the table has no more pages than the table.
    within = torch.arange(min(pages, max(1, width)), device=chunk.device)
    columns, last_column = chunk[:, None] * pages + within, max(0, width - 1)
    table = batch.block_table_tensor[request[:, None], columns.clamp(0, last_column)]
    causal = batch.causal
    prefilling = batch.is_prefilling
    host_request, _, host_query_start_loc, host_seq_lens = host
    return batch.replace(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=host_query_start_loc,
        seq_lens=seq_lens,
        num_reqs=num_rows,
        max_query_len=min(batch.max_query_len, chunk_size),
        max_seq_len=min(batch.max_seq_len, chunk_size),
        block_table_tensor=table,
        causal=causal[request] if isinstance(causal, torch.Tensor) else causal,
        is_prefilling=None
        if prefilling is None
        else prefilling[host_request] & (host_query_start_loc.diff() > 0),
        seq_lens_cpu_upper_bound=host_seq_lens,
        req_idx=None if batch.req_idx is None else batch.req_idx[host_request.numpy()],
        encoder_seq_lens=None,
        encoder_seq_lens_cpu=None,
        rswa_prefix_lens=None,
        replayssm_decode_base_cpu=None,
    )


def _cut(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_reqs: int,
    num_rows: int,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row its request and chunk (int64; a row left over: the last request's, without tokens), and
    the rows' int32 query_start_loc and seq_lens."""
    starts = query_start_loc[: num_reqs + 1].long()
    query_lens, lens = starts.diff(), seq_lens[:num_reqs].long()
    first = torch.div(lens - query_lens, chunk_size, rounding_mode="floor")
    last = torch.div(lens - 1, chunk_size, rounding_mode="floor")
    ends = torch.where(query_lens > 0, last - first + 1, 0).cumsum(0)
    row = torch.arange(num_rows, device=starts.device)
    request = torch.searchsorted(ends, row, right=True).clamp(max=max(0, num_reqs - 1))
    chunk = last[request] - (ends[request] - 1 - row)
    # Positions from the chunk's first to the request's last one in it; queries among them.
    begin = (lens - query_lens)[request].maximum(chunk * chunk_size)
    end = lens[request].minimum((chunk + 1) * chunk_size)
    is_real = row < (ends[-1] if num_reqs else 0)
    new = torch.where(is_real, end - begin, 0)
    length = torch.where(is_real, (end - chunk * chunk_size).clamp(min=0), 0)
    length = torch.where(chunk < 0, 0, length)
    offsets = torch.cat([new.new_zeros(1), new.cumsum(0)])
    return request, chunk, offsets.to(torch.int32), length.to(torch.int32)
