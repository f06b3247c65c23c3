"""Repeated launches: what a layer starts in every step, without asking again what it is.

In: a key that says all that a compiled kernel depends on, and the arguments that change. Out: a launched
kernel. Triton finds the kernel of a call by the type, value and alignment of each argument, which for
forty of them takes longer than the rest of a layer; a step differs from the one before in a few
pointers and counts only. Under an interpreter nothing is compiled, so every launch is whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.backends.kernel_call import KernelCall, current

_MOST = 256
"""Launches that are remembered. A layer has some ten; strides that follow the number of tokens, as of
heads before tokens, would make one a step."""


@dataclass(frozen=True, slots=True)
class Address:
    """Memory that somebody else keeps, in the place of a tensor whose map is encoded."""

    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """A compiled kernel, its arguments in order, and where those that change stand."""

    compiled: Any
    values: tuple[Any, ...]
    places: dict[str, int]
    device: torch.device


class Repeats:
    """Launches of one layer over one cache; those over a cache before it are forgotten.

    A copy has none: what is compiled cannot be copied.
    """

    def __init__(self) -> None:
        # One object, so that a thread with another cache cannot slip between the two.
        self._known: tuple[Hashable, dict[Hashable, _Launch]] = (None, {})

    def __reduce__(self) -> tuple[type[Repeats], tuple[()]]:
        return Repeats, ()

    def launch(
        self,
        key: tuple[object, ...],
        kv_cache: torch.Tensor | None,
        grid: tuple[int, ...],
        changing: dict[str, Any],
        make: Callable[[], KernelCall],
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Start a kernel.

        Args:
            key: which kernel, and all that its constants and Triton's view of the arguments follow from,
                beside the layer and `kv_cache`: types, strides and alignments of what changes.
            kv_cache: what the arguments that do not change are views of; None: the layer has none.
            grid: programs along each axis.
            changing: arguments by name; for a tensor map the tensor, which has the strides and sizes
                behind the first that it had when `key` was new.
            make: the whole call, for a new key; it checks what the key stands for.
            scales: of K and V, the layer's, which the kernel reads where they are.
        """
        if not all(grid):
            return
        if scales is not None:
            places = _places(*scales)
            if places is None:
                make().launch()
                return
            key = (*key, places)
        cache = None if kv_cache is None else _identity(kv_cache)
        known_cache, launches = self._known
        if cache != known_cache or len(launches) >= _MOST:
            launches = {}
            self._known = (cache, launches)
        known = launches.get(key)
        if known is None:
            call = make()
            compiled = call.launch()
            if hasattr(compiled, "packed_metadata"):
                launches[key] = _remembered(call, compiled, changing, kv_cache)
            return
        values = list(known.values)
        for name, value in changing.items():
            place = known.places[name]
            before = values[place]
            values[place] = value if before is None else moved(before, value)
        with current(known.device):
            known.compiled[(*grid, 1, 1)[:3]](*values)


def kind_of(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """What a compiled kernel depends on of tensors that change with every step."""
    # A list first: a generator would take twice as long for two or three of them.
    kinds = [None if x is None else (x.dtype, x.data_ptr() % 16 == 0, x.stride()) for x in tensors]
    return tuple(kinds)


def moved(descriptor: Any, tensor: torch.Tensor) -> Any:
    """The map of a tensor that differs from the descriptor's in its address and first size."""
    other = copy.copy(descriptor)
    other.base = tensor
    other.shape = [tensor.shape[0], *descriptor.shape[1:]]
    return other


def _places(k_scale: torch.Tensor, v_scale: torch.Tensor) -> tuple[int, int, int] | None:
    """Where a layer's scales are, and how many; None if `Stored` copies them: a repeated launch would
    not see what they are by then."""
    same = k_scale.numel() == v_scale.numel()
    for x in (k_scale, v_scale):
        if not same or x.dtype != torch.float32 or not x.is_contiguous():
            return None
    return k_scale.data_ptr(), v_scale.data_ptr(), k_scale.numel()


def _identity(cache: torch.Tensor) -> tuple[object, ...]:
    return cache.data_ptr(), cache.stride(), cache.shape, cache.dtype, cache.device


def _remembered(
    call: KernelCall, compiled: Any, changing: dict[str, Any], kv_cache: torch.Tensor | None
) -> _Launch:
    """The launch of `call` without the tensors of its step, and without keeping the cache alive."""
    cache = None if kv_cache is None else kv_cache.untyped_storage().data_ptr()
    values: list[Any] = []
    names = call.kernel.arg_names
    for name in names:
        value = call.arguments[name]
        if _is_tensor_map(value):
            value = moved(value, value.base)
            value.base = Address(value.base.data_ptr())
        elif name in changing:
            value = None
        elif isinstance(value, torch.Tensor):
            is_of_step = any(value is x for x in changing.values())  # Nobody reads it.
            if is_of_step or value.untyped_storage().data_ptr() == cache:
                value = value.data_ptr()
        values.append(value)
    return _Launch(compiled, tuple(values), {n: i for i, n in enumerate(names)}, call.device)


def _is_tensor_map(value: object) -> bool:
    """A Gluon `TensorDescriptor`, whose class lies elsewhere in every version of Triton."""
    return hasattr(value, "base") and hasattr(value, "block_shape")
