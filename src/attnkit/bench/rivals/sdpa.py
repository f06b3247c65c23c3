"""torch's own: scaled_dot_product_attention on contiguous K and V, and indexing for writes.

In: batches whose requests have equal lengths, copied out of their pages beforehand. Out: contenders
without pages, so they show what paging costs. Short queries are packed: the query heads that share a
KV head become rows of one matrix, without which SDPA is several times slower on one new token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from attnkit.bench.contender import NotInstalled, Prepared, Refused
from attnkit.bench.inputs import Inputs
from attnkit.bench.workloads import ATTENTION_KINDS
from attnkit.contract import KVCacheLayout

_MAX_PACKED = 16
"""Longest query that is packed with its group; longer ones fill a tile by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sdpa:
    """SDPA through one of torch's kernels.

    Attributes:
        kernel: which; None: torch's choice.
        packed: short queries are packed with their group; False hands GQA to torch.
    """

    name: str
    kernel: SDPBackend | None = None
    packed: bool = True
    is_rival: bool = True

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if self.kernel is not None and inputs.device.type != "cuda":
            raise NotInstalled("needs a CUDA device")
        if workload.kind not in ATTENTION_KINDS:
            raise Refused("SDPA does attention only")
        if not workload.uniform:
            raise Refused("SDPA needs requests of equal lengths")
        batch, query_len, seq_len = workload.num_reqs, workload.query_lens[0], workload.seq_lens[0]
        heads, kv_heads, size = workload.num_heads, workload.num_kv_heads, workload.head_size
        group = heads // kv_heads
        short = query_len <= _MAX_PACKED and query_len < seq_len
        if not self.packed and (not short or group == 1):
            raise Refused("differs from sdpa only for short queries with grouped heads")

        k, v = inputs.by_head()
        # (batch, kv_heads, group, query_len, head_size): head h reads KV head h // group.
        q = inputs.query.view(batch, query_len, kv_heads, group, size).permute(0, 2, 3, 1, 4)
        mask = None
        if query_len > 1 and query_len < seq_len:
            mask = causal_lower_right(query_len, seq_len)
        if short and self.packed:
            q = q.reshape(batch, kv_heads, group * query_len, size)
            if query_len > 1:
                mask = _lower_right(query_len, seq_len, inputs.device).repeat(group, 1)
        else:
            q = q.reshape(batch, heads, query_len, size)
        q = q.contiguous()
        gqa = not (short and self.packed) and group > 1
        causal = query_len == seq_len and query_len > 1
        kernel = self.kernel
        restricted: Callable[[], Any] = nullcontext
        if kernel is not None:
            restricted = partial(sdpa_kernel, kernel)

        def run() -> torch.Tensor:
            with restricted():
                out = scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa
                )
            # A view: bringing heads back beside tokens is not part of the attention.
            return out.view(batch, heads, query_len, size).transpose(1, 2)

        return Prepared(run=run, note="contiguous copies")


def _lower_right(query_len: int, seq_len: int, device: torch.device) -> torch.Tensor:
    """Bool (query_len, seq_len): the last query sees every key."""
    seen = torch.ones(query_len, seq_len, dtype=torch.bool, device=device)
    return seen.tril(diagonal=seq_len - query_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchWrite:
    """Two indexed assignments into the pages."""

    name: str
    is_rival: bool = True

    def prepare(self, inputs: Inputs) -> Prepared:
        workload, size = inputs.workload, inputs.workload.block_size
        if workload.kind != "write":
            raise Refused("writes only")
        if not inputs.plain_format:
            raise Refused(f"cannot encode {workload.kv_cache_dtype}")
        layout = KVCacheLayout.LBNHC
        pages = inputs.pages(layout)
        key, value = inputs.new_tokens
        slots = inputs.batch.slot_mapping
        blocks, offsets = slots // size, slots % size
        by_token = pages.transpose(1, 2)

        def run() -> torch.Tensor:
            by_token[blocks, offsets, :, : workload.head_size] = key.to(pages.dtype)
            by_token[blocks, offsets, :, workload.head_size :] = value.to(pages.dtype)
            return pages

        return Prepared(run=run, note=f"{layout.name} pages, slots split beforehand")


SDPA = Sdpa(name="sdpa")
SDPA_GQA = Sdpa(name="sdpa-gqa", packed=False)
SDPA_CUDNN = Sdpa(name="sdpa-cudnn", kernel=SDPBackend.CUDNN_ATTENTION)
SDPA_FLASH = Sdpa(name="sdpa-flash", kernel=SDPBackend.FLASH_ATTENTION)
TORCH_WRITE = TorchWrite(name="torch-write")
