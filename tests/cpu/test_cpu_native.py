"""The native library is built once and kept, and when it cannot be, torch serves and says why, once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnkit.backends.cpu import native
from attnkit.backends.cpu.native import native_kernels, native_status
from attnkit.conformance.case import Case
from attnkit.conformance.checks import check_case
from attnkit.conformance.subject import Subject
from attnkit.errors import ConfigurationError

CASE = Case(name="cpu-native", query_lens=(1, 5), seq_lens=(33, 5), return_lse=True)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Each test decides anew, with a cache of its own."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(directory))
    for name in ("ATTNKIT_CPU_NATIVE", "CC"):
        monkeypatch.delenv(name, raising=False)
    native._decide.cache_clear()
    yield directory
    native._decide.cache_clear()


@pytest.fixture
def compiler() -> list[str]:
    """The C compiler; without one there is nothing to test."""
    try:
        return native._compiler()
    except native._Unavailable as absent:
        pytest.skip(str(absent))


def expect_torch_serves(because: str) -> None:
    """One warning with the cause, the same in the status, and right answers."""
    with pytest.warns(RuntimeWarning, match=because) as caught:
        assert native_kernels() is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_status().startswith("torch: ")
        check_case(Subject.of("cpu"), CASE)


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_library_is_built_once_and_kept(cache: Path, compiler: list[str]) -> None:
    assert native_kernels() is not None
    assert native_status().startswith(f"native: {cache}")
    (library,) = cache.glob("cpu/*")
    built = library.stat().st_mtime_ns
    check_case(Subject.of("cpu"), CASE)
    native._decide.cache_clear()
    assert native_kernels() is not None
    assert [p.stat().st_mtime_ns for p in cache.glob("cpu/*")] == [built]


def test_a_damaged_library_is_built_again(cache: Path, compiler: list[str]) -> None:
    path = native._library_path(compiler)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x7fELF, but no more than that")
    assert native_kernels() is not None
    check_case(Subject.of("cpu"), CASE)


@pytest.mark.parametrize(
    "how", ["no compiler", "one that is missing", "one that fails", "read-only"]
)
def test_what_another_compiler_built_serves_where_nothing_can_be_built(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: list[str], how: str
) -> None:
    assert native_kernels() is not None
    (library,) = cache.glob("cpu/*")
    (library.parent / f"{native._stem()}-0.so").write_bytes(b"damaged, and first to be tried")
    native._decide.cache_clear()
    if how == "no compiler":
        monkeypatch.setenv("PATH", "")
    elif how == "one that is missing":
        monkeypatch.setenv("CC", "no-such-compiler")
    else:
        fails = how == "one that fails"
        monkeypatch.setenv(
            "CC", script(tmp_path, "exit 3" if fails else f'exec {compiler[0]} "$@"')
        )
    if how == "read-only":  # Root may write anywhere, so this is not done by permissions.

        def refuse(**_: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(native.tempfile, "mkstemp", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_kernels() is not None
    assert native_status().startswith(f"native: {library}")
    check_case(Subject.of("cpu"), CASE)
    native._decide.cache_clear()
    monkeypatch.setattr(native, "_processor", lambda: "another")
    with pytest.warns(RuntimeWarning, match="several times slower"):
        assert native_kernels() is None


def test_two_processes_may_build_at_once(cache: Path, compiler: list[str]) -> None:
    program = "from attnkit.backends.cpu.native import native_status; print(native_status())"
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert out.startswith(f"native: {cache}")
    assert [p.suffix for p in cache.glob("cpu/*")] == [".so"]


def test_other_sources_flags_or_machines_are_other_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: list[str]
) -> None:
    paths = [native._library_path(compiler)]
    for source in native.SOURCES[0].parent.glob("*.[ch]"):
        shutil.copy(source, tmp_path)
    sources = tuple(tmp_path / source.name for source in native.SOURCES)
    monkeypatch.setattr(native, "SOURCES", sources)
    assert native._library_path(compiler) == paths[0]
    for source in sorted(tmp_path.glob("*.[ch]")):
        source.write_text(source.read_text() + "/* changed */")
        paths.append(native._library_path(compiler))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-g"))
    paths.append(native._library_path(compiler))
    monkeypatch.setattr(native, "_processor", lambda: "another")
    paths.append(native._library_path(compiler))
    paths.append(native._library_path([script(tmp_path, "exit 1")]))
    assert len(set(paths)) == len(paths)


def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    expect_torch_serves("no C compiler")


def test_a_named_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    expect_torch_serves(r"no C compiler no-such-compiler \(from CC\).* Set CC to one that is there")


def test_a_named_compiler_may_have_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: list[str]
) -> None:
    """As in CC="ccache gcc"; they make another library."""
    wrapper = script(tmp_path, 'exec "$@"')
    paths = []
    for arguments in ([compiler[0]], [compiler[0], "-m64"]):
        monkeypatch.setenv("CC", " ".join([wrapper, *arguments]))
        assert native._compiler() == [wrapper, *arguments]
        paths.append(native._library_path(native._compiler()))
    assert paths[0] != paths[1]


def test_more_threads_than_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNKIT_CPU_NATIVE", "0")
    monkeypatch.setattr(native, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    with pytest.warns(RuntimeWarning, match="64 threads, and this process may use 2 cores"):
        native_status()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native_status()


def test_a_compiler_that_fails_is_quoted(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", script(tmp_path, "echo 'no such flag' >&2; exit 3"))
    expect_torch_serves("could not compile its kernels .no such flag")
    assert not list(cache.glob("cpu/*"))


def test_a_compiler_that_writes_rubbish_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", script(tmp_path, "exit 0"))
    expect_torch_serves("cannot be loaded")


def test_a_compiler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "BUILD_SECONDS", 0.1)
    monkeypatch.setenv("CC", script(tmp_path, "exec sleep 5"))
    expect_torch_serves("could not be run")


@pytest.mark.parametrize("where", ["a file", "/proc/attnkit"])
def test_a_cache_that_cannot_be_written_leaves_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: list[str], where: str
) -> None:
    if where == "a file":
        where = str(tmp_path / "file")
        Path(where).touch()
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", where)
    expect_torch_serves("cannot be written")


def test_the_switch_is_silent_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNKIT_CPU_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_kernels() is None
    assert "ATTNKIT_CPU_NATIVE=0" in native_status()
    check_case(Subject.of("cpu"), CASE)
    native._decide.cache_clear()
    monkeypatch.setenv("ATTNKIT_CPU_NATIVE", "yes")
    with pytest.raises(ConfigurationError, match="ATTNKIT_CPU_NATIVE=yes"):
        native_status()


def test_no_second_openmp_runtime_is_loaded(compiler: list[str]) -> None:
    """Two runtimes' waiting threads take each other's cores."""

    def runtimes() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if "omp" in line.split()[-1].split("/")[-1]}

    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not list its loaded libraries")
    before = runtimes()
    assert native_kernels() is not None
    assert runtimes() == before
