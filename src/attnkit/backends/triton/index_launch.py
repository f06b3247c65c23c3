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
from attnkit.backends.triton.index import index_score_kernel, index_write_kernel
from attnkit.backends.triton.index_top import (
    BINS,
    COUNT_BITS,
    PLAN_SIZE,
    index_count_kernel,
    index_list_kernel,
    index_sift_kernel,
)
from attnkit.errors import BatchError

_MAX_SCORES = 1 << 25
"""Float32 elements (128 MiB) that scores of a step may take, and as many ranks among which the k-th best
is found; more queries go one part after another."""

_SLICE = 2048
"""Scores of a program that lists: eight a thread."""

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

        Raises:
            BatchError: more keys than the kernels count.
        """
        num_tokens = self.lists.shape[0]
        width = max(1, min(max_seq_len, self.block_table.shape[1] * page_size))
        if width >> COUNT_BITS.value:
            raise BatchError(
                f"a query may see {width} keys, of which the indexer's Triton kernels count less than "
                f"{1 << COUNT_BITS.value}; use backend='torch', or a smaller max_seq_len"
            )
        num_tokens, k = self.lists.shape
        step = max(1, min(num_tokens, max_scores // width))
        space = IndexSpace.of(step, width, k, self.q.device)
        return [
            IndexPart(first=first, num_rows=min(step, num_tokens - first), k=k, space=space)
            for first in range(0, num_tokens, step)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexSpace:
    """Memory for queries that are served at once, which see at most `width` keys.

    Attributes:
        scores: float32 (rows, width).
        best: int32 (rows, programs that may share a query), each one's highest rank.
        counts: int32 (rows, slices, bins), how a slice's ranks are spread.
        sifted: int32 (rows, width), the ranks among which the k-th best is.
        plans: int32 (rows, slices, 8), where a slice's part of these and of the list begins.
    """

    scores: torch.Tensor
    best: torch.Tensor
    counts: torch.Tensor
    sifted: torch.Tensor
    plans: torch.Tensor

    @classmethod
    def of(cls, num_rows: int, width: int, k: int, device: torch.device) -> IndexSpace:
        num_slices = triton.cdiv(max(width, k), _SLICE)

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            scores=numbers(width, dtype=torch.float32),
            best=numbers(triton.cdiv(width, 16)),  # A program has a tile of 16 keys at least.
            counts=numbers(num_slices, BINS.value),
            sifted=numbers(width),
            plans=numbers(num_slices, PLAN_SIZE.value),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexPart:
    """Some neighbouring queries of a step.

    Attributes:
        first: the first of them.
        num_rows: how many.
        k: positions of a list.
        space: for theirs; none sees more keys than fit there.
    """

    first: int
    num_rows: int
    k: int
    space: IndexSpace

    @property
    def is_scored(self) -> bool:
        """Whether a query may see more keys than are listed."""
        return self.space.scores.shape[1] > self.k

    def num_splits(self, element_size: int, gpu: Gpu) -> int:
        """Programs that share a query, whose elements have so many bytes."""
        # Four programs fit a multiprocessor; a query alone is spread over all of them.
        fill = triton.cdiv(4 * gpu.num_sms, self.num_rows)
        return min(fill, triton.cdiv(self.space.scores.shape[1], index_tile(element_size)[0]))


def index_write_call(
    k: torch.Tensor, pages: IndexPages, slot_mapping: torch.Tensor, gpu: Gpu
) -> KernelCall:
    """The write of keys.

    Args:
        k: (at least T, head_size), last stride 1.
        pages: of the cache.
        slot_mapping: int64 or int32 (T,); -1 writes nothing.
        gpu: where it runs.
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
            "HAS_FLOAT8": gpu.has_e4m3,
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
    block_n, num_warps, num_stages = index_tile(q.element_size())
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
        options={"num_warps": num_warps, "num_stages": num_stages},
    )


def index_score_grid(step: IndexStep, part: IndexPart, gpu: Gpu) -> tuple[int]:
    """Programs of the kernel."""
    return (part.num_rows * part.num_splits(step.q.element_size(), gpu),)


def index_score_changes(step: IndexStep, part: IndexPart, gpu: Gpu) -> dict[str, Any]:
    """Arguments of `index_score_call` that differ from one step to the next."""
    return {
        **_of_part(step, part),
        "best_ptr": part.space.best,
        "q_ptr": step.q,
        "weights_ptr": step.weights,
        "table_ptr": step.block_table,
        "table_stride": step.block_table.stride(0),
        "num_splits": part.num_splits(step.q.element_size(), gpu),
    }


def index_list_calls(step: IndexStep, part: IndexPart, gpu: Gpu) -> dict[str, KernelCall]:
    """What makes the lists of some queries, in turn, by names; of scores that `index_score_call` has
    left, if `part.is_scored`."""
    device = step.q.device
    blocks = {"SLICE": _SLICE, "BLOCK_R": 128}
    options = {"num_warps": 8, "num_stages": 1}
    changes, grid = index_list_changes(step, part, gpu), index_list_grid(part)
    bins = {"SCORE_BLOCK": index_tile(step.q.element_size())[0], **blocks}
    kernels = {
        "count": (index_count_kernel, bins),
        "sift": (index_sift_kernel, {**bins, "BLOCK_S": 32}),
        "list": (index_list_kernel, blocks),
    }
    return {
        name: KernelCall(
            kernel=kernels[name][0],
            grid=grid,
            arguments={**arguments, **kernels[name][1]},
            device=device,
            options=options,
        )
        for name, arguments in changes.items()
    }


def index_list_grid(part: IndexPart) -> tuple[int, int]:
    """Programs of each of these."""
    return (part.num_rows, part.space.plans.shape[1])


def index_list_changes(step: IndexStep, part: IndexPart, gpu: Gpu) -> dict[str, dict[str, Any]]:
    """Arguments of `index_list_calls` that differ from one step to the next, by the same names."""
    space, common = part.space, _of_part(step, part)
    plans = {"plans_ptr": space.plans, "sifted_ptr": space.sifted}
    listed = {
        "list": {**common, **plans, "lists_ptr": step.lists, "lists_stride": step.lists.stride(0)}
    }
    if not part.is_scored:
        return listed
    num_splits = part.num_splits(step.q.element_size(), gpu)
    counted = {
        **common,
        "best_ptr": space.best,
        "counts_ptr": space.counts,
        "num_splits": num_splits,
    }
    return {"count": counted, "sift": {**counted, **plans}, **listed}


def _of_part(step: IndexStep, part: IndexPart) -> dict[str, Any]:
    """What differs from one step to the next for all kernels."""
    scores = part.space.scores
    return {
        "scores_ptr": scores,
        "query_start_loc_ptr": step.query_start_loc,
        "seq_lens_ptr": step.seq_lens,
        "num_reqs": step.seq_lens.shape[0],
        "first_query": part.first,
        "max_seen": scores.shape[1],
        "k": part.k,
        "scores_stride": scores.stride(0),
    }
