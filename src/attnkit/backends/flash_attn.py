"""The flash_attn backend: an adapter to an installed FlashAttention.

In: the contract's batch, one layer's tensors and its paged cache. Out: attention by the library's own
kernels over our pages, which it reads where they are. The first build that is installed is used:
FlashAttention-3 as its repository's `hopper` folder makes it, the one inside vLLM, or the package
flash-attn, version 2. They differ in names of arguments and in the pages they take, not in meaning.

Windows are refused, though the library has them: of a tile that a window cuts it multiplies all values,
those it hides by 0, and 0 * NaN is NaN. Pages left of a window may hold anything (docs/semantics.md).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from attnkit.backends.libraries import (
    LibraryBackend,
    LibraryImpl,
    expect_causal,
    is_installed,
    token_pages,
    without_keys_minus_infinity,
)
from attnkit.contract import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    DeviceCapability,
    KVCacheSpec,
    MultipleOf,
)

HOPPER = "flash_attn_interface"
VLLM = "vllm.vllm_flash_attn.flash_attn_interface"
PACKAGE = "flash_attn"
_VERSIONS = {HOPPER: 3, VLLM: 3, PACKAGE: 2}
"""Module of a build -> the FlashAttention it is, in order of preference."""
_PAGES = {3: 16, 2: 256}
"""Version -> what a page size must be a multiple of."""


def flash_attention_module() -> str | None:
    """The module of the build that will be used; None: none is installed."""
    return next((name for name in _VERSIONS if is_installed(name)), None)


def attend_pages(
    module: ModuleType,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    soft_cap: float | None = None,
    want_lse: bool = False,
    key_start_loc: torch.Tensor | None = None,
    scheduler_metadata: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention over pages by any of the builds.

    Args:
        module: of the build, imported.
        query: (num_tokens, num_heads, head_size), of real tokens alone.
        keys, values: (num_blocks, block_size, num_kv_heads, head_size), any strides but the last.
        query_start_loc: int32 (R + 1,).
        seq_lens: int32 (R,).
        block_table: int32 (R, W).
        max_query_len, max_seq_len: at least the longest.
        scale: factor on q.k.
        soft_cap: c in c * tanh(score / c).
        want_lse: whether the LSE is returned.
        key_start_loc: int32 (R + 1,), sums of `seq_lens`: version 2 needs it.
        scheduler_metadata: a plan of vLLM's build; None: it plans inside the call.

    Returns:
        Output, and the LSE as the library gives it: natural, float32 (num_heads, num_tokens).
    """
    how: dict[str, Any] = {"softmax_scale": scale, "causal": True, "softcap": soft_cap or 0.0}
    if module.__name__ == HOPPER:
        answer = module.flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=seq_lens,
            page_table=block_table,
            cu_seqlens_q=query_start_loc,
            max_seqlen_q=max_query_len,
            return_softmax_lse=want_lse,
            **how,
        )
    elif module.__name__ == VLLM:
        answer = module.flash_attn_varlen_func(
            query,
            keys,
            values,
            max_query_len,
            query_start_loc,
            max_seq_len,
            seqused_k=seq_lens,
            block_table=block_table,
            return_softmax_lse=want_lse,
            scheduler_metadata=scheduler_metadata,
            fa_version=3,
            **how,
        )
    else:
        answer = module.flash_attn_varlen_func(
            query,
            keys,
            values,
            query_start_loc,
            key_start_loc,
            max_query_len,
            max_seq_len,
            block_table=block_table,
            return_attn_probs=want_lse,
            **how,
        )
    return (answer[0], answer[1]) if want_lse else (answer, None)


