"""Every backend over latents that can run here passes the kit for latents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_backends import device_of

from attnkit.backends import MLA_BACKENDS
from attnkit.backends.triton.interpreter import is_interpreting
from attnkit.conformance.kit import Check, claimed_checks, subject_of
from attnkit.conformance.plugin import run_check
from attnkit.conformance.verify import verify
from attnkit.errors import BackendUnavailable

INTERPRETED_SHARE = 8
"""Interpreted kernels take four minutes for the whole kit, which `attnkit verify triton_mla` and a GPU
run; here they are judged by every claim and by every eighth law and case."""

SPARSE_SHARE = 6
"""The kernels of sparse backends are those of the dense ones, which are judged by everything: beside
every sixth check they are judged by what is about chosen keys."""


def checks() -> Iterator[Any]:
    for name in MLA_BACKENDS:
        try:
            subject = subject_of(name, device_of(name))
        except BackendUnavailable as absent:
            yield pytest.param(None, id=name, marks=pytest.mark.skip(reason=str(absent)))
            continue
        judged = claimed_checks(subject)
        interpreted = name.startswith("triton") and is_interpreting()
        share = INTERPRETED_SHARE if interpreted else 1
        if subject.backend.is_sparse():
            share *= SPARSE_SHARE
        about = ("claim:", "law:lists", "law:states")
        if not interpreted:
            about = (*about, "case:told")
        kept = {check.name for check in judged[::share]}
        judged = tuple(c for c in judged if c.name in kept or c.name.startswith(about))
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
