"""TritonBackend: what the Triton kernels can do.

In: questions of selection and engines, answered without Triton and without a GPU. Out: the impl and
the builder. Every feature of dense attention is in the kernels, so the refusals are about devices.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from attnkit.backends.dense import DenseBackend
from attnkit.backends.triton.impl import TritonImpl
from attnkit.backends.triton.interpreter import is_interpreting
from attnkit.backends.triton.plan import TritonMetadata, TritonMetadataBuilder
from attnkit.contract import DeviceCapability


class TritonBackend(DenseBackend):
    """Paged attention on any GPU that Triton compiles for (sm_80 and later), or in its interpreter."""

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
    def unavailable_reason(cls) -> str | None:
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
    def supports_batch_invariance(cls) -> bool:
        # Tiles, segments and the kernel follow from the layer and the request alone.
        return True

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        # The interpreter is for tests: slower than eager torch, so never chosen by itself.
        return 10_000.0 if request.device_capability.platform == "cpu" else 1.0
