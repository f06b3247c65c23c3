"""MLAAttentionImpl: run one layer over latents.

In: built once per layer with the layer's static facts; then, per step, queries, latents, the cache of
these and the plan its builder made. Out: prefills attended to with keys and values expanded per head,
decodes over the latents themselves (see `MLADimensions`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

import torch

from attnkit.arguments import check_slots
from attnkit.contract.impl import AttentionImplBase, AttentionLayer, T
from attnkit.contract.quant import (
    KVQuantMode,
    QuantKey,
    get_kv_quant_mode,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)

_Impl = TypeVar("_Impl", bound="MLAAttentionImpl")


class MLAAttentionImpl(AttentionImplBase[T], Generic[T]):
    """Attention over a latent cache: prefills expanded per head, decodes absorbed.

    An impl defines `forward_mqa` (and `forward_mha` if it prefills), or, in the older generation,
    one `forward` for both. Which rows of a batch go where its builder's plan says: `num_decode_tokens`
    at the front are decodes, `num_prefill_tokens` behind them prefills.
    """

    hisparse_cache: Any | None = None
    """Handle of a hot set of latent pages on the device, backed by host memory; None: all there."""

    supports_pcp: bool = True
    """As in the base, with yes as the default."""

    prefill_backend: Any = None
    """Ours: an `MLAPrefillBackend` that `forward_mha` attends with, which a layer may replace by another
    before its first step; None: `forward_mha` attends by itself."""

    can_return_lse_for_prefill: bool = False
    """Ours: `forward_mha` returns the log-sum-exp of its rows when `need_to_return_lse_for_decode` is
    set, as `forward_mqa` does. A layer built with `return_lse` needs both."""

    def __new__(cls: type[_Impl], *args: Any, **kwargs: Any) -> _Impl:
        # Here and not at class definition, so that an abstract class may come in between.
        if (
            cls.forward_mqa is MLAAttentionImpl.forward_mqa
            and cls.forward is MLAAttentionImpl.forward
        ):
            raise TypeError(f"{cls.__name__} must define forward_mqa, or the older forward")
        return super().__new__(cls, *args, **kwargs)

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: torch.nn.Module,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        """Keep the layer's static facts. The first ten are those of `AttentionImpl`.

        Args:
            q_lora_rank: of the query's own compression; None: it has none.
            kv_lora_rank: size of the latent.
            qk_nope_head_dim, qk_rope_head_dim: parts of a query head without and with rotation.
            qk_head_dim: their sum.
            v_head_dim: of values.
            kv_b_proj: expands a latent to keys (nope part) and values of all heads.
            indexer: chooses keys in sparse layers.
            q_pad_num_heads: heads that kernels want queries padded to.
        """
        raise NotImplementedError

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: T,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Prefill with keys and values expanded per head; writes `output`.

        Called with the rows of the batch's prefills alone.

        Args:
            q: (num_tokens, num_heads, qk_head_dim).
            kv_c_normed: (num_tokens, kv_lora_rank) of this step.
            k_pe: (num_tokens, 1, qk_rope_head_dim) of this step.
            kv_c_and_k_pe_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim).
            k_scale: of a quantised cache.
            output: (num_tokens, num_heads * v_head_dim).
            output_scale: float32, one number: `output` is float8_e4m3fn codes with this scale. Given
                only to impls whose `prefill_backend` says `supports_quant_output`.

        Returns:
            None, or the lse, float32 (num_tokens, num_heads), if `can_return_lse_for_prefill` and
            `need_to_return_lse_for_decode` are set.
        """
        raise NotImplementedError

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: T,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode against the latents themselves, the query already absorbed.

        Called with the rows of the batch's decodes alone, which come first in it and may have several
        queries each.

        Args:
            q: (num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim), or its two parts.

        Returns:
            (output (num_tokens, num_heads, kv_lora_rank), lse (num_tokens, num_heads) or None).
        """
        raise NotImplementedError

    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Older generation: one entry for prefills and decodes, queries still compressed."""
        raise NotImplementedError

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """True for the four formats that the layer itself writes after attention, whatever the
        impl: fp8 static, nvfp4, fp8 in groups of 128 and of 64."""
        return quant_key in (
            kFp8StaticTensorSym,
            kNvfp4Dynamic,
            kFp8Dynamic128Sym,
            kFp8Dynamic64Sym,
        )

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write latents and rope parts side by side; an empty cache and slot -1 write nothing.

        The default stores plain dtypes; formats with codes are written by impls that declare them.

        Args:
            kv_c_normed: (num_tokens, kv_lora_rank).
            k_pe: (num_tokens, 1, qk_rope_head_dim).
            kv_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim).
            slot_mapping: int64 (num_tokens,).

        Raises:
            NotImplementedError: `kv_cache_dtype` is quantised.
            BatchError: a slot is outside the cache (on a GPU: a device-side assert).
        """
        if kv_cache.numel() == 0:
            return
        if get_kv_quant_mode(kv_cache_dtype) is not KVQuantMode.NONE:
            raise NotImplementedError(
                f"{type(self).__name__} does not write {kv_cache_dtype} latents; "
                "override do_kv_cache_update or use an unquantised kv_cache_dtype"
            )
        rows = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1).to(kv_cache.dtype)
        slots = slot_mapping.flatten()
        block_size = kv_cache.shape[1]
        check_slots(slots, kv_cache.shape[0], block_size)
        written = slots >= 0
        slots = slots[written]
        kv_cache[slots // block_size, slots % block_size] = rows[: written.shape[0]][written]
