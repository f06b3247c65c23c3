"""The report: what it counts as right, how it treats crashes, refusals and claims it cannot judge."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import pytest
import torch

from attnkit.conformance import verify
from attnkit.conformance.claims import all_claims
from attnkit.conformance.kit import all_checks, outcome_of
from attnkit.conformance.laws import LAWS
from attnkit.conformance.subject import Subject
from attnkit.conformance.twin import TwinBackend, TwinImpl
from attnkit.contract import KVCacheLayout, KVCacheSpec, MultipleOf
from attnkit.errors import (
    BackendUnavailable,
    ConfigurationError,
    UnknownBackend,
    UnsupportedConfiguration,
)
from attnkit.matrix import FLAGS


def test_a_right_backend_is_called_right() -> None:
    report = verify("reference", filter="lse")
    assert report.ok, str(report)
    assert report.num_cases > 20
    assert not report.refused
    assert not report.unjudged
    assert "right" in str(report)


def test_filter_and_progress() -> None:
    calls: list[tuple[int, int, str]] = []
    report = verify("reference", filter="plain-decode", progress=lambda *call: calls.append(call))
    names = [f"case:plain-decode-{dtype}" for dtype in ("fp32", "bf16", "fp16")]
    assert calls == [(0, 3, names[0]), (1, 3, names[1]), (2, 3, names[2])]
    assert [o.name for o in report.outcomes] == names
    assert all(o.margin is not None and 0 < o.margin.out <= 1 for o in report.outcomes)


def test_what_cannot_be_judged_is_not_called_wrong() -> None:
    with pytest.raises(ConfigurationError, match="no check of reference has 'zzz' in its name"):
        verify("reference", filter="zzz")
    for device in ("tpu", "cuda:99"):
        with pytest.raises(ConfigurationError, match=device):
            verify("reference", device=device)


def test_a_report_is_plain_values() -> None:
    report = verify("reference", filter="plain-decode-fp32")
    record = json.loads(json.dumps(report.as_dict()))
    assert record["ok"]
    assert record["num_cases"] == 1
    assert record["outcomes"][0]["status"] == "passed"
    assert 0 < record["outcomes"][0]["margin"]["out"] <= 1


def test_every_law_is_a_check() -> None:
    """They run, the others on the reference too, in test_backends."""
    checks = all_checks(Subject.of("reference"))
    assert [c.name for c in checks if c.name.startswith("law:")] == [f"law:{name}" for name in LAWS]
    report = verify("reference", filter="law:captured_steps_replay")
    # It reads lengths on the host, so its steps cannot be captured: see test_faults for that law.
    assert [o.message for o in report.refused] == ["the builder says AttentionCGSupport.NEVER"]


class CrashingImpl(TwinImpl):
    def score(self, score: torch.Tensor, ahead: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")


class Crashing(TwinBackend):
    impl_cls = CrashingImpl


def test_a_crash_is_a_failure_with_its_place() -> None:
    report = verify(Crashing, filter="case:plain-decode-fp32")
    assert not report.ok
    (failure,) = report.failed
    assert "ZeroDivisionError: on purpose" in failure.message
    assert "test_verify.py" in failure.message


class Misspelt(TwinBackend):
    supports_batch_invarience = classmethod(lambda cls: True)  # As its author wrote it.


class MisspeltImpl(TwinImpl):
    can_return_lse_for_decodes = True
    tile_size = 64  # A name of one's own.


class MisspeltInside(TwinBackend):
    @staticmethod
    def get_impl_cls() -> type[TwinImpl]:
        return MisspeltImpl


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        (Misspelt, "Misspelt has supports_batch_invarience, .* calls it supports_batch_invariance"),
        (
            MisspeltInside,
            "MisspeltImpl has can_return_lse_for_decodes, .* can_return_lse_for_decode",
        ),
    ],
)
def test_a_name_that_nobody_asks_for_is_a_failure(backend: Any, named: str) -> None:
    report = verify(backend, filter="claim:names")
    (outcome,) = report.failed
    assert re.search(named, outcome.message)
    assert verify(TwinBackend, filter="claim:names").ok


class TakesNoDtype(TwinBackend):
    supported_dtypes: ClassVar[list[Any]] = ["float32"]


def test_a_backend_without_dtypes_cannot_be_judged() -> None:
    with pytest.raises(UnsupportedConfiguration, match="supported_dtypes says float32"):
        verify(TakesNoDtype)


class RefusesAll(TwinBackend):
    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        return ["not today"]


def test_a_backend_that_refuses_everything_is_not_right() -> None:
    report = verify(RefusesAll, filter="case:plain")
    assert not report.failed
    assert not report.ok
    assert "not judged" in str(report)
    assert "WRONG" not in str(report)
    assert all("not today" in o.message for o in report.refused)


def test_every_row_of_the_matrix_is_a_claim_of_the_kit() -> None:
    """So each yes of `attnkit backends` is run and each no is refused: `test_every_claim_is_judged`."""
    asked: set[str] = set()

    class Asked(TwinBackend):
        """Remembers which of its methods were called."""

    for method in FLAGS.values():
        answer = getattr(TwinBackend, method)

        def remember(cls: type, method: str = method, answer: Any = answer) -> bool:
            asked.add(method)
            return answer()

        setattr(Asked, method, classmethod(remember))
    for claim in all_claims(Subject.of(Asked).basis()):
        claim.made(Asked)
    assert asked == set(FLAGS.values())


class ClaimsTheUnjudged(TwinBackend):
    @classmethod
    def supports_pcp(cls) -> bool:
        return True


def test_a_claim_without_a_case_is_unjudged_not_passed() -> None:
    name = "claim:prefill context parallelism"
    report = verify(ClaimsTheUnjudged, filter=name)
    assert [o.name for o in report.unjudged] == [name]
    assert not report.passed
    assert f"unjudged {name}" in str(report)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(UnknownBackend, match="no_such_backend"):
        verify("no_such_backend")


class Absent(TwinBackend):
    @classmethod
    def unavailable_reason(cls) -> str | None:
        return "its library is not installed"


def test_a_backend_that_cannot_run_here_raises() -> None:
    with pytest.raises(BackendUnavailable, match="its library is not installed"):
        verify(Absent)


class Picky(TwinBackend):
    """Takes little, as kernels made for one device do."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16"]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128]

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [64]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_head_size_v(cls, head_size: int, head_size_v: int) -> bool:
        return head_size == head_size_v


def test_a_picky_backend_is_judged_on_what_it_takes() -> None:
    """By its claims, and every eighth of the rest."""
    checks = all_checks(Subject.of(Picky))
    named = {
        "claim:head size 8",  # Refused, as it says.
        "claim:head size 64",
        "claim:block size 128",
        "case:plain-decode-bf16",
        "law:splitting_a_prompt_does_not_matter",
    }
    wanted = {check.name for check in checks[::8]} | named
    judged = [c for c in checks if c.name in wanted or c.name.startswith("claim:")]
    outcomes = {check.name: outcome_of(check) for check in judged}
    assert not [o for o in outcomes.values() if o.status == "failed"]
    passed = {name for name, outcome in outcomes.items() if outcome.status == "passed"}
    assert passed >= named
    assert sum(name.startswith("case:") for name in passed) >= 20
