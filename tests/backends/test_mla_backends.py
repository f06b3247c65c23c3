"""Every backend over latents that can run here passes the kit for latents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_backends import device_of

from attnkit.backends import MLA_BACKENDS
from attnkit.backends.triton.interpreter import is_interpreting
from attnkit.conformance.plugin import run_check
from attnkit.conformance.verify import Check, claimed_checks, subject_of, verify
from attnkit.errors import BackendUnavailable

INTERPRETED_SHARE = 8
"""Interpreted kernels take four minutes for the whole kit, which `attnkit verify triton_mla` and a GPU
run; here they are judged by every claim and by every eighth law and case."""


def checks() -> Iterator[Any]:
    for name in MLA_BACKENDS:
        try:
            subject = subject_of(name, device_of(name))
        except BackendUnavailable as absent:
            yield pytest.param(None, id=name, marks=pytest.mark.skip(reason=str(absent)))
            continue
        judged = claimed_checks(subject)
        if name == "triton_mla" and is_interpreting():
            first = sum(check.name.startswith("claim:") for check in judged)
            judged = (*judged[:first], *judged[first::INTERPRETED_SHARE])
        for check in judged:
            yield pytest.param(check, id=f"{name}-{check.name}")


@pytest.mark.parametrize("check", list(checks()))
def test_mla_backend(check: Check) -> None:
    run_check(check)


@pytest.mark.parametrize("name", MLA_BACKENDS)
def test_every_claim_is_judged(name: str) -> None:
    try:
        report = verify(name, device=device_of(name), filter="claim:")
    except BackendUnavailable as absent:
        pytest.skip(str(absent))
    assert not report.failed, str(report)
    assert not report.unjudged, str(report)
