"""Launches of Triton kernels that are looked at: what they start, and what that was compiled for.

Nothing is compiled without a GPU, so kernels are stand-ins: a launch notes what a real one would be
compiled for, which is Triton's own answer for each argument. A layer that has run other steps must pass
to the kernel it found what a layer without a past passes to the one that Triton finds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction
from triton_problem import DEVICE

from attnkit.backends.kernel_call import KernelCall

SCALES = ("k_scale_ptr", "v_scale_ptr")

Kernels = dict[ModuleType, tuple[str, ...]]
"""Names of kernels in the modules that launch them."""

Step = Callable[[Any], None]
"""Runs on what a layer is made of: an impl, a prefill backend, kernels."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A launch, whole or repeated."""

    name: str
    grid: tuple[int, ...]
    values: tuple[Any, ...]
    compiled_for: tuple[Any, ...]
    is_whole: bool
    names: tuple[str, ...]


class Kernel:
    """A jitted function that compiles nothing."""

    def __init__(self, name: str, function: Any, log: list[Started]) -> None:
        if not isinstance(function, JITFunction):  # The interpreter's.
            names = ("do_not_specialize", "do_not_specialize_on_alignment")
            function = JITFunction(function.fn, **{n: function.kwargs[n] for n in names})
        self.name, self.params, self.log = name, function.params, log
        self.arg_names = function.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(**arguments: Any) -> Compiled:
            values = tuple(arguments.pop(name) for name in self.arg_names)
            compiled_for = (*map(self._view, self.params, values), tuple(arguments.items()))
            self.note(grid, values, compiled_for, True)
            return Compiled(self, compiled_for)

        return start

    def note(
        self,
        grid: tuple[int, ...],
        values: tuple[Any, ...],
        compiled_for: tuple[Any, ...],
        is_whole: bool,
    ) -> None:
        self.log.append(
            Started(
                name=self.name,
                grid=(*grid, 1, 1)[:3],
                values=values,
                compiled_for=compiled_for,
                is_whole=is_whole,
                names=tuple(self.arg_names),
            )
        )

    @staticmethod
    def _view(parameter: Any, value: Any) -> Any:
        """What Triton compiles an argument for."""
        if parameter.is_constexpr:
            return value
        p = parameter
        return native_specialize_impl(
            BaseBackend,
            value,
            p.is_const,
            not p.do_not_specialize,
            not p.do_not_specialize_on_alignment,
        )


@dataclass(frozen=True)
class Compiled:
    """What a whole launch leaves behind."""

    kernel: Kernel
    compiled_for: tuple[Any, ...]
    packed_metadata = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.kernel.note(grid, values, self.compiled_for, False)


def stand_in(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> list[Started]:
    """What is launched from now on, and does nothing."""
    started: list[Started] = []
    for module, names in kernels.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel(name, getattr(module, name), started))
    return started


def check_launches(got: list[Started], want: list[Started], own: Iterable[str]) -> None:
    """Whether launches of a layer are those of one without a past.

    Args:
        got, want: theirs.
        own: arguments that each call allocates; `SCALES` too, where a launch is whole.
    """
    assert all(x.is_whole for x in want)
    assert [(x.name, x.grid) for x in got] == [(x.name, x.grid) for x in want]
    for mine, whole in zip(got, want, strict=True):
        for name, a, b in zip(mine.names, mine.values, whole.values, strict=True):
            # Some scales are copied.
            is_own = name in own or (mine.is_whole and name in SCALES)
            _check_alike(name, a, b, is_own)
        named = (*mine.names, "options")
        for name, a, b in zip(named, mine.compiled_for, whole.compiled_for, strict=True):
            assert (type(a), a) == (type(b), b), name


