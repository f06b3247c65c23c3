"""Inputs: the tensors of one workload, which every contender shares.

In: a workload, a device, a seed. Out: queries, the batch, and pages full of random numbers in any
layout asked for; what the first caller gets is the original, the rest are copies. Page ids are
shuffled. New keys and values are what the pages already hold at their slots, so writing them again
changes nothing.
"""

from __future__ import annotations

import torch

from attnkit.batch import make_batch
from attnkit.bench.workloads import Workload
from attnkit.contract import (
    CommonAttentionMetadata,
    FullAttentionSpec,
    KVCacheLayout,
    KVQuantMode,
    get_kv_quant_mode,
)
from attnkit.kvcache.pool import PagedKVCache

_LAYER = "bench"
_CHUNK = 1 << 26
"""Elements converted at once, so that filling quantised pages does not double the memory."""


class Inputs:
    """One set of tensors. Nothing in it may be written by a contender except new tokens' slots.

    Attributes:
        workload: what they are for.
        device: where they live.
        query: (num_tokens, num_heads, head_size).
        block_tables: page ids of each request, on the host.
        batch: the same batch as an engine would describe it.
    """

    def __init__(self, workload: Workload, device: torch.device | str, seed: int = 0) -> None:
        self.workload, self.device = workload, torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self.query = torch.randn(
            (workload.num_tokens, workload.num_heads, workload.head_size),
            dtype=workload.torch_dtype,
            device=self.device,
            generator=self._generator,
        )
        shuffle = torch.Generator().manual_seed(seed)
        # Block 0 is the null block: ids count from 1.
        ids = (torch.randperm(workload.num_pages, generator=shuffle) + 1).tolist()
        self.block_tables: list[list[int]] = []
        for seq_len in workload.seq_lens:
            num_pages = -(-seq_len // workload.block_size)
            self.block_tables.append(ids[:num_pages])
            ids = ids[num_pages:]
        self.batch: CommonAttentionMetadata = make_batch(
            list(workload.query_lens),
            list(workload.seq_lens),
            self.block_tables,
            workload.block_size,
            device=self.device,
        )
        self._pages: dict[KVCacheLayout, torch.Tensor] = {}
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self._by_head: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def spec(self) -> FullAttentionSpec:
        """Pages of K beside V in the workload's cache format.

        Formats with scales per token have no plain pages: theirs hold the values before rounding.
        """
        workload = self.workload
        return FullAttentionSpec(
            block_size=workload.block_size,
            num_kv_heads=workload.num_kv_heads,
            head_size=workload.head_size,
            dtype=workload.cache_torch_dtype if self.plain_format else workload.torch_dtype,
        )

    @property
    def plain_format(self) -> bool:
        """An element of the pages is the value itself (fp8: at scale 1)."""
        mode = get_kv_quant_mode(self.workload.kv_cache_dtype)
        return mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)

    @property
    def any_layout(self) -> KVCacheLayout:
        """A layout in which pages exist already; NHD if there are none yet."""
        return next(iter(self._pages), KVCacheLayout.LBNHC)

    def pages(self, layout: KVCacheLayout) -> torch.Tensor:
        """(num_blocks, num_kv_heads, block_size, 2 * head_size), lying in memory as `layout` says."""
        if layout not in self._pages:
            num_blocks = self.workload.num_pages + 1
            pool = PagedKVCache({_LAYER: self.spec}, num_blocks, device=self.device, layout=layout)
            tensor = pool[_LAYER]
            if self._pages:
                tensor.copy_(next(iter(self._pages.values())))
            else:
                self._fill(tensor)
            self._pages[layout] = tensor
        return self._pages[layout]

    @property
    def new_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of this step, each (num_tokens, num_kv_heads, head_size)."""
        if self._new is None:
            size = self.workload.block_size
            slots = self.batch.slot_mapping
            pages = self.pages(self.any_layout)
            rows = pages[slots // size, :, slots % size].to(self.workload.torch_dtype)
            k, v = rows.split(self.workload.head_size, dim=-1)
            self._new = k.contiguous(), v.contiguous()
        return self._new

    def sequence(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a request in order, each (seq_len, num_kv_heads, head_size), as the
        pages hold them."""
        pages = self.pages(self.any_layout)
        ids = torch.tensor(self.block_tables[request], device=self.device)
        tokens = pages[ids].transpose(1, 2).flatten(0, 1)[: self.workload.seq_lens[request]]
        k, v = tokens.split(self.workload.head_size, dim=-1)
        return k, v

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all requests without pages, in the workload's dtype: contiguous copies,
        each (sum of seq_lens, num_kv_heads, head_size)."""
        pairs = [self.sequence(request) for request in range(self.workload.num_reqs)]
        dtype = self.workload.torch_dtype
        k, v = (torch.cat([pair[i].to(dtype) for pair in pairs]) for i in range(2))
        return k, v

    def by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`dense` where all requests have one length, as SDPA reads it: contiguous, each (num_reqs,
        num_kv_heads, seq_len, head_size). One copy for all who ask."""
        if self._by_head is None:
            shape = (
                self.workload.num_reqs,
                -1,
                self.workload.num_kv_heads,
                self.workload.head_size,
            )
            k, v = (x.view(shape).transpose(1, 2).contiguous() for x in self.dense())
            self._by_head = k, v
        return self._by_head

    def _fill(self, pages: torch.Tensor) -> None:
        if pages.dtype in (torch.float32, torch.float16, torch.bfloat16):
            pages.normal_(generator=self._generator)
            return
        step = max(1, _CHUNK // pages[0].numel())
        for first in range(0, pages.shape[0], step):
            part = pages[first : first + step]
            numbers = torch.randn(
                part.shape, dtype=torch.bfloat16, device=self.device, generator=self._generator
            )
            part.copy_(numbers)
