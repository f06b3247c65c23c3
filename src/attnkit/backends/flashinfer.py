"""The flashinfer backend: an adapter to an installed FlashInfer.

In: the contract's batch, one layer's tensors and its paged cache. Out: attention by FlashInfer's batch
wrappers over our pages, which they read where they are. FlashInfer plans with the layer's heads, soft
cap and scale, which a batch's plan does not know: the first layer of a kind plans for the step.

Windows are refused, though the library has them: of a tile that a window cuts it multiplies all values,
those it hides by 0, and 0 * NaN is NaN. Pages left of a window may hold anything (docs/semantics.md).
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from attnkit.backends.libraries import (
    LibraryBackend,
    LibraryImpl,
    expect_causal,
    is_installed,
    natural_from_base_2,
    token_pages,
)
from attnkit.contract import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    DeviceCapability,
    KVCacheSpec,
    MultipleOf,
)

MODULE = "flashinfer"
_WORKSPACE_BYTES = 512 << 20


class FlashInferBackend(LibraryBackend):
    """Causal decoders in 16 bits, as FlashInfer does them."""

    @staticmethod
    def get_name() -> str:
        return "flashinfer"

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        return FlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        return FlashInferMetadataBuilder

    @classmethod
    def unavailable_reason(cls) -> str | None:
        if not is_installed(MODULE):
            return f"{MODULE} is not installed"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        return None

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [16, 32, 64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128, 256]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.platform == "cuda" and capability >= DeviceCapability(8, 0)

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        # Above our own kernels: no kit has judged it on a card yet, and it compiles at first use.
        return 100.0


@dataclass(frozen=True, slots=True)
class Paging:
    """The pages of n requests in FlashInfer's terms.

    Attributes:
        offsets: int32 (n + 1,) on the host, where each request's pages begin in `pages`.
        pages: int32 (offsets[-1],) on the device, block ids of all requests in a row.
        last_page_len: int32 (n,) on the host, tokens in the last page of each; 0 where it has none.
    """

    offsets: torch.Tensor
    pages: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> Paging:
        """From a block table, without waiting for its device.

        Args:
            block_table: int32 (n, W).
            seq_lens: int (n,) on the host.
            block_size: tokens in a page.
        """
        counts = (seq_lens.long() + block_size - 1) // block_size
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
        columns = torch.arange(len(rows)) - offsets[rows]
        device = block_table.device
        where = torch.stack([rows, columns]).to(device, non_blocking=True)
        last = torch.where(seq_lens > 0, (seq_lens.long() - 1) % block_size + 1, 0)
        return cls(offsets.to(torch.int32), block_table[where[0], where[1]], last.to(torch.int32))


class Wrappers:
    """FlashInfer's wrappers over one workspace: kinds of layers take turns in it."""

    def __init__(self, module: ModuleType, device: torch.device, kernel: str) -> None:
        """
        Args:
            module: flashinfer.
            device: where it runs.
            kernel: of prefills: "fa2", or "fa3" on Hopper.
        """
        self._module = module
        self._kernel = kernel
        # Zeros, as its documentation asks for before the first use.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    @classmethod
    def on(cls, module: ModuleType, device: torch.device) -> Wrappers:
        """With the kernel that is the best of a device."""
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        return cls(module, device, "fa3" if is_hopper else "fa2")

    def decode(self) -> Any:
        """For one query per request."""
        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True
        )

    def prefill(self) -> Any:
        """For any number of queries."""
        return self._module.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend=self._kernel
        )

    def ragged(self) -> Any:
        """For keys and values without pages."""
        return self._module.BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace, "NHD", backend=self._kernel
        )


def plan_wrapper(
    wrappers: Wrappers,
    paging: Paging,
    query_start_loc: torch.Tensor,
    *,
    is_decode: bool,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    scale: float,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    soft_cap: float | None = None,
    wrapper: Any = None,
) -> Any:
    """A wrapper that is planned for causal attention; `run(query, (keys, values))` is left to do.

    Args:
        query_start_loc: int32 (n + 1,) on the host.
        is_decode: each request has one query.
        wrapper: to plan again; None: a new one.
    """
    pages = (paging.offsets, paging.pages, paging.last_page_len)
    heads = (num_heads, num_kv_heads, head_size, block_size)
    how: dict[str, Any] = {
        "sm_scale": scale,
        "logits_soft_cap": soft_cap,
        "q_data_type": dtype,
        "kv_data_type": kv_dtype,
    }
    if is_decode:
        wrapper = wrappers.decode() if wrapper is None else wrapper
        wrapper.plan(*pages, *heads, **how)
    else:
        wrapper = wrappers.prefill() if wrapper is None else wrapper
        wrapper.plan(query_start_loc, *pages, *heads, causal=True, **how)
    return wrapper


