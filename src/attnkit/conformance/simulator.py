"""A graph on the CPU: work recorded as the operations and kernels it launches, and launched again.

In: work, as a `Recorder` of the runner gets it. Out: a recording that behaves as a CUDA graph does: it
repeats the same launches with the same host values on the same addresses, and no Python of the work
runs again. What a device would refuse is refused (`CaptureRefused`), and what it would get wrong in
silence is a `LawBroken`: a plan that was built somewhere else than where the recording reads.

Recorded are torch's operations and Triton kernels in the interpreter. Other code of the host is not,
as it would not be by a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnkit.backends.triton.interpreter import is_interpreting
from attnkit.conformance.subject import LawBroken

_HOST_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
"""Reads that torch does not dispatch as operations on a CPU."""

Place = tuple[int, torch.Size, tuple[int, ...]]
"""Address, shape and strides of a tensor."""


class CaptureRefused(RuntimeError):
    """The work waits for a tensor's value; a device says so with a RuntimeError too."""


class GraphSimulator:
    """A `Recorder` for a CPU."""

    def record(self, work: Callable[[], None], plans: Mapping[str, Any]) -> SimulatedGraph:
        """Do the work, and record it.

        Raises:
            CaptureRefused: the work reads the value of a tensor on the host, or works on a GPU.
        """
        tape = Tape()
        with tape, _HostReads(tape), kernels_on(tape):
            work()
        return SimulatedGraph(tape, plans)


class SimulatedGraph:
    """Recorded work.

    Attributes:
        num_launches: operations and kernels.
    """

    def __init__(self, tape: Tape, plans: Mapping[str, Any]) -> None:
        self._launches = tape.launches
        self.num_launches = len(tape.launches)
        # What is recorded goes on reading these, whatever becomes of the plans.
        self._read = {
            path: (x, _place(x))
            for path, x in _tensors(plans).items()
            if x.untyped_storage().data_ptr() in tape.storages
        }

    def replay(self, plans: Mapping[str, Any]) -> None:
        """Launch everything again.

        Raises:
            LawBroken: a tensor of the plans that the recording reads is elsewhere than it was.
        """
        now = _tensors(plans)
        for path, (_, place) in self._read.items():
            if path not in now:
                raise LawBroken(f"{path} was read by the captured work, and is gone from the plan")
            if _place(now[path]) != place:
                raise LawBroken(
                    f"{path} was read by the captured work at {_words(place)}; the plan of this step "
                    f"has it at {_words(_place(now[path]))}, which a graph would not read: builders "
                    "keep what they make in memory of their own, or hand on the batch's tensors"
                )
        for launch in self._launches:
            launch()


class Tape(TorchDispatchMode):
    """What has been launched, and the memory it read or wrote.

    Attributes:
        launches: in order.
        storages: addresses of the memory.
        is_paused: what happens is not recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], object]] = []
        self.storages: set[int] = set()
        self.is_paused = False

    def launch(self, run: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Run a kernel and put it on the tape; what it takes to run it here is not put there."""
        self._add(partial(run, *args, **kwargs), _tensors({"": (args, kwargs)}).values())
        self.unseen(run, *args, **kwargs)

    def unseen(self, run: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Run something that a GPU would not: it may look at tensors, and does not go on the tape."""
        self.is_paused = True
        try:
            run(*args, **kwargs)
        finally:
            self.is_paused = False

    def _add(self, launch: Callable[[], object], tensors: Iterable[torch.Tensor]) -> None:
        for x in tensors:
            if x.device.type == "cuda":
                raise CaptureRefused(
                    f"a tensor is on {x.device}, where compiled kernels would not be seen; record with "
                    "runner.graphs.CudaRecorder there"
                )
            self.storages.add(x.untyped_storage().data_ptr())
        self.launches.append(launch)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if _waits(func, args):
            raise CaptureRefused(
                f"{func} needs the value of a tensor on the host, and a graph never waits for it; "
                "read lengths when a plan is built, or leave them to the device"
            )
        out = func(*args, **kwargs)
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        self._add(partial(_again, func, args, kwargs, out), tensors)
        return out


class _HostReads(TorchFunctionMode):
    """Refuses reads that a dispatch mode does not see."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HOST_READS and not self._tape.is_paused:
            raise CaptureRefused(
                f"Tensor.{func.__name__} hands the value of a tensor to the host, and a graph would go "
                "on with that of its capture; read lengths when a plan is built, or leave them to the "
                "device"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels_on(tape: Tape) -> Iterator[None]:
    """Triton kernels that are launched inside go on the tape. What is looked at because they are
    interpreted, who would read and write past the cache, does not."""
    if not is_interpreting():
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    from attnkit.backends.triton import impl

    run = InterpretedFunction.run

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tape.launch(run, kernel, *args, **kwargs)

    with (
        mock.patch.object(InterpretedFunction, "run", launch),
        mock.patch.object(impl, "check_slots", partial(tape.unseen, impl.check_slots)),
        mock.patch.object(impl, "check_pages", partial(tape.unseen, impl.check_pages)),
    ):
        yield


def _waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation on a device makes the host wait: its result is a number of Python's, or its
    shape depends on values."""
    aten = torch.ops.aten
    if func is aten.index.Tensor:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if func in (aten.index_put_.default, aten.index_put.default):
        masks = any(x is not None and x.dtype is torch.bool for x in args[1])
        return masks and args[2].numel() != 1  # One number is filled in without counting.
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in func.tags for tag in tags)


def _again(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    """Repeat an operation into the tensors it made the first time."""
    again = func(*args, **kwargs)
    for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _tensors(plans: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors that can be reached from plans, by where they stand; shared plans once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def walk(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
            return
        if id(value) in seen or isinstance(value, (str, bytes, type, torch.nn.Module)):
            return
        seen.add(id(value))
        if isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, f"{path}[{key!r}]")
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                walk(item, f"{path}[{i}]")
        else:
            slots = getattr(type(value), "__slots__", ())
            for name in (*slots, *getattr(value, "__dict__", ())):
                if isinstance(name, str) and hasattr(value, name):
                    walk(getattr(value, name), f"{path}.{name}")

    for layer, plan in plans.items():
        walk(plan, f"the plan of {layer}: plan")
    return found


def _place(x: torch.Tensor) -> Place:
    return x.data_ptr(), x.shape, x.stride()


def _words(place: Place) -> str:
    address, shape, stride = place
    return f"{address:#x}, shape {tuple(shape)}, strides {stride}"
