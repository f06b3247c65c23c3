"""The native library: built from C on first use, kept, loaded; and what became of that.

In: the C compiler at hand and the user's cache directory. Out: `native_kernels()`, or None where the
torch path has to serve, and `native_status()`, one line that says which and why. The decision is
made once a process. Whatever goes wrong costs speed, never an answer: one warning names the cause.

The file's name holds two digests of all that could make it another file: of source, flags and
processor, and of the compiler. So a home directory shared between machines is safe, a library that
another compiler built serves where this one cannot be run or is not there, and nothing is ever rebuilt
in place: a build goes to a file of its own and is renamed, so that two processes may build at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from attnkit.backends.cpu.launch import NativeKernels
from attnkit.errors import ConfigurationError

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("attend.c", "coded.c", "linear.c", "write.c")
)
"""Beside the headers they include."""
COMPILERS = ("cc", "gcc", "clang")
"""Looked for in this order, after the environment's CC."""

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
"""Nothing that would let the compiler assume away inf or NaN, or reorder sums."""

BUILD_SECONDS = 180
"""A build takes 4 seconds of an idle core; a compiler that hangs must not hang the process."""


@dataclass(frozen=True)
class Native:
    """The decision: kernels, or None, and the sentence that explains it."""

    kernels: NativeKernels | None
    status: str


class _Unavailable(Exception):
    """Why there is no native library, and what to do about it; becomes the warning."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def native_kernels() -> NativeKernels | None:
    """The native library, built and loaded if need be; None: the torch path serves."""
    return _decide().kernels


def native_status() -> str:
    """Which path serves and why, for people: "native: ..." or "torch: ..."."""
    return _decide().status


def usable_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _warn_of_crowded_cores() -> None:
    num_threads, cores = torch.get_num_threads(), usable_cores()
    if num_threads > cores:
        warnings.warn(
            f"torch runs on {num_threads} threads, and this process may use {cores} cores: threads that "
            f"wait take them from those that work. Set OMP_NUM_THREADS={cores}, or call "
            f"torch.set_num_threads({cores})",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def _decide() -> Native:
    _warn_of_crowded_cores()
    switch = os.environ.get("ATTNKIT_CPU_NATIVE", "1")
    if switch not in ("0", "1"):
        raise ConfigurationError(
            f"ATTNKIT_CPU_NATIVE={switch} is not allowed; set 0 to run in torch alone, or 1"
        )
    if switch == "0":
        return Native(None, "torch: the native library is switched off (ATTNKIT_CPU_NATIVE=0)")
    try:
        path, kernels = _load()
    except _Unavailable as reason:
        warnings.warn(
            f"the cpu backend runs in torch, several times slower: {reason}. {reason.remedy}, or set "
            "ATTNKIT_CPU_NATIVE=0 to accept it",
            RuntimeWarning,
            stacklevel=2,
        )
        return Native(None, f"torch: {reason}")
    threads = "torch's OpenMP threads" if _parallel_address() else "one thread (no OpenMP found)"
    matrices = ", bfloat16 queries in the matrix unit (AMX)" if kernels.has_matrix_unit else ""
    return Native(kernels, f"native: {path} on {threads}{matrices}")


def _load() -> tuple[Path, NativeKernels]:
    """The library of this compiler, built where it is missing or damaged; if that cannot be, one that
    another compiler built of the same source for this processor."""
    try:
        path = _library_path(_compiler())
        if (kernels := _open(path)) is None:
            _build(path)
            kernels = NativeKernels(str(path), _parallel_address())
        return path, kernels
    except _Unavailable:
        for path in _built_before():
            if (kernels := _open(path)) is not None:
                return path, kernels
        raise
    except (OSError, AttributeError) as error:
        reason = f"the library built at {path} cannot be loaded ({error})"
        raise _Unavailable(reason, "Set CC to another C compiler") from error


def _open(path: Path) -> NativeKernels | None:
    """What is there; None: nothing, or it is damaged."""
    try:
        return NativeKernels(str(path), _parallel_address()) if path.exists() else None
    except (OSError, AttributeError):
        return None


def _build(path: Path) -> None:
    """Compile the sources to `path`, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise _Unavailable(
            f"the cache directory {path.parent} cannot be written ({error.strerror})",
            "Set ATTNKIT_CACHE_DIR to one that can",
        ) from error
    command = [*_compiler(), *_flags(), *map(str, SOURCES), "-o", name, "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
        os.replace(name, path)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or [f"exit status {error.returncode}"]
        reason = f"{command[0]} could not compile its kernels ({lines[0]})"
        raise _Unavailable(reason, "Set CC to a compiler that can") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"{command[0]} could not be run ({error})"
        raise _Unavailable(reason, "Set CC to a compiler that can") from error
    finally:
        Path(name).unlink(missing_ok=True)


def _library_path(compiler: list[str]) -> Path:
    """Where the library of this source, processor and compiler is kept."""
    binary = os.stat(compiler[0])
    version = f"{os.path.realpath(compiler[0])} {binary.st_size} {binary.st_mtime_ns}"
    digest = _digest([*(part.encode() for part in compiler[1:]), version.encode()])
    return _cache_dir() / "cpu" / f"{_stem()}-{digest}.so"


def _built_before() -> list[Path]:
    """Libraries of this source and processor, whatever compiler built them, in a fixed order."""
    return sorted((_cache_dir() / "cpu").glob(f"{_stem()}-*.so"))


def _stem() -> str:
    """What the names of all libraries of this source, these flags and this processor begin with."""
    sources = [source.read_bytes() for source in sorted(SOURCES[0].parent.glob("*.[ch]"))]
    return f"attend-{_digest([*sources, ' '.join(_flags()).encode(), _processor().encode()])}"


def _digest(facts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(facts)).hexdigest()[:12]


def _compiler() -> list[str]:
    """Absolute path of the C compiler to use, and the arguments that CC may have (`ccache gcc`)."""
    given = os.environ.get("CC")
    for command in [shlex.split(given)] if given and given.strip() else [[n] for n in COMPILERS]:
        if (path := shutil.which(command[0])) is not None:
            return [path, *command[1:]]
    if given and given.strip():
        raise _Unavailable(
            f"there is no C compiler {given} (from CC)", "Set CC to one that is there"
        )
    wanted = ", ".join(COMPILERS)
    raise _Unavailable(f"there is no C compiler (none of {wanted} is in PATH)", "Install one")


def _flags() -> tuple[str, ...]:
    """Flags for this machine: clang on ARM knows -mcpu=native only."""
    arm = platform.machine() in ("aarch64", "arm64")
    return (*FLAGS, "-mcpu=native" if arm else "-march=native")


def _processor() -> str:
    """What -march=native depends on: the processor's model and instruction sets."""
    lines: list[str] = [platform.machine()]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    for key in ("model name", "flags", "CPU part", "Features"):
        lines += [line for line in text.splitlines() if line.startswith(key)][:1]
    return "\n".join(lines)


def _cache_dir() -> Path:
    given = os.environ.get("ATTNKIT_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "attnkit"


def _parallel_address() -> int | None:
    """GOMP_parallel of the OpenMP runtime that torch has loaded for everyone; None: none is.

    libgomp and LLVM's libomp both have it. Linking one of our own instead could load a second
    runtime, whose waiting threads would take the cores from torch's.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, TypeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
