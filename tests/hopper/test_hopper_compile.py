"""Every kernel compiled for sm_90: no spills where it matters, memory in bounds, Hopper's instructions
there, and none of the assembler's known faults.

In a process of its own, since the tests here run under TRITON_INTERPRET. Set ATTNKIT_TRITON36 to a
Python with triton==3.6.0 to compile with that release too (torch is not needed there).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import aot
import pytest

PYTHONS = {"this triton": sys.executable, "triton 3.6": os.environ.get("ATTNKIT_TRITON36") or None}


@pytest.mark.parametrize("which", PYTHONS)
def test_kernels_compile_without_complaint(which: str) -> None:
    python = PYTHONS[which]
    if python is None:
        pytest.skip("ATTNKIT_TRITON36 names no Python with triton 3.6")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(aot.__file__)
    run = subprocess.run(
        [python, str(script), "--json"], capture_output=True, text=True, env=environment
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    assert lines, run.stderr[-2000:]
    reports = [json.loads(line) for line in lines]
    assert len(reports) == len(list(aot.variants(False)))
    bad = [complaint for report in reports for complaint in aot.complaints(report)]
    assert not bad, "\n".join(bad)


GOOD = """
USETMAXREG.ALLOC 0xf0 ;
UIADD3 UR8, UR4, 0x2, URZ ;
.L_x_1:
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
UIADD3 UR10, UR4, 0x2, URZ ;
@P0 BRA `(.L_x_1) ;
"""
STALE = """
USETMAXREG.ALLOC 0xf0 ;
UMOV UR8, UR4 ;
@!P1 BRA `(.L_x_2) ;
UIADD3 UR8, UR4, 0x2, URZ ;
.L_x_1:
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
@P0 BRA `(.L_x_1) ;
.L_x_2:
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""


def test_a_descriptor_left_on_one_path_is_found() -> None:
    assert not aot.stale_descriptors(GOOD)
    (found,) = aot.stale_descriptors(STALE)
    assert "UR8" in found
    assert "L_x_2" in found


USED_THEN_FREED = """
LDSM.16.M88.4 R132, [R138+0x18000] ;
WARPGROUP.ARRIVE ;
HGMMA.64x64x16.F32.BF16 R24, R132, gdesc[UR16], R24 ;
BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
@!P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7+0x1a150], RZ ;
"""
FREED_THEN_USED = """
LDSM.16.M88.4 R132, [R138+0x18000] ;
BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
@!P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7+0x1a150], RZ ;
HGMMA.64x64x16.F32.BF16 R24, R132, gdesc[UR16], R24 ;
"""


def test_memory_that_is_freed_under_a_load_is_found() -> None:
    assert not aot.unread_loads(USED_THEN_FREED)
    (found,) = aot.unread_loads(FREED_THEN_USED)
    assert "R132" in found
    # Loads in front of a loop are of memory that the loop does not free.
    assert not aot.unread_loads(FREED_THEN_USED.replace("BAR", ".L_x_1:\nBAR", 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shared": 300_000}, "shared memory"),
        ({"products": 0}, "no products"),
        ({"copies": 0}, "no copies"),
        ({"spills_in_loops": [9]}, "spill"),
        ({"warnings": ["(C7510) wgmma serialised"]}, "C7510"),
        ({"stale": ["HGMMA"]}, "stale"),
        ({"unread": ["LDSM"]}, "unread"),
        ({"unset": ["%rs9"]}, "nothing sets: %rs9"),
    ],
)
def test_a_bad_build_is_complained_about(change: dict, words: str) -> None:
    report = {
        "name": "x",
        "shared": 1000,
        "products": 8,
        "copies": 4,
        "loop_instructions": [400],
        "spills_in_loops": [0],
        "warnings": [],
        "stale": [],
        "unread": [],
        "unset": [],
    }
    assert not aot.complaints(report)
    (complaint,) = aot.complaints({**report, **change})
    assert words in complaint
