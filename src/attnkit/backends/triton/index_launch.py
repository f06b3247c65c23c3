"""Launchers of an indexer's kernels: check, choose constants and grid, start.

In: a step's keys or queries, and `IndexPages`. Out: launched kernels. As in `launch`, `*_call`s make
`KernelCall`s without running anything, and `*_changes` are what differs between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.repeat import kind_of
from attnkit.backends.stored import Codes, float32_view
from attnkit.backends.triton.configs import Gpu, index_tile, padded
from attnkit.backends.triton.index import index_score_kernel, index_top_kernel, index_write_kernel

_MAX_SCORES = 1 << 26
"""Float32 elements (256 MiB) that scores of a step may take; more queries go one part after another."""

_BLOCK_T = 16
"""Tokens of a program that writes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexPages:
    """Views of a cache of B blocks of N keys.

    Attributes:
        keys: (B, N, head_size), numbers, or float8 codes as bytes.
        scales: float32 (B, N) beside the codes; None: there are none.
    """

    keys: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def of(cls, cache: torch.Tensor, head_size: int) -> IndexPages:
        """The parts of a cache (B, N, C), uint8 where it holds codes.

        Raises:
            CacheError: pages are not aligned to the float32 scales in them.
        """
        if cache.dtype is not torch.uint8:
            return cls(keys=cache, scales=None)
        words = float32_view(cache[:, None])[:, 0]
        return cls(keys=cache[..., :head_size], scales=words[..., head_size // 4])

    @property
    def places(self) -> torch.Tensor:
        """Whose strides say where a key lies: in words where there are scales, so that code and scale
        are at one offset."""
        return self.keys if self.scales is None else self.scales

    @property
    def unit(self) -> int:
        """Elements of `keys` that these strides count."""
        return 1 if self.scales is None else 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexStep:
    """What choosing keys reads and writes beside pages. R requests, T queries, lists of k.

    Attributes:
        q: (at least T, num_heads, head_size), last stride 1, of the pages' dtype or one that holds it.
        weights: (at least T, num_heads), last stride 1.
        query_start_loc: int32 (R + 1,).
        seq_lens: int32 (R,).
        block_table: int32 (R, W).
        lists: int32 (T, k), out; last stride 1.
    """

    q: torch.Tensor
    weights: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    lists: torch.Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        """What compiled kernels depend on of all these (`repeat`)."""
        of_batch = (self.query_start_loc, self.seq_lens, self.block_table)
        # Kernels do not look at the alignment of these.
        return (*kind_of(self.q, self.weights, self.lists), *(x.dtype for x in of_batch))

    def parts(
        self, page_size: int, max_seq_len: int, max_scores: int = _MAX_SCORES
    ) -> list[IndexPart]:
        """Queries that are served at once, until all are. Their scores share memory.

        Args:
            page_size: tokens in a page.
            max_seq_len: no query sees more keys, now or in any replay.
            max_scores: float32 elements to use.
        """
        num_tokens = self.lists.shape[0]
        width = max(1, min(max_seq_len, self.block_table.shape[1] * page_size))
        step = max(1, min(num_tokens, max_scores // width))
        scores = self.q.new_empty(step, width, dtype=torch.float32)
        return [
            IndexPart(first=first, num_rows=min(step, num_tokens - first), scores=scores)
            for first in range(0, num_tokens, step)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexPart:
    """Some neighbouring queries of a step.

    Attributes:
        first: the first of them.
        num_rows: how many.
        scores: float32 (at least num_rows, width), for theirs; none sees more keys than that.
    """

    first: int
    num_rows: int
    scores: torch.Tensor

    def num_splits(self, element_size: int, gpu: Gpu) -> int:
        """Programs that share a query, whose elements have so many bytes."""
        # Four programs fit a multiprocessor; a query alone is spread over all of them.
        fill = triton.cdiv(4 * gpu.num_sms, self.num_rows)
        return min(fill, triton.cdiv(self.scores.shape[1], index_tile(element_size)[0]))


def index_write_call(k: torch.Tensor, pages: IndexPages, slot_mapping: torch.Tensor) -> KernelCall:
    """The write of keys.

    Args:
        k: (at least T, head_size), last stride 1.
        pages: of the cache.
        slot_mapping: int64 or int32 (T,); -1 writes nothing.
    """
    head_size = k.shape[1]
    return KernelCall(
        kernel=index_write_kernel,
        grid=index_write_grid(slot_mapping),
        arguments={
            **index_write_changes(k, slot_mapping),
            "codes_ptr": pages.keys,
            "scales_ptr": pages.scales,
            "key_stride": k.stride(0),
            "stride_page": pages.places.stride(0),
            "stride_row": pages.places.stride(1),
            "HEAD_SIZE": head_size,
            "BLOCK_D": padded(head_size),
            "PAGE_SIZE": pages.keys.shape[1],
            "BLOCK_T": _BLOCK_T,
            "UNIT": pages.unit,
        },
        device=k.device,
        options={"num_warps": 4, "num_stages": 1},
    )


def index_write_grid(slot_mapping: torch.Tensor) -> tuple[int]:
    """Programs of the kernel."""
    return (triton.cdiv(slot_mapping.shape[0], _BLOCK_T),)


def index_write_changes(k: torch.Tensor, slot_mapping: torch.Tensor) -> dict[str, Any]:
    """Arguments of `index_write_call` that differ from one step to the next."""
    return {
        "key_ptr": k,
        "slot_mapping_ptr": slot_mapping,
        "num_tokens": slot_mapping.shape[0],
    }


def index_score_call(step: IndexStep, part: IndexPart, pages: IndexPages, gpu: Gpu) -> KernelCall:
    """The scores of some queries.

    Args:
        step, part: which.
        pages: of the cache.
        gpu: where it runs.
    """
    keys, codes, q = pages.keys, Codes.NUMBERS, step.q
    if pages.scales is not None:
        keys = keys.view(torch.float8_e4m3fn) if gpu.has_e4m3 else keys
        codes = Codes.NUMBERS if gpu.has_e4m3 else Codes.E4M3
    block_n, num_warps = index_tile(q.element_size())
    num_heads, head_size = q.shape[1:]
    return KernelCall(
        kernel=index_score_kernel,
        grid=index_score_grid(step, part, gpu),
        arguments={
            **index_score_changes(step, part, gpu),
            "codes_ptr": keys,
            "scales_ptr": pages.scales,
            "q_stride_token": q.stride(0),
            "q_stride_head": q.stride(1),
            "weights_stride": step.weights.stride(0),
            "stride_page": pages.places.stride(0),
            "stride_row": pages.places.stride(1),
            "NUM_HEADS": num_heads,
            "HEAD_SIZE": head_size,
            "BLOCK_H": padded(num_heads),
            "BLOCK_D": padded(head_size),
            "BLOCK_N": block_n,
            "BLOCK_R": 128,
            "PAGE_SIZE": pages.keys.shape[1],
            "CODES": int(codes),
            "UNIT": pages.unit,
        },
        device=q.device,
        options={"num_warps": num_warps, "num_stages": 2},
    )


def index_score_grid(step: IndexStep, part: IndexPart, gpu: Gpu) -> tuple[int]:
    """Programs of the kernel."""
    return (part.num_rows * part.num_splits(step.q.element_size(), gpu),)


def index_score_changes(step: IndexStep, part: IndexPart, gpu: Gpu) -> dict[str, Any]:
    """Arguments of `index_score_call` that differ from one step to the next."""
    return {
        **_of_part(step, part),
        "q_ptr": step.q,
        "weights_ptr": step.weights,
        "table_ptr": step.block_table,
        "table_stride": step.block_table.stride(0),
        "num_splits": part.num_splits(step.q.element_size(), gpu),
    }


def index_top_call(step: IndexStep, part: IndexPart) -> KernelCall:
    """The lists of some queries, by scores that `index_score_call` has left."""
    return KernelCall(
        kernel=index_top_kernel,
        grid=index_top_grid(part),
        arguments={**index_top_changes(step, part), "BLOCK_R": 128, "BLOCK_N": 2048},
        device=step.q.device,
        options={"num_warps": 8, "num_stages": 1},
    )


def index_top_grid(part: IndexPart) -> tuple[int]:
    """Programs of the kernel."""
    return (part.num_rows,)


def index_top_changes(step: IndexStep, part: IndexPart) -> dict[str, Any]:
    """Arguments of `index_top_call` that differ from one step to the next."""
    return {
        **_of_part(step, part),
        "lists_ptr": step.lists,
        "lists_stride": step.lists.stride(0),
    }


def _of_part(step: IndexStep, part: IndexPart) -> dict[str, Any]:
    """What differs from one step to the next for both kernels."""
    return {
        "scores_ptr": part.scores,
        "query_start_loc_ptr": step.query_start_loc,
        "seq_lens_ptr": step.seq_lens,
        "num_reqs": step.seq_lens.shape[0],
        "first_query": part.first,
        "max_seen": part.scores.shape[1],
        "k": step.lists.shape[1],
        "scores_stride": part.scores.stride(0),
    }
