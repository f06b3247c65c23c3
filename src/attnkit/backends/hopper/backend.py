"""HopperBackend: paged attention for sm_90 in Gluon: copies by TMA, products by wgmma, roles for warps.

In: questions of selection and engines. Out: what the kernels do, every reason for what they do not, and
the builder and impl. Importing this needs neither Triton nor a GPU.
"""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any, ClassVar

import torch

from attnkit.backends.hopper.impl import HopperImpl
from attnkit.backends.hopper.plan import HopperMetadataBuilder
from attnkit.backends.hopper.tuning import (
    CACHE_DTYPES,
    CODED_CACHE_DTYPES,
    HEAD_SIZES,
    MAX_CODED_GROUP_SIZE,
    MAX_GROUP_SIZE,
    PAGE_MULTIPLE,
)
from attnkit.contract import (
    AttentionBackend,
    DeviceCapability,
    KVCacheSpec,
    MultipleOf,
)

_SM_90 = (9, 0)
_OLDEST_TRITON = (3, 6)
_NUMBERS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class HopperBackend(AttentionBackend):
    """Dense causal and non-causal decoder attention on Hopper GPUs, 16-bit, pages of 16 and more."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "hopper"

    @staticmethod
    def get_impl_cls() -> type[HopperImpl]:
        return HopperImpl

    @staticmethod
    def get_builder_cls() -> type[HopperMetadataBuilder]:
        return HopperMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_MULTIPLE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def is_available(cls) -> str | None:
        try:
            version = importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            return "triton is not installed"
        numbers = tuple(int(part) for part in version.split(".")[:2])
        if numbers < _OLDEST_TRITON:
            return f"triton {version} is too old, 3.6 or newer is needed"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        capability = torch.cuda.get_device_capability()
        if capability != _SM_90:
            return f"it needs sm_90, this is sm_{capability[0]}{capability[1]}"
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        # wgmma exists on sm_90 alone: neither before nor after.
        return capability.platform == "cuda" and tuple(capability[:2]) == _SM_90

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
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # What is a decode, the device says; what is a prefill, the host. They must agree.
        return False

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
        stored = _NUMBERS.get(kv_cache_dtype or "auto", dtype)
        if stored != dtype:
            name = str(dtype).removeprefix("torch.")
            return f"KV cache dtype {kv_cache_dtype} differs from the layer's {name}"
        return None

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        """Below the portable kernels: it ran 1.2 to 1.7 times as fast on prompts and 1.0 to 2.2 times on
        all but one decode (benchmarks/attention-h200.json).
        """
        coded = request.kv_cache_dtype in CODED_CACHE_DTYPES
        most = MAX_CODED_GROUP_SIZE if coded else MAX_GROUP_SIZE
        if request.num_heads > most * request.num_kv_heads:
            return math.inf  # The impl refuses: heads are known to selection only here.
        return 0.5
