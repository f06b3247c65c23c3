"""Timing: many short samples per contender, taken in turns, so that drift hits all alike.

In: calls that were verified. Out: `Timing` per contender: median and spread of its samples, in
microseconds. Modes:

cold    GPU: L2 is overwritten before every call and the device is kept busy while the host launches,
        so launch cost does not count; device events around the call. CPU: wall clock; calls rotate
        through sets of tensors that together exceed the last-level cache.
warm    CPU, where the sets together fit into that cache.
graph   GPU: calls captured into one CUDA graph, replayed; L2 is left as it is.
host    Wall clock of the host around a call, the device idle before it.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.garbage import collection_paused

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: aimed at for all samples of one contender in one mode.
        min_rounds, max_rounds: turns each contender gets, whatever the seconds say.
    """

    seconds: float = 0.5
    min_rounds: int = 7
    max_rounds: int = 60

    def rounds(self, microseconds: float) -> int:
        """Turns for calls of this length."""
        wanted = int(self.seconds * 1e6 / max(microseconds, 1e-3))
        return min(max(wanted, self.min_rounds), self.max_rounds)


QUICK = Effort(seconds=0.05, min_rounds=3, max_rounds=10)

_CYCLES_PER_US = 2000
"""Of a GPU, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Samples of one contender in one mode, summed up; all in microseconds a call."""

    median_us: float
    p10_us: float
    p90_us: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Sum up at least one sample."""
        if len(samples) == 1:
            low = high = samples[0]
        else:
            tenths = statistics.quantiles(samples, n=10, method="inclusive")
            low, high = tenths[0], tenths[-1]
        return cls(
            median_us=statistics.median(samples),
            p10_us=low,
            p90_us=high,
            num_samples=len(samples),
        )


def time_host(calls: Mapping[str, Sequence[Call]], effort: Effort) -> dict[str, Timing]:
    """Wall clock of calls, contenders in turns.

    Args:
        calls: per contender, the same call on each set of tensors. The sets are walked through by
            all contenders together, so the next call always meets the set used longest ago.
        effort: how long.
    """
    with collection_paused():
        lengths = [_once(sets[i]) for sets in calls.values() for i in (0, -1)]
        samples: dict[str, list[float]] = {name: [] for name in calls}
        turn = 0
        for _ in range(effort.rounds(statistics.median(lengths))):
            for name, sets in calls.items():
                samples[name].append(_once(sets[turn % len(sets)]))
                turn += 1
    return {name: Timing.of(values) for name, values in samples.items()}


def time_host_idle_device(
    calls: Mapping[str, Call], effort: Effort, device: torch.device
) -> dict[str, Timing]:
    """Wall clock of the host side of calls; the device is idle before each."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    samples: dict[str, list[float]] = {name: [] for name in calls}
    with collection_paused():
        for call in calls.values():
            call()
        for _ in range(effort.max_rounds):
            for name, call in calls.items():
                settle()
                samples[name].append(_once(call))
        settle()
    return {name: Timing.of(values) for name, values in samples.items()}


def time_cold(calls: Mapping[str, Call], effort: Effort, device: torch.device) -> dict[str, Timing]:
    """Device time of calls on a GPU with a cold L2, contenders in turns."""
    flush = _flush_buffer(device)
    host = time_host_idle_device(calls, QUICK, device)

    def sample(call: Call, host_us: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for spin_us in (2 * host_us, 8 * host_us):
            flush.zero_()
            # Spin while the host launches. A call that waits for the device gains nothing from more
            # than a few milliseconds.
            torch.cuda._sleep(int(_CYCLES_PER_US * min(spin_us, 4000)))
            start.record()
            call()
            end.record()
            if not start.query():
                break  # The host was done before the device began: its time is not in this sample.
        return start, end

    with collection_paused():
        lengths = []
        for name, call in calls.items():
            start, end = sample(call, host[name].median_us)
            end.synchronize()
            lengths.append(start.elapsed_time(end) * 1e3)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(effort.rounds(statistics.median(lengths))):
            pairs = [(name, *sample(call, host[name].median_us)) for name, call in calls.items()]
            torch.cuda.synchronize(device)
            for name, start, end in pairs:
                samples[name].append(start.elapsed_time(end) * 1e3)
    return {name: Timing.of(values) for name, values in samples.items()}


@dataclass(frozen=True, slots=True)
class Captured:
    """A call, recorded several times over.

    Attributes:
        graph: to replay.
        num_calls: calls in one replay.
    """

    graph: torch.cuda.CUDAGraph
    num_calls: int


def capture(call: Call, length_us: float) -> Captured:
    """Record a call as a CUDA graph of about 2 ms.

    Raises:
        RuntimeError: it asks the host for something, or allocates in a way that cannot be captured.
    """
    num_calls = min(max(int(2000 / max(length_us, 1.0)), 1), 200)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return Captured(graph, num_calls)


def time_graphs(
    graphs: Mapping[str, Captured], effort: Effort, device: torch.device
) -> dict[str, Timing]:
    """Device time of captured calls, contenders in turns."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    with collection_paused():
        for _ in range(effort.rounds(2000.0)):
            pairs = []
            # Without work before it, the first contender's time had the host's launch in it: 30 us.
            torch.cuda._sleep(500 * _CYCLES_PER_US)
            for name, captured in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                captured.graph.replay()
                end.record()
                pairs.append((name, start, end))
            torch.cuda.synchronize(device)
            for name, start, end in pairs:
                samples[name].append(start.elapsed_time(end) * 1e3 / graphs[name].num_calls)
    return {name: Timing.of(values) for name, values in samples.items()}


def count_syncs(call: Call, device: torch.device) -> int | None:
    """How often a call waits for the device, as torch sees it; None on a CPU, where nothing waits."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # torch's own words for each; that the mode is a prototype is a warning too.
    return sum("called a synchronizing CUDA operation" in str(w.message) for w in caught)


def _flush_buffer(device: torch.device) -> torch.Tensor:
    """Writing it pushes everything out of L2 several times over."""
    size = max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 256 << 20)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _once(call: Call) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3
