"""TritonBackend: what the Triton kernels can do.

In: questions of selection and engines, answered without Triton and without a GPU. Out: the impl and
the builder. Every feature of dense attention is in the kernels, so the refusals are about devices.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import torch

from attnkit.backends.triton.impl import TritonImpl
from attnkit.backends.triton.interpreter import is_interpreting
from attnkit.backends.triton.plan import TritonMetadata, TritonMetadataBuilder
from attnkit.contract import AttentionBackend, AttentionSpec, AttentionType, DeviceCapability
from attnkit.kvcache.formats import CACHE_FORMATS, customize_spec, format_refusal


class TritonBackend(AttentionBackend):
    """Paged attention on any GPU that Triton compiles for (sm_80 and later), or in its interpreter."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_FORMATS)
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "triton"

    @staticmethod
    def get_impl_cls() -> type[TritonImpl]:
        return TritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMetadataBuilder]:
        return TritonMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[TritonMetadata]:
        return TritonMetadata

    @classmethod
    def is_available(cls) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if not torch.cuda.is_available() and not is_interpreting():
            return "needs a GPU, or TRITON_INTERPRET=1 to run in the interpreter"
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        if capability.platform == "cpu":
            return is_interpreting()
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(range(8, 513, 8))

    @classmethod
    def supports_head_size_v(cls, head_size: int, head_size_v: int) -> bool:
        return cls.supports_head_size(head_size_v)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return customize_spec(spec)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

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

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        # Tiles, segments and the kernel follow from the layer and the request alone.
        return True

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        # The interpreter is for tests: slower than eager torch, so never chosen by itself.
        return 10_000.0 if request.device_capability.platform == "cpu" else 1.0
