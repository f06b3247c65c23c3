"""A session: prepare, check, time; whoever fails loses its own rows only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from attnkit.backends.reference import ReferenceBackend
from attnkit.bench import session
from attnkit.bench.contender import Contender, NotInstalled, Prepared, Refused
from attnkit.bench.inputs import Inputs
from attnkit.bench.record import Row
from attnkit.bench.rivals import rivals
from attnkit.bench.roofline import Ceilings
from attnkit.bench.subjects import Subject
from attnkit.bench.timing import Captured, Effort, Timing
from attnkit.bench.workloads import (
    LayerShape,
    Workload,
    build,
    decode,
    mixed,
    prefill,
    verify,
    write,
)
from attnkit.registry import _REGISTERED

CPU = torch.device("cpu")
LAYER = LayerShape(num_heads=4, num_kv_heads=2, head_size=16, block_size=16, dtype="float32")
DECODE = decode(3, 37, LAYER)
EFFORT = Effort(seconds=0.0, min_rounds=2, max_rounds=3)


@pytest.fixture(autouse=True)
def few_sets(monkeypatch) -> None:
    """A cache so small that two or three sets of a tiny workload exceed it."""
    monkeypatch.setattr(session, "last_level_cache_bytes", lambda: 16 << 10)


@dataclass(frozen=True)
class Stub:
    """A rival whose call is right, spoilt or refused as a test wants it."""

    name: str
    spoil: Callable[[torch.Tensor], Any] = lambda out: out
    prepares: Callable[[], None] = lambda: None
    is_rival: bool = True

    def prepare(self, inputs: Inputs) -> Prepared:
        self.prepares()
        right = Subject(backend="reference").prepare(inputs)
        return Prepared(run=lambda: self.spoil(right.run()), note="stub")


def measured(
    workload: Workload, *contenders: Contender, ceilings: Ceilings | None = None
) -> dict[str, Row]:
    (rows,) = session.run([("group", workload)], contenders, CPU, EFFORT, ceilings)
    return {row.contender: row for row in rows}


@pytest.mark.parametrize(
    "workload",
    [prefill(1, 19, LAYER), DECODE, verify(2, 3, 21, LAYER), mixed(9, 8, 2, 17, LAYER)],
    ids=lambda w: w.name,
)
def test_the_reference_is_measured_on_every_kind_of_attention(workload: Workload) -> None:
    row = measured(workload, Subject(backend="reference"))["reference"]
    assert row.status == "ok"
    assert row.error is not None
    assert row.error < 1e-5
    assert row.median_us is not None
    assert row.p10_us is not None
    assert row.p90_us is not None
    assert 0 < row.p10_us <= row.median_us <= row.p90_us
    assert row.tflops == pytest.approx(workload.num_flops / row.median_us * 1e-6)
    assert row.tbytes_per_s == pytest.approx(workload.num_bytes / row.median_us * 1e-6)


def test_a_build_is_timed_on_the_host() -> None:
    row = measured(build(4, 30, LAYER), Subject(backend="reference"))["reference"]
    assert (row.status, row.mode, row.tflops, row.fraction) == ("ok", "host", None, None)
    assert row.median_us is not None


def test_a_write_inside_forward_is_refused_and_the_rival_is_timed() -> None:
    rows = measured(write(2, 20, LAYER), Subject(backend="reference"), *rivals("torch-write"))
    assert rows["reference"].status == "refused"
    assert "inside its forward" in rows["reference"].note
    assert rows["torch-write"].median_us is not None


def test_a_wrong_output_is_not_timed() -> None:
    wrong = Stub("wrong", spoil=lambda out: out * 1.5)
    rows = measured(DECODE, Subject(backend="reference"), wrong)
    assert rows["wrong"].status == "wrong"
    assert rows["wrong"].median_us is None
    assert rows["wrong"].error == pytest.approx(0.5, rel=1e-3)
    assert rows["reference"].ratios == {}


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (NotInstalled("library x is not installed"), "not installed"),
        (Refused("page 16 is too small"), "refused"),
        (RuntimeError("CUDA error: misaligned\naddress"), "failed"),
        (ImportError("libx.so: undefined symbol"), "failed"),
    ],
)
def test_who_cannot_be_prepared_says_why_and_the_rest_is_measured(failure, status) -> None:
    def fail() -> None:
        raise failure

    rows = measured(DECODE, Subject(backend="reference"), Stub("absent", prepares=fail))
    assert rows["absent"].status == status
    assert str(failure).split("\n")[0] in rows["absent"].note
    assert "\n" not in rows["absent"].note
    assert rows["reference"].median_us is not None


def test_a_bug_of_ours_is_not_swallowed() -> None:
    class Bug(Exception):
        pass

    def fail() -> None:
        raise Bug

    with pytest.raises(Bug):
        measured(DECODE, Stub("buggy", prepares=fail))


def test_a_backend_that_cannot_serve_the_layer_gives_every_reason(monkeypatch) -> None:
    class Narrow(ReferenceBackend):
        supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16]

        @classmethod
        def get_supported_head_sizes(cls) -> list[int]:
            return [8]

    monkeypatch.setitem(_REGISTERED, "narrow", Narrow)
    row = measured(DECODE, Subject(backend="narrow"))["narrow"]
    assert row.status == "refused"
    assert "head size 16" in row.note
    assert "float32" in row.note


def test_ratios_are_the_rivals_times_over_ours() -> None:
    def row(name: str, rival: bool, mode: str, us: float | None) -> Row:
        return Row(group="g", workload="w", contender=name, is_rival=rival, mode=mode, median_us=us)

    rows = session.with_ratios(
        [
            row("ours", False, "cold", 10.0),
            row("ours", False, "graph", 8.0),
            row("fast", True, "cold", 12.0),
            row("slow", True, "cold", 40.0),
            row("slow", True, "graph", 4.0),
            row("absent", True, "cold", None),
        ]
    )
    assert rows[0].ratios == {"fast": 1.2, "slow": 4.0}
    assert (rows[0].best_rival, rows[0].ratio) == ("fast", 1.2)
    assert (rows[1].best_rival, rows[1].ratio) == ("slow", 0.5)
    assert rows[2].ratios == {}


def test_the_fraction_is_the_floor_over_the_time() -> None:
    ceilings = Ceilings(
        read_bytes_per_s=1e9, copy_bytes_per_s=1e9, matmul_flops_per_s={"float32": 1e15}
    )
    row = measured(DECODE, Subject(backend="reference"), ceilings=ceilings)["reference"]
    assert row.median_us is not None
    assert row.fraction == pytest.approx(DECODE.num_bytes / 1e9 * 1e6 / row.median_us)


def test_ceilings_bind_by_bytes_or_by_flops_whichever_takes_longer() -> None:
    ceilings = Ceilings(
        read_bytes_per_s=1e9, copy_bytes_per_s=2e9, matmul_flops_per_s={"float32": 1e9}
    )
    long = prefill(1, 500, LAYER)
    assert ceilings.floor_us(long) == pytest.approx(long.num_flops / 1e3)
    wide = decode(3, 37, LayerShape(num_heads=1, num_kv_heads=1, head_size=16, dtype="float32"))
    assert ceilings.floor_us(wide) == pytest.approx(wide.num_bytes / 1e3)
    some = write(2, 20, LAYER)
    assert ceilings.floor_us(some) == pytest.approx(some.num_bytes / 2e3)
    assert ceilings.floor_us(build(2, 20, LAYER)) is None


def test_sets_exceed_the_cache_or_the_mode_is_warm(monkeypatch) -> None:
    sets, mode = session._sets(DECODE, CPU)
    assert mode == "cold"
    assert len(sets) * DECODE.num_bytes >= 4 * (16 << 10)
    assert sets[0].block_tables != sets[1].block_tables
    monkeypatch.setattr(session, "last_level_cache_bytes", lambda: 1 << 40)
    sets, mode = session._sets(DECODE, CPU)
    assert (len(sets), mode) == (session._MAX_SETS, "warm")


def test_sets_leave_half_of_the_memory_free(monkeypatch) -> None:
    coded = replace(DECODE, kv_cache_dtype="int8_per_token_head")
    values = 2 * sum(coded.seq_lens) * coded.num_kv_heads * coded.head_size
    monkeypatch.setattr(session, "last_level_cache_bytes", lambda: 1 << 40)
    held = session._COPIES * values * coded.torch_dtype.itemsize
    for available, expected in ((6 * held, 3), (held, 1), (1, 1)):
        monkeypatch.setattr(session, "available_bytes", lambda given=available: given)
        assert len(session._sets(coded, CPU)[0]) == expected
    (inputs,), _ = session._sets(coded, CPU)
    assert inputs.by_head()[0] is inputs.by_head()[0], "SDPA's contenders share one copy"


def test_rivals_stand_on_the_pages_of_the_first_subject() -> None:
    seen = []

    @dataclass(frozen=True)
    class Looks:
        name: str = "looks"
        is_rival: bool = True

        def prepare(self, inputs: Inputs) -> Prepared:
            seen.append(inputs.any_layout.name)
            raise Refused("only looks")

    from attnkit.contract import KVCacheLayout

    measured(DECODE, Subject(backend="reference", layout=KVCacheLayout.LBHNC), Looks())
    assert set(seen) == {"LBHNC"}


def test_a_gpu_gives_cold_and_graph_rows_and_says_who_cannot_be_captured(monkeypatch) -> None:
    def timings(calls: Sequence[str], us: float) -> dict[str, Timing]:
        return {name: Timing.of([us]) for name in calls}

    def capture(call: Callable[[], Any], length_us: float) -> Captured:
        assert length_us == 20.0
        if call() is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Captured(graph=None, num_calls=1)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "Inputs", lambda workload, device: Inputs(workload, "cpu"))
    monkeypatch.setattr(session, "time_host_idle_device", lambda c, e, d: timings(c, 5.0))
    monkeypatch.setattr(session, "time_cold", lambda c, e, d: timings(c, 20.0))
    monkeypatch.setattr(session, "time_graphs", lambda c, e, d: timings(c, 15.0))
    monkeypatch.setattr(session, "capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    checks = iter([False] * 2 + [True] * 9)  # right while it is checked, None once it is captured
    sullen = Stub("sullen", spoil=lambda out: None if next(checks) else out)
    contenders = [Subject(backend="reference"), sullen]
    (rows,) = session.run([("g", DECODE)], contenders, torch.device("cuda"), EFFORT)
    found = {(row.contender, row.mode): row for row in rows}
    assert found["reference", "cold"].median_us == 20.0
    assert found["reference", "cold"].host_us == 5.0
    assert found["reference", "cold"].ratios == {"sullen": 1.0}
    assert found["reference", "graph"].median_us == 15.0
    assert found["reference", "graph"].ratios == {}
    assert found["sullen", "graph"].status == "refused"
    assert "not permitted" in found["sullen", "graph"].note
