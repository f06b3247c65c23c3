"""Every kernel compiles for a Hopper without one: what fits registers, shared memory and tensor cores.

In a process of its own: with TRITON_INTERPRET, under which the other tests run, nothing is compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SHARED_MEMORY = 232448
"""Bytes that a program can have on sm_90."""

FEW_WORDS = 128
"""ptxas puts a few words that live across a loop into local memory where registers are full, or where
that lets one more program onto a multiprocessor. A loop that spills needs hundreds of bytes."""


def compile_all(**environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "attnkit.conformance.compile", "--arch", "sm_90", "--json"]
    return subprocess.run(command, capture_output=True, text=True, env={**env, **environ})


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    done = compile_all()
    assert done.returncode == 0, done.stderr
    return {r["name"]: r for r in map(json.loads, done.stdout.splitlines())}


def test_every_kernel_is_compiled(reports: dict[str, dict]) -> None:
    for name in (
        "attention",
        "decode",
        "write",
        "write-bf16-128-nvfp4",
        "mla",
        "mla-write",
        "mla-choose",
        "mla-gather",
        "index",
        "hopper-write",
        "hopper-unpack",
        "hopper-row-tiles",
        "hopper-share",
        "hopper-merge",
        "hopper-fold",
    ):
        assert any(report.startswith(name) for report in reports)
    assert any(report.endswith("-merge") for report in reports)
    assert len(reports) > 40


def test_no_kernel_spills(reports: dict[str, dict]) -> None:
    spilled = {name: r["spill_bytes"] for name, r in reports.items() if r["spill_bytes"]}
    assert all(size <= FEW_WORDS for size in spilled.values()), spilled


def test_no_kernel_reads_a_register_that_nothing_sets(reports: dict[str, dict]) -> None:
    """The assembler once took others for them: codes of nvfp4 were wrong in half of the rows."""
    assert not {name for name, r in reports.items() if r["unset_halves"]}


def test_many_heads_over_latents_fill_the_registers_and_no_more(reports: dict[str, dict]) -> None:
    """Half of them is the accumulator; a spill would be in the loop over keys."""
    many = {name: r for name, r in reports.items() if name.startswith("mla") and "h128" in name}
    assert len(many) > 6
    assert all(r["spill_bytes"] == 0 for r in many.values())
    assert all(r["wgmma"] > 0 for name, r in many.items() if not name.endswith("-merge"))


def test_every_kernel_fits_shared_memory(reports: dict[str, dict]) -> None:
    assert all(r["shared_bytes"] <= SHARED_MEMORY for r in reports.values())


def test_16_bit_prompts_run_on_hopper_matrix_instructions(reports: dict[str, dict]) -> None:
    for name, report in reports.items():
        if name.startswith("attention") and "fp32-" not in name and "512" not in name:
            assert report["wgmma"] > 0, name


def test_two_programs_of_64_fit_a_multiprocessor(reports: dict[str, dict]) -> None:
    """One computes weights while the other multiplies: 65536 registers, 233472 bytes shared."""
    report = reports["attention-bf16-64"]
    assert report["registers"] * report["num_warps"] * 32 * 2 <= 65536
    assert (report["shared_bytes"] + 1024) * 2 <= 233472


def test_under_the_interpreter_it_refuses() -> None:
    done = compile_all(TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "TRITON_INTERPRET" in done.stderr
