# pyright: reportMissingImports=false
"""Answers: what vLLM asks of a backend's class, answered by the backend of ours that runs.

In: vLLM's questions. Out: the answers of `OURS`, in vLLM's types.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention import backend as vllm_contract
from vllm.v1.kv_cache_interface import KVCacheLayout

from attnkit.contract import AttentionBackend, DeviceCapability, MultipleOf
from attnkit.errors import UnsupportedConfiguration
from attnkit.integrations.vllm import ENV_VLLM, wanted_backend
from attnkit.selection import AttentionRequest, reasons_against

ON_CPU = current_platform.is_cpu()
OURS: type[AttentionBackend] = wanted_backend(
    os.environ.get(ENV_VLLM) or ("cpu" if ON_CPU else "triton")
)
"""What runs: one backend a process, since vLLM asks classes."""

_ASKED = (
    "get_supported_head_sizes",
    "supports_head_size",
    "supports_block_size",
    "get_preferred_block_size",
    "supports_sink",
    "supports_alibi_sqrt",
    "supports_mm_prefix",
    "supports_sliding_window",
    "supports_rswa",
    "supports_non_causal",
    "supports_batch_invariance",
    "supports_kv_connector",
    "supports_device_cpu_query_lens_mismatch",
)
"""Questions that are handed on as they are."""


class Answers(vllm_contract.AttentionBackend):
    """The questions that do not depend on what a cache holds."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        sizes = OURS.get_supported_kernel_block_sizes()
        return [vllm_contract.MultipleOf(s.base) if isinstance(s, MultipleOf) else s for s in sizes]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        layouts = OURS.supported_kv_cache_layouts()
        return None if layouts is None else tuple(KVCacheLayout[layout.name] for layout in layouts)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return OURS.supports_compute_capability(
            DeviceCapability(capability.major, capability.minor)
        )


def _handed_on(name: str) -> Any:
    def ask(cls: type, *args: Any) -> Any:
        return getattr(OURS, name)(*args)

    ask.__name__ = name
    return classmethod(ask)


for _name in _ASKED:
    setattr(Answers, _name, _handed_on(_name))


def device_capability() -> DeviceCapability:
    """Of the device that vLLM runs on."""
    return DeviceCapability.cpu() if ON_CPU else DeviceCapability.of("cuda")


def supported_dtypes() -> list[torch.dtype]:
    """Of queries, keys and values."""
    return [d for d in (torch.float16, torch.bfloat16, torch.float32) if OURS.supports_dtype(d)]


def supported_formats(formats: tuple[str, ...]) -> list[str]:
    """Those of `formats` that caches may have."""
    return [f for f in formats if OURS.supports_kv_cache_dtype(f)]


def check_layer(request: AttentionRequest, formats: tuple[str, ...], *more: str | None) -> None:
    """Whether a layer can be served; on a CPU vLLM does not ask before it makes one.

    Args:
        request: what the layer wants.
        formats: of caches, that the bridge takes.
        more: reasons of the bridge's own against it; None counts for nothing.

    Raises:
        UnsupportedConfiguration: it cannot; with every reason.
    """
    reasons = [*reasons_against(OURS, request), *(reason for reason in more if reason is not None)]
    if request.kv_cache_dtype not in formats:
        reasons.append(f"the bridge takes caches of {', '.join(formats)}")
    if reasons:
        raise UnsupportedConfiguration(
            f"attnkit's {OURS.get_name()} cannot serve this layer in vLLM: {'; '.join(reasons)}. "
            f"Unset {ENV_VLLM}, or name another backend",
            tuple(reasons),
        )
