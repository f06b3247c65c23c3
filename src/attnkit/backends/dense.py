"""DenseBackend and DenseImpl: what backends of dense attention have in common.

In: nothing. Out: the answers to selection's questions, all yes: every score, mask and attention type,
every cache format, for any head size; and an impl that keeps a layer's static facts. Devices, sizes,
costs and kernels are each backend's own.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch

from attnkit.arguments import check_heads, check_text
from attnkit.contract import (
    AttentionBackend,
    AttentionImpl,
    AttentionSpec,
    AttentionType,
    AttentionVariant,
    DeviceCapability,
)
from attnkit.errors import UnsupportedConfiguration
from attnkit.kvcache.formats import CACHE_FORMATS, cache_format, customize_spec, format_refusal

T = TypeVar("T")
"""The plan that the impl reads."""


class DenseBackend(AttentionBackend):
    """Every variant over every cache format; a subclass takes back what it does not do."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_FORMATS)
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return customize_spec(spec)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        return format_refusal(kv_cache_dtype, head_size)

    @classmethod
    def supports_head_size_v(cls, head_size: int, head_size_v: int) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_logits_soft_cap(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_tree_mask(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


class DenseImpl(AttentionImpl[T]):
    """One layer's static facts, checked; a backend's own impl adds its kernels.

    Attributes:
        backend_name: as errors call it.
        num_kv_heads: heads of the cache.
        head_size_v: of values.
        kv_sharing_target_layer_name: the layer whose cache this one reads and never writes.
        cache_format: how the cache stores K and V.
        variant: score and mask.
    """

    backend_name: ClassVar[str]
    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        head_size_v: int | None = None,
    ) -> None:
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size_v = head_size if head_size_v is None else head_size_v
        check_heads(num_heads, self.num_kv_heads, head_size, self.head_size_v)
        check_text("kv_cache_dtype", kv_cache_dtype)
        check_text("kv_sharing_target_layer_name", kv_sharing_target_layer_name, optional=True)
        if kv_cache_dtype not in CACHE_FORMATS:
            allowed = ", ".join(CACHE_FORMATS)
            reason = f"KV cache dtype {kv_cache_dtype} is not supported (allowed: {allowed})"
            raise UnsupportedConfiguration(f"{self.backend_name}: {reason}", (reason,))
        self.cache_format = cache_format(kv_cache_dtype)
        reason = self.cache_format.refusal(head_size, self.head_size_v)
        if reason is not None:
            raise UnsupportedConfiguration(f"{self.backend_name}: {reason}", (reason,))
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.variant = AttentionVariant.from_impl_args(
            num_heads=num_heads,
            scale=scale,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            sinks=sinks,
            use_alibi_sqrt=use_alibi_sqrt,
        )
        self.prepare_layer()

    def prepare_layer(self) -> None:
        """Make once what the backend's kernels want of these facts; the last step of construction.

        Raises:
            UnsupportedConfiguration: a feature they do not do.
        """
        return
