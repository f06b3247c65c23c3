"""Launchers of an indexer's kernels: check, choose constants and grid, start.

In: a step's keys or queries, and `IndexPages`. Out: launched kernels. As in `launch`, `*_call`s make
`KernelCall`s without running anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Codes, float32_view
from attnkit.backends.triton.configs import Gpu, index_tile, padded
from attnkit.backends.triton.index import index_score_kernel, index_top_kernel, index_write_kernel

_MAX_SCORES = 1 << 26
"""Float32 elements (256 MiB) that scores of a step may take; more queries go one part after another."""


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


def index_write_call(k: torch.Tensor, pages: IndexPages, slot_mapping: torch.Tensor) -> KernelCall:
    """The write of keys.

    Args:
        k: (at least T, head_size), last stride 1.
        pages: of the cache.
        slot_mapping: int64 or int32 (T,); -1 writes nothing.
    """
    num_tokens, head_size, block_t = slot_mapping.shape[0], k.shape[1], 16
    return KernelCall(
        kernel=index_write_kernel,
        grid=(triton.cdiv(num_tokens, block_t),),
        arguments={
            "key_ptr": k,
            "codes_ptr": pages.keys,
            "scales_ptr": pages.scales,
            "slot_mapping_ptr": slot_mapping,
            "num_tokens": num_tokens,
            "key_stride": k.stride(0),
            "stride_page": pages.places.stride(0),
            "stride_row": pages.places.stride(1),
            "HEAD_SIZE": head_size,
            "BLOCK_D": padded(head_size),
            "PAGE_SIZE": pages.keys.shape[1],
            "BLOCK_T": block_t,
            "UNIT": pages.unit,
        },
        device=k.device,
        options={"num_warps": 4, "num_stages": 1},
    )


def index_choose_calls(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: IndexPages,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    lists: torch.Tensor,
    *,
    max_seq_len: int,
    gpu: Gpu,
    max_scores: int = _MAX_SCORES,
) -> Iterator[KernelCall]:
    """Scores of some queries, then their lists, until all T have theirs. Each two share their memory.

    Args:
        q: (at least T, num_heads, head_size), last stride 1, of the pages' dtype or one that holds it.
        weights: (at least T, num_heads), last stride 1.
        pages: of the cache.
        query_start_loc: int32 (R + 1,).
        seq_lens: int32 (R,).
        block_table: int32 (R, W).
        lists: int32 (T, k), out; last stride 1.
        max_seq_len: no query sees more keys, now or in any replay.
        gpu: where it runs.
        max_scores: float32 elements to use.
    """
    num_tokens, k = lists.shape
    num_heads, head_size = q.shape[1:]
    page_size = pages.keys.shape[1]
    width = max(1, min(max_seq_len, block_table.shape[1] * page_size))
    step = max(1, min(num_tokens, max_scores // width))
    scores = q.new_empty(step, width, dtype=torch.float32)
    keys, codes = pages.keys, Codes.NUMBERS
    if pages.scales is not None:
        keys = keys.view(torch.float8_e4m3fn) if gpu.has_e4m3 else keys
        codes = Codes.NUMBERS if gpu.has_e4m3 else Codes.E4M3
    block_n, num_warps = index_tile(q.element_size())
    for first in range(0, num_tokens, step):
        num_rows = min(step, num_tokens - first)
        common = {
            "scores_ptr": scores,
            "query_start_loc_ptr": query_start_loc,
            "seq_lens_ptr": seq_lens,
            "num_reqs": seq_lens.shape[0],
            "first_query": first,
            "max_seen": width,
            "scores_stride": scores.stride(0),
            "BLOCK_R": 128,
        }
        # Four programs fit a multiprocessor; a query alone is spread over all of them.
        fill = triton.cdiv(4 * gpu.num_sms, num_rows)
        splits = min(fill, triton.cdiv(width, block_n))
        yield KernelCall(
            kernel=index_score_kernel,
            grid=(num_rows * splits,),
            arguments={
                **common,
                "q_ptr": q,
                "weights_ptr": weights,
                "codes_ptr": keys,
                "scales_ptr": pages.scales,
                "table_ptr": block_table,
                "num_splits": splits,
                "q_stride_token": q.stride(0),
                "q_stride_head": q.stride(1),
                "weights_stride": weights.stride(0),
                "stride_page": pages.places.stride(0),
                "stride_row": pages.places.stride(1),
                "table_stride": block_table.stride(0),
                "NUM_HEADS": num_heads,
                "HEAD_SIZE": head_size,
                "BLOCK_H": padded(num_heads),
                "BLOCK_D": padded(head_size),
                "BLOCK_N": block_n,
                "PAGE_SIZE": page_size,
                "CODES": int(codes),
                "UNIT": pages.unit,
            },
            device=q.device,
            options={"num_warps": num_warps, "num_stages": 2},
        )
        yield KernelCall(
            kernel=index_top_kernel,
            grid=(num_rows,),
            arguments={
                **common,
                "lists_ptr": lists,
                "k": k,
                "lists_stride": lists.stride(0),
                "BLOCK_N": 2048,
            },
            device=q.device,
            options={"num_warps": 8, "num_stages": 1},
        )