def attend_tokens(
    module: ModuleType,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over keys and values that lie one after the other, by any of the builds.

    Args:
        module: of the build, imported.
        query: (num_tokens, num_heads, head_size).
        key, value: (num_keys, num_kv_heads, size), any strides but the last.
        query_start_loc, key_start_loc: int32 (R + 1,).
        max_query_len, max_key_len: the longest.
        scale: factor on q.k.
        causal: bottom-right aligned; False: every query sees every key of its request.

    Returns:
        Output, and the LSE as the library gives it: natural, float32 (num_heads, num_tokens).
    """
    how: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
    if module.__name__ == VLLM:
        how |= {"return_softmax_lse": True, "fa_version": 3}
    else:
        how["return_attn_probs"] = True
    out, lse, *_ = module.flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=query_start_loc,
        cu_seqlens_k=key_start_loc,
        max_seqlen_q=max_query_len,
        max_seqlen_k=max_key_len,
        **how,
    )
    return out, lse


class FlashAttnBackend(LibraryBackend):
    """Causal decoders in 16 bits, as FlashAttention does them."""

    @staticmethod
    def get_name() -> str:
        return "flash_attn"

    @staticmethod
    def get_impl_cls() -> type[FlashAttnImpl]:
        return FlashAttnImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttnMetadataBuilder]:
        return FlashAttnMetadataBuilder

    @classmethod
    def version(cls) -> int:
        """Of the build that will be used; 3 where none is installed."""
        return _VERSIONS[flash_attention_module() or HOPPER]

    @classmethod
    def unavailable_reason(cls) -> str | None:
        if flash_attention_module() is None:
            return f"none of {', '.join(_VERSIONS)} is installed"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        return None

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(_PAGES[FlashAttnBackend.version()])]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(range(8, 257, 8))

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        if capability.platform != "cuda":
            return False
        if cls.version() == 3:
            return tuple(capability[:2]) == (9, 0)
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        # Above our own kernels: no kit has judged it on a card yet.
        return 100.0

    @classmethod
    def describe_runtime(cls) -> str:
        return f"{flash_attention_module()}, version {cls.version()}"


@dataclass(frozen=True, eq=False, kw_only=True)
class FlashAttnMetadata(AttentionMetadata):
    """A planned batch of R requests.

    Attributes:
        num_tokens: real ones.
        query_start_loc: int32 (R + 1,).
        seq_lens: int32 (R,).
        key_start_loc: int32 (R + 1,), their sums.
        block_table: int32 (R, W).
        block_size: tokens in a page, as the batch says it; None: it does not.
        views: what wrappers made of the batch, outermost first.
        slot_mapping: int64, for the layer's cache write.
        max_query_len, max_seq_len: of the batch.
    """

    num_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    key_start_loc: torch.Tensor
    block_table: torch.Tensor
    block_size: int | None
    views: tuple[str, ...]
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int


class FlashAttnMetadataBuilder(AttentionMetadataBuilder[FlashAttnMetadata]):
    """Hands the batch's tensors on."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttnMetadata:
        """Plan a batch.

        Raises:
            BatchError: it is not causal.
        """
        batch = common_attn_metadata
        expect_causal(batch, "flash_attn")
        num_reqs = batch.num_reqs
        seq_lens = batch.seq_lens[:num_reqs]
        return FlashAttnMetadata(
            num_tokens=int(batch.query_start_loc_cpu[num_reqs]),
            query_start_loc=batch.query_start_loc[: num_reqs + 1],
            seq_lens=seq_lens,
            key_start_loc=torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).to(torch.int32),
            block_table=batch.block_table_tensor[:num_reqs],
            block_size=batch.block_size,
            views=self.views_of(batch),
            slot_mapping=batch.slot_mapping,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )


class FlashAttnImpl(LibraryImpl[FlashAttnMetadata]):
    """One layer."""

    backend_name = "flash_attn"

    def load_library(self) -> ModuleType:
        return importlib.import_module(flash_attention_module() or HOPPER)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: FlashAttnMetadata,
        *,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = attend_pages(
            self._library,
            query,
            *token_pages(kv_cache, self.head_size),
            query_start_loc=plan.query_start_loc,
            seq_lens=plan.seq_lens,
            block_table=plan.block_table,
            max_query_len=plan.max_query_len,
            max_seq_len=plan.max_seq_len,
            scale=self.scale,
            soft_cap=self.variant.logits_soft_cap,
            want_lse=want_lse,
            key_start_loc=plan.key_start_loc,
        )
        return out, None if lse is None else without_keys_minus_infinity(lse.T)
