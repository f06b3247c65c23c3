"""Compile the hopper kernels for sm_90a without a GPU and read what the assembler made of them.

In: nothing but Triton; torch is not needed, so this runs in a virtual environment with another Triton
(`python tests/hopper/aot.py --json`). Out: per kernel registers, spills (in all, and in the loops with
products), shared memory, counts of products and copies, warnings of the assembler, suspicious
descriptors (see `stale_descriptors`), memory freed under a load (`unread_loads`) and registers that
nothing sets (`attnkit.conformance.ptx`).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src" / "attnkit"
MAX_SHARED = 232_448


def _stand_in_packages() -> None:
    """Make the device files importable without running attnkit's own __init__, which needs torch."""
    packages = ("attnkit", "attnkit.backends", "attnkit.backends.hopper", "attnkit.conformance")
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(SOURCE.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    if importlib.util.find_spec("torch") is None:
        sys.modules["torch"] = types.ModuleType("torch")


_POINTERS = {
    "lse_ptr": "*fp32",
    "slopes_ptr": "*fp32",
    "sinks_ptr": "*fp32",
    "states_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "k_scale_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
}
_FLOATS = ("log2_scale", "score_factor", "cap_log2")


def signature(arg_names: list[str], config: Any, dtype: str) -> dict[str, str]:
    """Types of a kernel's parameters as a launch would find them."""
    from triton.experimental.gluon import language as gl

    def descriptor(*box: int, element: str = dtype, bits: int = 16) -> str:
        layout = gl.NVMMASharedLayout(box[-1] * bits // 8, bits, len(box))
        return f"tensordesc<{element}[{','.join(map(str, box))}],{layout!r}>"

    score = config.score
    absent = {
        "lse_ptr": not score.lse,
        "slopes_ptr": not score.alibi,
        "sinks_ptr": not score.sinks,
    }
    types_of = {}
    for name in arg_names:
        if name == "CONFIG":
            types_of[name] = "constexpr"
        elif absent.get(name):
            types_of[name] = f"*{dtype}"
        elif name in ("q_desc", "q_rope_desc"):
            rows = getattr(config, "tile_rows", 64)
            types_of[name] = descriptor(rows // config.pack, 1, config.pack, 64)
        elif name in ("k_desc", "v_desc", "c_desc"):
            box = (1, 1, config.rows, config.strip)
            if getattr(config, "ragged", False):
                box = (config.rows, 1, 1, config.strip)
            coded = {"element": "u8", "bits": 8} if config.element_bytes == 1 else {}
            types_of[name] = descriptor(*box, **coded)
        elif name == "out_ptr":
            types_of[name] = "*fp32" if getattr(config, "ragged", False) else f"*{dtype}"
        elif name in _POINTERS:
            types_of[name] = _POINTERS[name]
        elif name.endswith("_ptr"):
            types_of[name] = "*i32"
        else:
            types_of[name] = "fp32" if name in _FLOATS else "i32"
    return types_of


def compile_kernel(kernel: Any, config: Any, dtype: str) -> dict[str, Any]:
    """Compile one variant and report on it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.experimental.gluon._runtime import GluonASTSource

    from attnkit.conformance.ptx import unset_halves

    names = kernel.arg_names
    types_of = signature(names, config, dtype)
    unaligned = ("starts_ptr", "tiles_ptr", "share_ptr", "pieces_ptr", "table_ptr")
    aligned = [
        name
        for name in names
        if (types_of[name].startswith("*") and name not in unaligned) or "out_stride" in name
    ]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    compiled = triton.compile(
        GluonASTSource(kernel, types_of, {"CONFIG": config}, attrs),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "maxnreg": config.maxnreg, "enable_fp_fusion": True},
    )
    ptx = compiled.asm["ptx"]
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(binary)]
        log = subprocess.run(command, capture_output=True, text=True, check=True)
        command = [str(tools / "nvdisasm"), "-c", str(binary)]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = log.stdout + log.stderr
    instructions = _instructions(sass)
    hot = [instructions[a : b + 1] for a, b in _inner_product_loops(instructions)]
    spill = re.search(r"(\d+) bytes spill stores", text)
    return {
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "spilled_bytes": int(spill[1]) if spill else 0,
        "spills_in_loops": [sum(bool(re.search(r"\b(STL|LDL)\b", x)) for x in h) for h in hot],
        "loop_instructions": [len(loop) for loop in hot],
        "products": ptx.count("wgmma.mma_async") + ptx.count("mma.sync"),
        "copies": ptx.count("cp.async.bulk.tensor"),
        "warnings": [
            line for line in text.splitlines() if re.search(r"warning|C75\d\d", line, re.I)
        ],
        "stale": stale_descriptors(sass),
        "unread": unread_loads(sass),
        "unset": sorted(unset_halves(ptx)),
    }


def _instructions(sass: str) -> list[str]:
    stripped = (re.sub(r"^\s*/\*[0-9a-f]+\*/\s*", "", line).strip() for line in sass.splitlines())
    return [line for line in stripped if line]


def _labels(instructions: list[str]) -> dict[str, int]:
    return {
        match[1]: i
        for i, line in enumerate(instructions)
        if (match := re.match(r"(\.L_x_\d+):", line))
    }


def _inner_product_loops(instructions: list[str]) -> list[tuple[int, int]]:
    """Innermost loops that hold products: from the target of a backward branch to the branch."""
    labels = _labels(instructions)
    loops = []
    for i, line in enumerate(instructions):
        match = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        # The slow path of a barrier stands at the end of the code and jumps back: no loop of ours.
        polls = any("TRYWAIT" in x for x in instructions[max(0, i - 4) : i])
        if match and not polls and labels.get(match[1], i) < i:
            loops.append((labels[match[1]], i))
    held = [
        (a, b)
        for a, b in loops
        if sum(bool(re.match(r"(@!?U?P\d+ )?HG?MMA", x)) for x in instructions[a : b + 1]) >= 8
    ]
    return [
        (a, b) for a, b in held if not any((c, d) != (a, b) and c >= a and d <= b for c, d in held)
    ]


def stale_descriptors(sass: str) -> list[str]:
    """Products whose descriptor register is set only on one of the paths that lead to them.

    ptxas 12.8.93, which Triton 3.6 brings for sm_90, may leave a sum that two consecutive loops share in
    front of the first of them; when that loop runs zero times, the second reads a stale register. Here
    the nearest definition above a product must not be jumped over by a branch to a place between the
    two. A product with A in registers has one descriptor, in the second pair of its operand.
    """
    lines = _instructions(sass)
    labels = _labels(lines)
    found = []
    for i, line in enumerate(lines):
        operand = re.search(r"HGMMA.*gdesc\[UR(\d+)\]", line)
        if operand is None:
            continue
        first = int(operand[1])
        from_registers = re.search(r"HGMMA\S* R\d+, R\d+", line) is not None
        for register in [first + 2] if from_registers else [first, first + 2]:
            sets = re.compile(rf"(?:@!?U?P\d+ )?U?[A-Z0-9_.]+ (?:UP\d, )?UR{register},")
            above = next((j for j in range(i - 1, -1, -1) if sets.match(lines[j])), 0)
            role = max((j for j in range(i) if "USETMAXREG" in lines[j]), default=0)
            for j in range(role, above):
                jump = re.search(r"BRA `\((\.L_x_\d+)\)", lines[j])
                if jump and above < labels.get(jump[1], -1) <= i:
                    found.append(f"{line} uses UR{register}, which '{lines[j]}' jumps over")
                    break
    return found


def unread_loads(sass: str) -> list[str]:
    """Frees of shared memory before which a matrix load was issued whose registers nobody has used yet.

    Such a load may not have read when the copy engine, which does not queue behind it, writes there anew
    (one run in hundreds, see benchmarks/hopper-notes.md). Looked for within a basic block: a load that
    stands in front of a loop is of memory that the loop does not free.
    """
    found = []
    pending: dict[str, set[int]] = {}
    for line in _instructions(sass):
        if re.match(r"\.L_x_\d+:|.*\bBRA\b", line):
            pending.clear()
            continue
        if pending and re.search(r"SYNCS\.ARRIVE\.TRANS64\.A1T0", line):
            found += [f"'{line}' comes before '{load}' is used" for load in pending]
            pending.clear()
        used = {int(r) for r in re.findall(r"\bR(\d+)\b", line)}
        if re.search(r"HG?MMA", line):  # An operand of a product is up to four registers.
            used |= {r + i for r in used for i in range(4)}
        pending = {load: registers for load, registers in pending.items() if not registers & used}
        load = re.match(r"LDSM\S*?(?:\.(\d))? R(\d+),", line)
        if load:
            first, num = int(load[2]), int(load[1] or 1)
            pending[line] = set(range(first, first + num))
    return found


def variants(everything: bool) -> Iterator[tuple[str, str, Any, str]]:
    """Name, kernel ("prefill" or "decode"), config and dtype of each variant to compile."""
    from attnkit.backends.hopper.config import ScoreConfig
    from attnkit.backends.hopper.tuning import (
        HEAD_SIZES,
        decode_config,
        latent_config,
        prefill_config,
    )

    makers = {
        "prefill": prefill_config,
        "prefill scaled": functools.partial(prefill_config, scaled=True),
        "prefill split": functools.partial(prefill_config, split=True),
        "decode": functools.partial(decode_config, tile_rows=64),
        "decode16": functools.partial(decode_config, tile_rows=16),
        "decode16 beside": functools.partial(decode_config, tile_rows=16, beside=True),
        "decode of codes": functools.partial(decode_config, tile_rows=16, coded=True),
    }
    plain = ScoreConfig()
    scores = {
        "lse": ScoreConfig(lse=True),
        "cap+window": ScoreConfig(linear=False, soft_cap=True, window=True),
    }
    if everything:
        scores |= {
            "sinks+window": ScoreConfig(window=True, sinks=True, lse=True),
            "cap": ScoreConfig(linear=False, soft_cap=True),
            "alibi": ScoreConfig(linear=False, alibi=1),
            "alibi-sqrt": ScoreConfig(linear=False, alibi=2),
        }
    for kernel, make in makers.items():
        few = kernel in ("prefill scaled", "prefill split", "decode16 beside", "decode of codes")
        for head_size in HEAD_SIZES:
            shapes = [("plain", plain, 4, 16, "bf16")]
            if (
                " " in kernel
                and kernel != "decode of codes"
                and head_size != 128
                and not everything
            ):
                continue
            if everything or (head_size == 128 and not few):
                shapes += [(name, score, 4, 16, "fp16") for name, score in scores.items()]
            if everything:
                groups = (1, 6, 8, 16 if kernel in ("decode16", "decode of codes") else 64)
                shapes += [(f"group {g}", plain, g, 16, "bf16") for g in groups]
                shapes += [(f"page {p}", plain, 4, p, "bf16") for p in (32, 48, 128, 160, 256)]
            for name, score, group, page, dtype in shapes:
                config = make(head_size, group, page, score)
                assert config.rows == math.gcd(page, config.block_n)
                yield f"{kernel} D{head_size} {name}", kernel, config, dtype
    config = prefill_config(192, 1, None, ScoreConfig(lse=True), value_size=128)
    yield "prefill D192 of values of 128", "prefill", config, "bf16"
    shapes = [(128, 64, "bf16", True), (16, 64, "bf16", False)]
    if everything:
        shapes += [(8, 16, "fp16", True), (96, 32, "bf16", False), (64, 128, "bf16", False)]
    for heads, page, dtype, lse in shapes:
        what = f"H{heads} page {page}"
        config = latent_config(heads, page, 64, lse=lse)
        yield f"latent decode {what}", "latent decode", config, dtype
        narrow = "narrow latent decode"
        if heads <= 16:
            yield f"{narrow} {what}", narrow, latent_config(heads, page, 16, lse=lse), dtype
        if page == 64:  # Rows that were gathered from codes with one scale.
            rows, kind = (16, narrow) if heads <= 16 else (64, "latent decode")
            config = latent_config(heads, page, rows, lse=lse, scaled=True)
            yield f"{kind} scaled {what}", kind, config, dtype
        for rows in (16,) if heads <= 16 else (32, 64):
            kind = narrow if rows == 16 else "latent codes"
            config = latent_config(heads, page, rows, lse=lse, coded=True)
            yield f"{kind} of {rows} rows of codes {what}", kind, config, dtype


def reports(everything: bool) -> Iterator[dict[str, Any]]:
    from attnkit.backends.hopper.decode import decode_kernel
    from attnkit.backends.hopper.latent_codes import latent_codes_kernel
    from attnkit.backends.hopper.latent_decode import latent_decode_kernel
    from attnkit.backends.hopper.latent_narrow import latent_narrow_kernel
    from attnkit.backends.hopper.prefill import prefill_kernel

    kernels = {"prefill": prefill_kernel, "decode": decode_kernel, "decode16": decode_kernel}
    kernels |= {"prefill scaled": prefill_kernel, "prefill split": prefill_kernel}
    kernels |= {"decode of codes": decode_kernel, "decode16 beside": decode_kernel}
    kernels |= {"latent decode": latent_decode_kernel, "latent codes": latent_codes_kernel}
    kernels |= {"narrow latent decode": latent_narrow_kernel}
    for name, kernel, config, dtype in variants(everything):
        yield {"name": name, **compile_kernel(kernels[kernel], config, dtype)}


def complaints(report: dict[str, Any]) -> list[str]:
    """What must not be in a build."""
    bad = [f"assembler: {line}" for line in report["warnings"]]
    bad += [f"stale descriptor: {line}" for line in report["stale"]]
    bad += [f"unread load: {line}" for line in report["unread"]]
    bad += [f"a register that nothing sets: {name}" for name in report["unset"]]
    if report["shared"] > MAX_SHARED:
        bad.append(f"{report['shared']} bytes of shared memory, {MAX_SHARED} are there")
    for num, length in zip(report["spills_in_loops"], report["loop_instructions"], strict=True):
        # A scalar or two that live across a loop cost next to nothing; a vector would.
        if num > 0.02 * length:
            bad.append(f"{num} spill instructions in a loop of {length} with products")
    for what in ("loop_instructions", "products", "copies"):
        if not report[what]:
            bad.append(f"no {what}")
    return [f"{report['name']}: {line}" for line in bad]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--everything", action="store_true", help="all variants")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    _stand_in_packages()
    num_bad = 0
    for report in reports(options.everything):
        bad = complaints(report)
        num_bad += len(bad)
        if options.json:
            print(json.dumps(report), flush=True)
        else:
            loops = ",".join(map(str, report["loop_instructions"]))
            print(
                f"{report['name']:28s} smem {report['shared']:6d} spilled "
                f"{report['spilled_bytes']:4d} B, in loops {sum(report['spills_in_loops'])}, "
                f"products {report['products']}, tma {report['copies']}, loops {loops}",
                *bad,
                sep="\n  ",
                flush=True,
            )
    sys.exit(bool(num_bad))


if __name__ == "__main__":
    main()
