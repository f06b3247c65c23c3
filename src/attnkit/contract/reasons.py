"""Why a backend cannot serve a layer, in words: what was asked for, and what is allowed.

In: a backend class and a value. Out: a reason, or None where the backend takes the value. What is
allowed is asked of the backend, not read from its lists: it may override the question only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from attnkit.contract.device import KNOWN_DEVICES, DeviceCapability
from attnkit.contract.quant import CACHE_DTYPES
from attnkit.contract.types import AttentionType

if TYPE_CHECKING:
    from attnkit.contract.backend import AttentionBackend

Backend: TypeAlias = "type[AttentionBackend]"

_HEADS = range(8, 513, 8)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What a refusal asks about to say what would be allowed, where the backend names no list."""


def of_head_size(backend: Backend, head_size: int) -> str | None:
    """Of keys and queries."""
    if backend.supports_head_size(head_size):
        return None
    sizes = backend.get_supported_head_sizes() or list(filter(backend.supports_head_size, _HEADS))
    return f"head size {head_size} is not supported ({_allowed(sizes)})"


def of_dtype(backend: Backend, dtype: torch.dtype) -> str | None:
    """Of queries."""
    if backend.supports_dtype(dtype):
        return None
    dtypes = [_name(d) for d in _DTYPES if backend.supports_dtype(d)]
    return f"dtype {_name(dtype)} is not supported ({_allowed(dtypes)})"


def of_kv_cache_dtype(backend: Backend, kv_cache_dtype: str | None) -> str | None:
    """Of the cache's format."""
    if backend.supports_kv_cache_dtype(kv_cache_dtype):
        return None
    formats = list(filter(backend.supports_kv_cache_dtype, CACHE_DTYPES))
    return f"KV cache dtype {kv_cache_dtype} is not supported ({_allowed(formats)})"


def of_block_size(backend: Backend, block_size: int | None) -> str | None:
    """Of an engine's blocks."""
    if backend.supports_block_size(block_size):
        return None
    blocks = _allowed(backend.get_supported_kernel_block_sizes())
    larger = "larger blocks that split into these"
    return f"block size {block_size} is not supported ({blocks}, and {larger})"


def of_mla(backend: Backend, use_mla: bool) -> str | None:
    """Of what the cache holds."""
    if use_mla == backend.is_mla():
        return None
    if use_mla:
        return "the layer is MLA, this backend reads dense K/V only"
    return "the layer is dense, this backend reads MLA latents only"


def of_sparse(backend: Backend, use_sparse: bool) -> str | None:
    """Of which keys are attended to."""
    if use_sparse == backend.is_sparse():
        return None
    if use_sparse:
        return "the layer is sparse, this backend attends to all keys only"
    return "the layer is not sparse, this backend attends to chosen keys only"


def of_device(backend: Backend, capability: DeviceCapability) -> str | None:
    """Of where it shall run."""
    if backend.supports_compute_capability(capability):
        return None
    devices = [d for d in KNOWN_DEVICES if backend.supports_compute_capability(d)]
    return f"device {capability} is not supported ({_allowed(devices)})"


def of_attn_type(backend: Backend, attn_type: str) -> str | None:
    """Of the layer's `AttentionType`."""
    if backend.supports_attn_type(attn_type):
        return None
    types = [t.value for t in AttentionType if backend.supports_attn_type(t.value)]
    return f"attention type {attn_type} is not supported ({_allowed(types)})"


def lacks(asked: bool, has: Callable[[], bool], feature: str) -> str | None:
    """Of a feature that a layer has or has not; `has` is asked where it is wanted."""
    if asked and not has():
        return f"{feature} is asked for, which this backend does not do"
    return None


def _allowed(values: Sequence[Any]) -> str:
    if (
        len(values) > 8
        and isinstance(values[0], int)
        and list(values) == list(range(values[0], values[-1] + 1, 8))
    ):
        return f"allowed: {values[0]} to {values[-1]} in steps of 8"
    return f"allowed: {', '.join(str(v) for v in values) or 'none that is known'}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
