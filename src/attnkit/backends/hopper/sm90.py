"""Sm90Backend: what every backend of this folder says, whether over keys and values or over latents.

In: questions of selection and engines. Out: where the kernels run, what numbers they take and which
pages they read. Importing this needs neither Triton nor a GPU.
"""

from __future__ import annotations

import importlib.metadata
from typing import ClassVar

import torch

from attnkit.backends.hopper.tuning import PAGE_MULTIPLE
from attnkit.contract import AttentionBackend, DeviceCapability, KVCacheSpec, MultipleOf

_SM_90 = (9, 0)
_OLDEST_TRITON = (3, 6)
_NUMBERS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Sm90Backend(AttentionBackend):
    """Gluon kernels for Hopper GPUs, 16-bit, pages of 16 and more."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_MULTIPLE)]

    @classmethod
    def unavailable_reason(cls) -> str | None:
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
