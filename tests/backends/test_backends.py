"""Every backend of the table that can run here passes every check of the conformance kit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from attnkit.backends import BACKENDS
from attnkit.backends.triton.interpreter import is_interpreting
from attnkit.conformance.kit import Check, claimed_checks
from attnkit.conformance.plugin import run_check
from attnkit.conformance.subject import Subject
from attnkit.conformance.verify import verify
from attnkit.contract import DeviceCapability
from attnkit.errors import BackendUnavailable
from attnkit.selection import resolve

# What a machine has decides where a backend that runs on both is judged.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def device_of(name: str) -> str:
    here = DeviceCapability.of(DEVICE)
    return DEVICE if resolve(name).supports_compute_capability(here) else "cpu"


def one_dtype_each(checks: Sequence[Check]) -> list[Check]:
    """Of cases that differ in the layer's dtype alone one, each dtype in turn: in the interpreter
    kernels compute in float32 whatever they load. `attnkit verify triton`, and a GPU, run them all.

    Cases of plain cache dtypes are about pairs of dtypes, and stay.
    """
    alike: dict[str, list[Check]] = {}
    for check in checks:
        is_pair = check.name.startswith("case:cache_")
        kind = check.name if is_pair else re.sub("-(fp32|bf16|fp16)$", "", check.name)
        alike.setdefault(kind, []).append(check)
    return [kind[i % len(kind)] for i, kind in enumerate(alike.values())]


def checks() -> Iterator[Any]:
    for name in BACKENDS:
        if name == "flex":
            continue  # Eager and slow on a CPU: test_adapters has a part of its kit.
        try:
            subject = Subject.of(name, device_of(name))
        except BackendUnavailable as absent:
            yield pytest.param(None, id=name, marks=pytest.mark.skip(reason=str(absent)))
            continue
        judged: Sequence[Check] = claimed_checks(subject)
        if name == "triton" and is_interpreting():
            judged = one_dtype_each(judged)
        for check in judged:
            yield pytest.param(check, id=f"{name}-{check.name}")


@pytest.mark.parametrize("check", list(checks()))
def test_backend(check: Check, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.id.startswith("reference-law:") and "captured" not in check.name:
        check.run()  # It claims everything: a law that it refused would be judged by nobody.
    else:
        run_check(check)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_claim_is_judged(name: str) -> None:
    """A yes that the kit has no case for is a word only; there is none in the table."""
    try:
        report = verify(name, device=device_of(name), filter="claim:")
    except BackendUnavailable as absent:
        pytest.skip(str(absent))
    assert not report.failed, str(report)
    assert not report.unjudged, str(report)
