"""Whether what a layer was called with is of one step and of this layer: by shapes and types alone.

In: a layer, and tensors, cache or plan of a call. Out: nothing, or an error before anything is written.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from attnkit.contract import AttentionImplBase, AttentionType, CommonAttentionMetadata
from attnkit.errors import BatchError, UnsupportedConfiguration
from attnkit.kvcache.layout import check_places
from attnkit.output_quant import QuantizedOutput
from attnkit.selection import Selection


class Called(Protocol):
    """A layer, as far as its calls go; attributes as in `PagedLayer`."""

    layer_name: str
    cache_name: str
    selection: Selection
    num_heads: int
    head_size_v: int
    attn_type: AttentionType
    dtype: torch.dtype
    device: torch.device
    block_size: int
    tokens_per_state: int

    @property
    def impl(self) -> AttentionImplBase[Any]: ...


_PAGED = (AttentionType.DECODER, AttentionType.ENCODER_DECODER)


def check_plan(layer: Called, plan: Any, plan_cls: type | None, own_views: tuple[str, ...]) -> None:
    """Whether it is one of the layer's backend, of what the layer attends to, and speaks of blocks like
    the layer's.

    Args:
        plan_cls: of the backend's plans; None: its builder does not say.
        own_views: of the plans that the layer's own builder makes.

    Raises:
        BatchError: it is not, as far as plans tell: by their class, their `views` and their
            `block_size`.
    """
    if plan_cls is not None and not isinstance(plan, plan_cls):
        given = "a batch" if isinstance(plan, CommonAttentionMetadata) else type(plan).__name__
        raise BatchError(
            f"layer {layer.layer_name} got {given} as its plan, and plans of backend "
            f"{layer.selection.name} are {plan_cls.__name__}; pass what layer.build(batch) gives"
        )
    views = getattr(plan, "views", own_views)
    if views != own_views:
        raise BatchError(
            f"layer {layer.layer_name} got a plan of {_spoken(views)}, and its plans are of "
            f"{_spoken(own_views)}; pass what its own build(batch) gives"
        )
    if layer.attn_type not in _PAGED:
        return
    block_size = getattr(plan, "block_size", None)
    if block_size is not None and block_size * layer.tokens_per_state != layer.block_size:
        raise BatchError(
            f"layer {layer.layer_name} got a plan for blocks of {block_size * layer.tokens_per_state} "
            f"tokens, and has blocks of {layer.block_size}; pass what its own build(batch) gives"
        )


def _spoken(views: tuple[str, ...]) -> str:
    return ", then ".join(views) or "the batch as it is"


def check_num_rows(layer: Called, query: torch.Tensor, plan: Any) -> None:
    """Whether there is a query for each token that was planned.

    Raises:
        BatchError: there is not.
    """
    num_planned = getattr(plan, "num_actual_tokens", 0)
    if query.shape[0] < num_planned:
        raise BatchError(
            f"layer {layer.layer_name} got {query.shape[0]} query rows for a plan of "
            f"{num_planned} tokens; pass the tensors of the batch that was planned"
        )


def check_num_keys(layer: Called, key: torch.Tensor, plan: Any) -> None:
    """Whether there is a key for each token that the layer writes or, without a cache, attends to.

    Raises:
        BatchError: there is not.
    """
    if layer.attn_type in _PAGED:
        if hasattr(plan, "slot_mapping"):  # A plan of another make may not have it.
            check_num_written(layer, key, plan)
        return
    num_planned = getattr(plan, "num_actual_tokens", 0)
    if key.shape[0] < num_planned:
        raise BatchError(
            f"layer {layer.layer_name} got {key.shape[0]} keys for a plan of {num_planned} tokens; "
            "pass the tensors of the batch that was planned"
        )


def check_num_written(layer: Called, key: torch.Tensor, plan: Any) -> None:
    """Whether there is a key for each slot of the plan.

    Raises:
        BatchError: there is not.
    """
    num_slots = plan.slot_mapping.shape[0]
    if key.shape[0] < num_slots:
        raise BatchError(
            f"layer {layer.layer_name} got {key.shape[0]} keys for a plan that writes "
            f"{num_slots}; pass the tensors of the batch that was planned"
        )


def check_cache(
    layer: Called, kv_cache: torch.Tensor | None, page: tuple[int, int, int, torch.dtype] | None
) -> None:
    """Whether a cache is there, on the layer's device, and its blocks look like `page`, with the numbers
    of a token side by side and no two of all in one place.

    Raises:
        BatchError: they do not.
    """
    if kv_cache is None:
        raise BatchError(
            f"layer {layer.layer_name} got a plan but no cache; pass cache[{layer.cache_name!r}]"
        )
    if not _is_at_home(kv_cache, layer.device):
        raise BatchError(
            f"layer {layer.layer_name} got a cache on {kv_cache.device}, and was built for "
            f"{layer.device}; make both on one device"
        )
    if page is not None and (*kv_cache.shape[1:], kv_cache.dtype) != page:
        *shape, dtype = page
        raise BatchError(
            f"layer {layer.layer_name} got a cache of shape {tuple(kv_cache.shape)} and "
            f"{kv_cache.dtype}; its blocks are {tuple(shape)} of {dtype} (KV heads, block_size, "
            f"sizes of K and V together)"
        )
    if page is not None and kv_cache.stride(-1) != 1 and kv_cache.shape[-1] > 1:
        raise BatchError(
            f"layer {layer.layer_name} got a cache whose last dimension has stride "
            f"{kv_cache.stride(-1)}; give one where it is 1, the others may have any"
        )
    check_places(layer.layer_name, kv_cache)


def check_quantized(layer: Called, quantized: QuantizedOutput, num_tokens: int) -> None:
    """Whether the impl writes such codes, and there is room for this step's.

    Raises:
        BatchError: this is no memory for codes, or for another number of them.
        UnsupportedConfiguration: the impl does not write them.
    """
    if not isinstance(quantized, QuantizedOutput):
        raise BatchError(
            f"layer {layer.layer_name} got {type(quantized).__name__} as `quantized`; give memory "
            "for codes, a QuantizedOutput"
        )
    if not layer.impl.fused_output_quant_supported(quantized.key):  # type: ignore[attr-defined]
        reason = f"quantised outputs ({quantized.key}) are not supported"
        raise UnsupportedConfiguration(
            f"backend {layer.selection.name}: {reason}; leave `quantized` out and quantise after",
            (reason,),
        )
    width = layer.num_heads * layer.head_size_v
    if quantized.shape != (num_tokens, width):
        raise BatchError(
            f"layer {layer.layer_name} got memory for codes of {quantized.shape} numbers; its output "
            f"is {(num_tokens, width)}"
        )


def as_heads(layer: Called, name: str, x: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """`x` as (num_tokens, heads, size).

    Raises:
        BatchError: it has another shape, dtype or device.
    """
    if (
        isinstance(x, torch.Tensor)
        and x.dtype is layer.dtype
        and x.shape[1:] == (heads, size)
        and x.device == layer.device
    ):
        return x
    if not isinstance(x, torch.Tensor):
        raise BatchError(
            f"{name} of layer {layer.layer_name} is {type(x).__name__}; give a torch.Tensor"
        )
    if x.dim() == 2 and x.shape[1] == heads * size:
        x = x.unflatten(1, (heads, size))
    if x.dim() != 3 or x.shape[1] != heads or x.shape[2] != size:
        raise BatchError(
            f"{name} of layer {layer.layer_name} has shape {tuple(x.shape)}; give "
            f"(num_tokens, {heads}, {size}) or (num_tokens, {heads * size})"
        )
    if x.dtype != layer.dtype or not _is_at_home(x, layer.device):
        raise BatchError(
            f"{name} of layer {layer.layer_name} is {x.dtype} on {x.device}, the layer was built "
            f"for {layer.dtype} on {layer.device}"
        )
    return x


def _is_at_home(x: torch.Tensor, device: torch.device) -> bool:
    """Whether `x` is on a layer's device; "cuda" without a number is any of them."""
    return x.device == device or (device.index is None and x.device.type == device.type)
