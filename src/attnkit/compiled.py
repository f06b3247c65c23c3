"""What a compiled graph sees of a layer: one opaque node, `torch.ops.attnkit.attention`.

In: a layer's tensors and its handle, since a graph can carry a string but neither a layer nor a cache
nor a plan. Out: the layer's own `_fill`, called with what the `forward_context` around the compiled call
holds. Works eagerly all the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from attnkit.errors import BatchError


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Plans and caches of a step, by layer name, and the positions of its tokens if it has told them."""

    attn_metadata: Mapping[str, Any]
    kv_caches: Mapping[str, torch.Tensor]
    positions: torch.Tensor | None = None

    def plan_of(self, layer_name: str) -> Any | None:
        """The plan of a layer; None where the whole step, or this layer, is profiled.

        Raises:
            BatchError: other layers have a plan, and this one was forgotten.
        """
        if self.attn_metadata and layer_name not in self.attn_metadata:
            raise BatchError(
                f"forward_context has no plan for layer {layer_name}, only for "
                f"{', '.join(self.attn_metadata)}; give one, or None to profile it"
            )
        return self.attn_metadata.get(layer_name)


_FORWARD_CONTEXT: ContextVar[ForwardContext | None] = ContextVar(
    "attnkit_forward_context", default=None
)


@contextmanager
def forward_context(
    attn_metadata: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    positions: torch.Tensor | None = None,
) -> Iterator[None]:
    """Layers called inside without a cache and a plan take them from here, by their name.

    Args:
        attn_metadata: layer name -> plan. A layer whose plan is None is profiled (its output is
            zeros), and so are all of them if there are no plans.
        kv_caches: layer name -> cache; layers that share a cache find it under its owner's name.
        positions: int (num_tokens,), for layers of the runner that scale queries by them.

    Raises:
        BatchError: plans or caches are no mapping.
    """
    for name, given in (("attn_metadata", attn_metadata), ("kv_caches", kv_caches)):
        if not isinstance(given, Mapping):
            raise BatchError(
                f"forward_context got {type(given).__name__} as {name}; give a mapping from layer names"
            )
    token = _FORWARD_CONTEXT.set(ForwardContext(attn_metadata, kv_caches, positions))
    try:
        yield
    finally:
        _FORWARD_CONTEXT.reset(token)


def current_forward_context() -> ForwardContext | None:
    """The innermost context, if any."""
    return _FORWARD_CONTEXT.get()


class OpaqueLayer(Protocol):
    """What the node calls."""

    layer_name: str

    def _fill(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: Any | None,
    ) -> None: ...


_COUNTER = itertools.count()
_LAYERS: WeakValueDictionary[str, OpaqueLayer] = WeakValueDictionary()


def new_handle(layer: OpaqueLayer) -> str:
    """A string by which the node finds `layer` as long as that lives."""
    handle = f"{layer.layer_name}#{next(_COUNTER)}"
    _LAYERS[handle] = layer
    return handle


@functools.cache
def order_token(device: torch.device) -> torch.Tensor:
    """One element that every node on a device claims to change, and never does.

    A graph does not see the caches: to a compiler, a layer that is run for its cache alone would be
    dead code, and a layer that reads another's cache independent of it. Through this they are not.
    """
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.uint8, device=device)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    order: torch.Tensor,
    handle: str,
) -> None:
    _LAYERS[handle]._fill(query, key, value, output, lse, None, None)


def _attention_fake(*_: object) -> None:
    """Nothing is returned, so there is no shape to tell."""


# Defined by its schema: what `torch.library.custom_op` puts around a function took 160 us a call on a
# CPU, twice the attention of a decode step.
_LIBRARY = torch.library.Library("attnkit", "DEF")
_LIBRARY.define(
    "attention(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, Tensor(b!)? lse, "
    "Tensor(c!) order, str handle) -> ()"
)
_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("attnkit::attention", _attention_fake, lib=_LIBRARY)
