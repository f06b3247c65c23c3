"""Repeated launches: what a layer starts in every step, without asking again what it is.

In: a key that says all that a compiled kernel depends on, and the arguments that change. Out: a launched
kernel. Triton finds the kernel of a call by the type, value and alignment of each argument, which for
forty of them takes longer than the rest of a layer; a step differs from the one before in a few
pointers only. Under an interpreter nothing is compiled, so every launch is whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.backends.hopper.gluon_api import TensorDescriptor
from attnkit.backends.kernel_call import KernelCall, current


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
    """Launches of one layer over one cache; those over a cache before it are forgotten."""

    def __init__(self) -> None:
        self._cache: Hashable = None
        self._launches: dict[Hashable, _Launch] = {}

    def launch(
        self,
        key: Hashable,
        kv_cache: torch.Tensor,
        grid: tuple[int, ...],
        changing: dict[str, Any],
        make: Callable[[], KernelCall],
    ) -> None:
        """Start a kernel.

        Args:
            key: which kernel, and types, strides and alignments of what changes.
            kv_cache: what the arguments that do not change are views of.
            grid: programs along each axis.
            changing: arguments by name; for a tensor map the tensor, which has the strides and sizes
                behind the first that it had when `key` was new.
            make: the whole call, for a new key; it checks what the key stands for.
        """
        if not all(grid):
            return
        cache = (kv_cache.data_ptr(), kv_cache.stride(), kv_cache.shape, kv_cache.dtype)
        if cache != self._cache:
            self._launches.clear()
            self._cache = cache
        known = self._launches.get(key)
        if known is None:
            call = make()
            compiled = call.launch()
            if hasattr(compiled, "packed_metadata"):
                self._launches[key] = _remembered(call, compiled, changing, kv_cache)
            return
        values = list(known.values)
        for name, value in changing.items():
            place = known.places[name]
            before = values[place]
            values[place] = moved(before, value) if type(before) is TensorDescriptor else value
        with current(known.device):
            known.compiled[(*grid, 1, 1)[:3]](*values)


def kind_of(*tensors: torch.Tensor) -> tuple[object, ...]:
    """What a compiled kernel depends on of tensors that change with every step."""
    address = 0
    for x in tensors:
        address |= x.data_ptr()
    return address % 16, *((x.dtype, x.stride()) for x in tensors)


def moved(descriptor: Any, tensor: torch.Tensor) -> Any:
    """The map of a tensor that differs from the descriptor's in its address and first size."""
    other = copy.copy(descriptor)
    other.base = tensor
    other.shape = [tensor.shape[0], *descriptor.shape[1:]]
    return other


def _remembered(
    call: KernelCall, compiled: Any, changing: dict[str, Any], kv_cache: torch.Tensor
) -> _Launch:
    """The launch of `call` without the tensors of its step, and without keeping the cache alive."""
    cache = kv_cache.untyped_storage().data_ptr()
    values: list[Any] = []
    names = call.kernel.arg_names
    for name in names:
        value = call.arguments[name]
        if isinstance(value, TensorDescriptor):
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