def _check_alike(name: str, got: Any, want: Any, is_own: bool) -> None:
    """Whether two values of an argument are one to the kernel."""
    if is_own and isinstance(want, torch.Tensor):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype), name
        return
    if isinstance(want, torch.Tensor):
        address = got if type(got) is int else got.data_ptr()
        assert address == want.data_ptr(), name
        return
    assert (type(got), got) == (type(want), want), name


def rows_of(kind: str, rows: int, heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a step, as models make them."""
    if kind == "packed":
        return torch.empty(rows, heads + 2, size, dtype=dtype)[:, 1:-1]
    if kind == "unaligned":
        return torch.empty(rows * heads * size + 2, dtype=dtype)[2:].view(rows, heads, size)
    if kind == "wide":
        return torch.empty(rows, heads, size + 1, dtype=dtype)[..., :size]
    if kind == "heads first":
        return torch.empty(heads, rows, size, dtype=dtype).transpose(0, 1)
    return torch.empty(rows, heads, size, dtype=dtype)


class Interpreted:
    """A kernel in the interpreter that can be started again with the values that a GPU's would get."""

    def __init__(self, name: str, function: Any) -> None:
        self.__name__, self.function, self.arg_names = name, function, function.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(**arguments: Any) -> Any:
            self.function[grid](**arguments)
            return Indexed(lambda grid: functools.partial(again, grid, arguments))

        def again(grid: tuple[int, ...], first: dict[str, Any], *values: Any) -> None:
            arguments = dict(zip(self.arg_names, values, strict=True))
            for name, value in arguments.items():
                if isinstance(first[name], torch.Tensor) and type(value) is int:
                    assert value == first[name].data_ptr()
                    arguments[name] = first[name]
            self.function[grid](**arguments)

        return start


@dataclass(frozen=True)
class Indexed:
    """Has items that a function makes."""

    make: Callable[[Any], Any]
    packed_metadata = ()

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


def note_whole(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> list[str]:
    """Names of kernels whose launches are whole, from now on; others can be repeated here too."""
    if DEVICE.type == "cpu":
        for module, of_module in kernels.items():
            for name in of_module:
                monkeypatch.setattr(module, name, Interpreted(name, getattr(module, name)))
    names: list[str] = []
    plain = KernelCall.launch

    def noted(call: KernelCall) -> Any:
        names.append(call.kernel.__name__)
        return plain(call)

    monkeypatch.setattr(KernelCall, "launch", noted)
    return names


def check_repeats(
    log: list[Started],
    prepare: Callable[[Callable[..., Any]], tuple[Callable[[], Any], Callable[..., Step]]],
    choices: dict[str, tuple[Any, st.SearchStrategy[Any]]],
    counts: dict[str, st.SearchStrategy[Any]],
    own: tuple[str, ...],
    *,
    max_examples: int = 100,
) -> dict[str, int]:
    """Run steps on a layer with a past and on new ones.

    Args:
        log: of launches.
        prepare: draws a layer; returns how to make it, and a step of it from keywords.
        choices: what may make a kernel another, and how it begins.
        counts: what differs from step to step without that.
        own: arguments that every call allocates.
        max_examples: layers that are drawn.

    Returns:
        Launches that were repeated, by kernel.
    """
    num_repeated: dict[str, int] = {}

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        make, step_of = prepare(data.draw)
        layer, chosen = make(), {name: first for name, (first, _) in choices.items()}
        for _ in range(10):
            # Now and then one thing is another, and steps come back to what was before.
            for name in data.draw(st.lists(st.sampled_from(sorted(choices)), max_size=2)):
                first, others = choices[name]
                chosen[name] = data.draw(st.just(first) | others)
            step = step_of(**chosen, **{name: data.draw(x) for name, x in counts.items()})
            started = []
            for one in (layer, make()):
                log.clear()
                step(one)
                started.append(list(log))
            check_launches(*started, own)
            for mine in started[0]:
                num_repeated[mine.name] = num_repeated.get(mine.name, 0) + (not mine.is_whole)

    check()
    return num_repeated
