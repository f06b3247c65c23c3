"""DenseBackend: what backends have in common that do every variant of dense attention.

In: nothing. Out: the answers to selection's questions, all yes: every score, mask and attention type,
every cache format, for any head size. Devices, sizes and costs are each backend's own.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from attnkit.contract import AttentionBackend, AttentionSpec, AttentionType, DeviceCapability
from attnkit.kvcache.formats import CACHE_FORMATS, customize_spec, format_refusal


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
