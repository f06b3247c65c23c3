"""RaggedPrefill: prefills by a library that takes tokens one after the other, request by request.

In: as `MLAPrefillBackend`. Out: attention. A library is given the requests that have queries and keys,
since libraries differ in what they make of a row without keys; rows of a chunk's pages without a token
are left out. What follows from lengths alone is worked out once a step, for all layers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attnkit.mla.plan import ContextChunk, PrefillPart
from attnkit.mla.prefill_backend import MLAPrefillBackend
from attnkit.upload import Upload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedBatch:
    """n requests, each with at least one query and one key.

    Attributes:
        query_start_loc, key_start_loc: int32 (n + 1,), from 0.
        query_start_loc_cpu, key_start_loc_cpu: the same on the host.
        max_query_len, max_key_len: of the batch.
        query_rows: int64, rows of the given queries that are theirs; None: all.
        key_rows: int64, rows of the given keys that are theirs, in order; None: the first.
        planned: what a library worked out for it, by what else it depends on.
    """

    query_start_loc: torch.Tensor
    key_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    key_start_loc_cpu: torch.Tensor
    max_query_len: int
    max_key_len: int
    query_rows: torch.Tensor | None
    key_rows: torch.Tensor | None
    planned: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        query_start_loc: np.ndarray,
        key_lens: np.ndarray,
        block_size: int,
        device: torch.device,
    ) -> RaggedBatch:
        """Of requests whose keys begin at whole pages, one behind the other.

        Args:
            query_start_loc: int64 (m + 1,), from 0.
            key_lens: int64 (m,); 0 where a request has no queries.
            block_size: tokens in a page; 1: there are no pages.
            device: where it runs.
        """
        query_lens = np.diff(query_start_loc)
        first_rows = _starts(-(-key_lens // block_size)) * block_size
        served = np.flatnonzero((query_lens > 0) & (key_lens > 0))
        starts, ends = _starts(query_lens[served]), _starts(key_lens[served])
        upload = Upload(device)
        moved_starts = [upload.add(x, np.int32) for x in (starts, ends)]
        query_rows = key_rows = None
        if starts[-1] < query_start_loc[-1]:
            query_rows = upload.add(_rows(query_start_loc, query_lens, served), np.int64)
        if (first_rows[served] != ends[:-1]).any():
            key_rows = upload.add(_rows(first_rows, key_lens, served), np.int64)
        _, moved = upload.send()
        return cls(
            query_start_loc=moved[moved_starts[0]],
            key_start_loc=moved[moved_starts[1]],
            query_start_loc_cpu=torch.from_numpy(starts).to(torch.int32),
            key_start_loc_cpu=torch.from_numpy(ends).to(torch.int32),
            max_query_len=int(query_lens[served].max(initial=0)),
            max_key_len=int(key_lens[served].max(initial=0)),
            query_rows=None if query_rows is None else moved[query_rows],
            key_rows=None if key_rows is None else moved[key_rows],
        )


class RaggedPrefill(MLAPrefillBackend):
    """Attends to tokens in order."""

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in (torch.float16, torch.bfloat16)

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: RaggedBatch,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the library.

        Args:
            query: (num_tokens, num_heads, qk_head_dim).
            key: (at least as many as there are keys, num_heads, qk_head_dim).
            value: likewise, v_head_dim; any strides but the last.
            batch: of these.
            causal: each request has as many keys as queries, and query i sees the first i + 1.

        Returns:
            (num_tokens, num_heads, v_head_dim), and the natural LSE, float32 (num_tokens, num_heads).
        """
        ...

    def run_prefill_new_tokens(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefillPart,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        batch = plan.shared.get(RaggedBatch)
        if batch is None:
            starts = plan.query_start_loc_cpu
            batch = RaggedBatch.of(starts, np.diff(starts), 1, query.device)
            plan.shared[RaggedBatch] = batch
        self._fill(query, key, value, batch, True, output, lse)

    def run_prefill_context_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: ContextChunk,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        batch = chunk.shared.get(RaggedBatch)
        if batch is None:
            starts, lens = chunk.query_start_loc_cpu, chunk.kv_lens_cpu
            batch = RaggedBatch.of(starts, lens, key.shape[1], query.device)
            chunk.shared[RaggedBatch] = batch
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        self._fill(query, key, value, batch, False, output, lse)

    def _fill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: RaggedBatch,
        causal: bool,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        if batch.key_rows is not None:
            key, value = key[batch.key_rows], value[batch.key_rows]
        if batch.query_rows is None:
            out, own_lse = self.attend(query, key, value, batch, causal)
            output.copy_(out)
            lse.copy_(own_lse)
            return
        output.zero_()
        lse.fill_(-math.inf)
        if len(batch.query_rows):
            out, own_lse = self.attend(query[batch.query_rows], key, value, batch, causal)
            output[batch.query_rows] = out.to(output.dtype)
            lse[batch.query_rows] = own_lse


def _starts(lens: np.ndarray) -> np.ndarray:
    """Where each of neighbours begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lens)])


def _rows(starts: np.ndarray, lens: np.ndarray, served: np.ndarray) -> np.ndarray:
    """Rows of some requests, in order."""
    runs = [np.arange(int(starts[r]), int(starts[r] + lens[r])) for r in served.tolist()]
    return np.concatenate(runs or [served])
