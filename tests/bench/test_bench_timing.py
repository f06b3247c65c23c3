"""Timing: contenders take turns, sets rotate, samples are summed up."""

from __future__ import annotations

import importlib.util
import time
import warnings

import pytest
import torch

from attnkit.bench import roofline, timing
from attnkit.bench.timing import (
    Effort,
    Timing,
    capture,
    count_syncs,
    time_cold,
    time_graphs,
    time_host,
    time_host_idle_device,
)

EFFORT = Effort(seconds=0.0, min_rounds=4, max_rounds=6)
CUDA = torch.device("cuda")


def test_median_and_spread_are_of_the_samples() -> None:
    got = Timing.of([float(x) for x in range(101)])
    assert (got.median_us, got.p10_us, got.p90_us, got.num_samples) == (50.0, 10.0, 90.0, 101)
    assert Timing.of([3.0]) == Timing(median_us=3.0, p10_us=3.0, p90_us=3.0, num_samples=1)


def test_rounds_follow_the_seconds_within_bounds() -> None:
    effort = Effort(seconds=1.0, min_rounds=5, max_rounds=50)
    assert [effort.rounds(us) for us in (1e6, 1e5, 1e3)] == [5, 10, 50]


def test_contenders_take_turns_and_meet_the_oldest_set() -> None:
    log: list[tuple[str, int]] = []

    def calls(name: str):
        return [lambda i=i: log.append((name, i)) for i in range(3)]

    got = time_host({"a": calls("a"), "b": calls("b")}, EFFORT)
    timed = log[4:]  # two calls each to learn the length
    assert [name for name, _ in timed] == ["a", "b"] * (len(timed) // 2)
    assert [i for _, i in timed] == [i % 3 for i in range(len(timed))]
    assert got["a"].num_samples == got["b"].num_samples == len(timed) // 2


def test_wall_clock_is_in_microseconds() -> None:
    got = time_host({"sleep": [lambda: time.sleep(0.002)]}, EFFORT)
    assert got["sleep"].median_us >= 2000


def test_garbage_collection_is_back_after_a_failure() -> None:
    import gc

    def fail() -> None:
        assert not gc.isenabled()
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        time_host_idle_device({"x": fail}, EFFORT, torch.device("cpu"))
    assert gc.isenabled()


def test_a_cpu_has_no_syncs_to_count() -> None:
    assert count_syncs(lambda: None, torch.device("cpu")) is None


def test_syncs_are_counted_and_the_mode_is_put_back(monkeypatch) -> None:
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits_twice() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (as an op does)", stacklevel=1)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    assert count_syncs(waits_twice, CUDA) == 2
    assert count_syncs(lambda: None, CUDA) == 0
    assert modes == ["warn", 0, "warn", 0]


class FakeCuda:
    """Device events on a clock that only calls move; launches are logged."""

    def __init__(self, monkeypatch) -> None:
        self.now_ms, self.log = 0.0, []
        # Whether the device has begun when the host has launched, of the next samples, last first.
        self.begins_early: list[bool] = []
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.now_ms

            def synchronize(self) -> None: ...

            def query(self) -> bool:
                return fake.begins_early.pop() if fake.begins_early else False

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        class Graph:
            def __init__(self) -> None:
                self.calls = []

            def replay(self) -> None:
                for call in self.calls:
                    call()

        class Recording:
            def __init__(self, graph: Graph) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                fake.recording = self.graph

            def __exit__(self, *_: object) -> None:
                fake.recording = None

        class Stream:
            def wait_stream(self, other: object) -> None: ...

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None: ...

        self.recording: Graph | None = None
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", Recording)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda s: s)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.tick("spin", 0.5))
        flush = torch.ones(3)
        flush.zero_ = lambda: self.tick("flush", 0.25)  # type: ignore[method-assign]
        monkeypatch.setattr(timing, "_flush_buffer", lambda device: flush)

    def tick(self, name: str, ms: float) -> None:
        if self.recording is not None:
            self.recording.calls.append(lambda: self.tick(name, ms))
            return
        self.log.append(name)
        self.now_ms += ms


def test_cold_time_leaves_out_flush_and_spin_and_takes_turns(monkeypatch) -> None:
    fake = FakeCuda(monkeypatch)
    calls = {"a": lambda: fake.tick("a", 0.125), "b": lambda: fake.tick("b", 2.0)}
    got = time_cold(calls, EFFORT, CUDA)
    assert {name: t.median_us for name, t in got.items()} == {"a": 125.0, "b": 2000.0}
    turn = ["flush", "spin", "a", "flush", "spin", "b"]
    timed = fake.log[-len(turn) * got["a"].num_samples :]
    assert timed == turn * got["a"].num_samples


def test_a_cold_sample_that_began_before_it_was_launched_is_taken_again(monkeypatch) -> None:
    fake = FakeCuda(monkeypatch)
    fake.begins_early = [True, True]  # A call that waits for the device is not tried for ever.
    time_cold({"a": lambda: fake.tick("a", 0.125)}, EFFORT, CUDA)
    once = ["flush", "spin", "a"]
    start = fake.log.index("flush")
    assert fake.log[start : start + 9] == once * 3
    fake.log.clear()
    fake.begins_early = [False, True]
    got = time_cold({"a": lambda: fake.tick("a", 0.125)}, EFFORT, CUDA)
    # One length, of two samples, before those that count.
    assert fake.log[fake.log.index("flush") :] == once * (2 + got["a"].num_samples)


def test_a_graph_holds_many_short_calls_or_one_long_one(monkeypatch) -> None:
    fake = FakeCuda(monkeypatch)
    graphs = {
        "short": capture(lambda: fake.tick("short", 0.125), 125.0),
        "long": capture(lambda: fake.tick("long", 4.0), 4000.0),
    }
    assert {name: g.num_calls for name, g in graphs.items()} == {"short": 16, "long": 1}
    fake.log.clear()
    got = time_graphs(graphs, EFFORT, CUDA)
    assert {name: t.median_us for name, t in got.items()} == {"short": 125.0, "long": 4000.0}
    # The device is busy when a round begins, or the first contender's time has the host's launch in it.
    turn = ["spin", *["short"] * 16, "long"]
    assert fake.log == turn * got["short"].num_samples


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the kernel that reads memory needs triton"
)
def test_the_reading_kernel_reads_everything_once() -> None:
    from attnkit.bench.kernels import read_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU in triton's interpreter
    x = torch.arange(3 * 4 * 64, device=device).float()
    sums = torch.full((3,), float("nan"), device=device)
    read_kernel[(3,)](x, sums, BLOCK=64, NUM_BLOCKS=4)
    assert torch.equal(sums, x.view(3, -1).sum(1))


def test_a_cpu_that_widens_16_bits_has_the_rate_of_float32(monkeypatch) -> None:
    rates = {"bfloat16": 1.0, "float16": 7.0, "float32": 5.0}
    monkeypatch.setattr(roofline, "_matmul_flops_per_s", lambda device, dtype, size: rates[dtype])
    monkeypatch.setattr(roofline, "_best_us", lambda call, device: 1.0)

    def measured(device: str, *dtypes: str) -> dict[str, float]:
        monkeypatch.setattr(roofline, "_reads", lambda x: [x.sum])
        found = roofline.measure(torch.device(device), dtypes, num_bytes=64, size=4)
        return found.matmul_flops_per_s

    assert measured("cpu", "bfloat16", "float16") == {"bfloat16": 5.0, "float16": 7.0}
    assert measured("cpu", "float32") == {"float32": 5.0}
