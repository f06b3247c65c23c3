"""Repeated launches: what changes is handed on, the rest is kept, and no memory of a step with it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

from attnkit.backends import repeat
from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.repeat import Repeats, kind_of


class Compiled:
    """What a launch returns: started again, it notes its grid and arguments."""

    packed_metadata = ()

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.launches.append((grid, values))

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("a function on a device cannot be copied")


class Kernel:
    """A jitted function whose first launch compiles it."""

    arg_names = ("x_ptr", "cache_ptr", "unused_ptr", "slopes_ptr", "num", "CONFIG")

    def __init__(self) -> None:
        self.compiled = Compiled()
        self.num_whole = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**arguments: Any) -> Compiled:
            self.num_whole += 1
            return self.compiled

        return launch


def _call(kernel: Kernel, x: torch.Tensor, cache: torch.Tensor, slopes: torch.Tensor) -> KernelCall:
    arguments = {
        "x_ptr": x,
        "cache_ptr": cache[1:],
        "unused_ptr": x,
        "slopes_ptr": slopes,
        "num": len(x),
        "CONFIG": "config",
    }
    return KernelCall(
        kernel=kernel, grid=(3,), arguments=arguments, options={}, device=torch.device("cpu")
    )


def _launch(
    repeats: Repeats, kernel: Kernel, key: Any, cache: torch.Tensor, scales: Any = None
) -> None:
    x = torch.zeros(3)
    make = lambda: _call(kernel, x, cache, x)  # noqa: E731
    repeats.launch(key, cache, (3,), {"x_ptr": x, "num": 3}, make, scales)


def test_a_launch_is_repeated_with_what_changed_and_keeps_no_memory_of_a_step() -> None:
    kernel, repeats = Kernel(), Repeats()
    cache, slopes = torch.zeros(4, 8), torch.ones(2)

    def step(num: int, cache: torch.Tensor = cache) -> torch.Tensor:
        x = torch.zeros(num)
        repeats.launch(
            ("key",),
            cache,
            (num,),
            {"x_ptr": x, "num": num},
            lambda: _call(kernel, x, cache, slopes),
        )
        return x

    gone = weakref.ref(step(2))
    assert (kernel.num_whole, kernel.compiled.launches) == (1, [])
    x = step(5)
    ((grid, values),) = kernel.compiled.launches
    assert grid == (5, 1, 1)
    assert values[0] is x
    assert values[1] == cache[1:].data_ptr()
    assert values[3] is slopes
    assert values[4:] == (5, "config")
    step(0)
    assert len(kernel.compiled.launches) == 1
    # Another cache: everything is looked at again, and the old one is not kept alive.
    other = torch.zeros(4, 8)
    step(5, other)
    assert kernel.num_whole == 2
    kept = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert kept() is None


def test_a_thread_with_another_cache_does_not_hand_over_its_launch() -> None:
    """The worst moment: one cache is on its way to be remembered when a launch over another comes."""
    kernel, repeats = Kernel(), Repeats()
    first, second = torch.zeros(4, 8), torch.zeros(4, 8)
    x = torch.zeros(3)

    def make() -> KernelCall:
        _launch(repeats, kernel, ("other key",), second)
        return _call(kernel, x, first, x)

    repeats.launch(("key",), first, (3,), {"x_ptr": x, "num": 3}, make)
    for cache in (second, second, first, first):
        _launch(repeats, kernel, ("key",), cache)
    addresses = [values[1] for _, values in kernel.compiled.launches]
    assert addresses == [second[1:].data_ptr(), first[1:].data_ptr()]


def test_copies_of_a_layer_begin_anew() -> None:
    kernel, repeats, cache = Kernel(), Repeats(), torch.zeros(4, 8)
    _launch(repeats, kernel, ("key",), cache)
    for other in (copy.deepcopy(repeats), copy.copy(repeats), pickle.loads(pickle.dumps(repeats))):
        _launch(other, kernel, ("key",), cache)
    assert (kernel.num_whole, kernel.compiled.launches) == (4, [])


def test_keys_without_end_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_MOST", 4)
    kernel, repeats, cache = Kernel(), Repeats(), torch.zeros(4, 8)
    for key in range(9):
        _launch(repeats, kernel, (key,), cache)
    assert len(repeats._known[1]) == 1
    for _ in range(2):
        _launch(repeats, kernel, (8,), cache)
    assert len(kernel.compiled.launches) == 2


def test_each_tensor_has_its_own_alignment() -> None:
    """Triton looks at each pointer; which of two is the unaligned one makes another kernel."""
    memory = torch.zeros(64)
    aligned, not_aligned = memory[:8], memory[2:10]
    assert kind_of(aligned, not_aligned) != kind_of(not_aligned, aligned)
    assert kind_of(aligned, None) != kind_of(aligned)
    assert kind_of(aligned) == kind_of(memory[16:24])
    assert kind_of(aligned) != kind_of(memory.view(torch.int32)[:8])
    assert kind_of(aligned) != kind_of(memory[:16:2])


def test_scales_are_a_part_of_the_key_where_they_are_read_in_place() -> None:
    one, other, four = torch.ones(()), torch.ones(()), torch.ones(4)
    kernel, repeats, cache = Kernel(), Repeats(), torch.zeros(4, 8)
    kinds = [(one, one), (one, other), (other, one), (four, four), (four[:1], four[:1])]
    for num_whole in (5, 5):
        for scales in kinds:
            _launch(repeats, kernel, ("key",), cache, scales)
        assert kernel.num_whole == num_whole
    # These are copied for the kernel, and no other launch would see what becomes of them.
    for scales in (
        (one, four),
        (one, one.double()),
        (four.half(), four),
        (one.expand(4), four),
    ):
        kernel = Kernel()
        for _ in range(2):
            _launch(repeats, kernel, ("other key",), cache, scales)
        assert (kernel.num_whole, kernel.compiled.launches) == (2, [])