@dataclass(frozen=True, eq=False, kw_only=True)
class FlashInferMetadata(AttentionMetadata):
    """A planned batch; of its requests those with queries (n).

    Attributes:
        num_tokens: real ones.
        slot_mapping: int64, for the layer's cache write.
        query_start_loc: int32 (n + 1,) on the host.
        is_decode: each of them has one query.
        blind: int64 (k,), rows of queries that stand before their request's first key; None: there is
            none. FlashInfer gives these the mean of some values, and an LSE near minus 50,000.
        block_size: of the pages.
        views: what wrappers made of the batch, outermost first.
        paging: their pages.
        wrappers: to plan with.
        planned: by the facts of a layer that FlashInfer plans with.
    """

    num_tokens: int
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    is_decode: bool
    blind: torch.Tensor | None
    block_size: int
    views: tuple[str, ...]
    paging: Paging
    wrappers: Wrappers
    planned: dict[tuple[Any, ...], Any] = field(default_factory=dict)


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Lists the pages of a batch. Lengths are the host's, so drafts in flight are not for it."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._wrappers = Wrappers.on(importlib.import_module(MODULE), device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashInferMetadata:
        """Plan a batch.

        Raises:
            BatchError: it is not causal, or its lengths are not known on the host.
        """
        batch = common_attn_metadata
        expect_causal(batch, "flashinfer")
        num_reqs, block_size = batch.num_reqs, self.kv_cache_spec.block_size
        query_lens = batch.query_start_loc_cpu[: num_reqs + 1].diff()
        served = query_lens > 0
        lens = batch.host_seq_lens("flashinfer")[:num_reqs]
        table = batch.block_table_tensor[:num_reqs]
        if not bool(served.all()):
            table = table[served.nonzero().flatten().to(table.device, non_blocking=True)]
        starts = torch.nn.functional.pad(query_lens[served].cumsum(0), (1, 0)).to(torch.int32)
        return FlashInferMetadata(
            num_tokens=int(starts[-1]),
            slot_mapping=batch.slot_mapping,
            query_start_loc=starts,
            is_decode=batch.max_query_len == 1,
            blind=_blind_rows(starts, query_lens[served] - lens[served], self.device),
            block_size=block_size,
            views=self.views_of(batch),
            paging=Paging.of(table, lens[served], block_size),
            wrappers=self._wrappers,
        )


def _blind_rows(
    query_start_loc: torch.Tensor, too_many: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """The first `too_many` rows of each request that has more queries than keys."""
    if not bool((too_many > 0).any()):
        return None
    rows = [
        torch.arange(start, start + count)
        for start, count in zip(query_start_loc.tolist(), too_many.tolist(), strict=False)
        if count > 0
    ]
    return torch.cat(rows).to(device, non_blocking=True)


class FlashInferImpl(LibraryImpl[FlashInferMetadata]):
    """One layer."""

    backend_name = "flashinfer"

    def load_library(self) -> ModuleType:
        return importlib.import_module(MODULE)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: FlashInferMetadata,
        *,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        wrapper = self._planned(plan, query.dtype, kv_cache.dtype)
        pages, lse = token_pages(kv_cache, self.head_size), None
        if want_lse:
            out, base_2 = wrapper.run(query, pages, return_lse=True)
            lse = natural_from_base_2(base_2)
        else:
            out = wrapper.run(query, pages)
        if plan.blind is not None:
            out[plan.blind] = 0
            if lse is not None:
                lse[plan.blind] = -math.inf
        return out, lse

    def _planned(self, plan: FlashInferMetadata, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
        """The wrapper for layers like this one, planned by the first of them."""
        variant = self.variant
        heads = (self.num_heads, self.num_kv_heads, self.head_size)
        kind = (*heads, self.scale, variant.logits_soft_cap, dtype)
        if kind not in plan.planned:
            plan.planned[kind] = plan_wrapper(
                plan.wrappers,
                plan.paging,
                plan.query_start_loc,
                is_decode=plan.is_decode,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                block_size=plan.block_size,
                scale=self.scale,
                dtype=dtype,
                kv_dtype=kv_dtype,
                soft_cap=variant.logits_soft_cap,
            )
        return plan.planned[kind]
