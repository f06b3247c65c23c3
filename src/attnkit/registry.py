"""Names of backends, and the classes they stand for.

In: a name: of the table of attnkit, of a `register`ed backend, of an entry point of the group
`attnkit.backends`, `path/to/file.py:Class` or `package.module:Class`; two of these with a comma, for
prefills and decodes. Out: the class, imported when it is asked for.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from attnkit.backends import BACKENDS, MLA_BACKENDS
from attnkit.backends.wrappers import hybrid
from attnkit.contract import AttentionBackend
from attnkit.errors import BackendUnavailable, ConfigurationError, UnknownBackend

ENTRY_POINT_GROUP = "attnkit.backends"

_REGISTERED: dict[str, type[AttentionBackend]] = {}


def register(name: str, backend: type[AttentionBackend]) -> None:
    """Make a backend choosable by name in this process; registering a name again replaces it.

    Raises:
        ConfigurationError: `name` is "auto" or in the table; or empty, or has a comma, colon or space,
            which other forms of a name have.
        UnknownBackend: `backend` is not a subclass of `AttentionBackend`.
    """
    if not isinstance(name, str) or not name or any(c in ",:" or c.isspace() for c in name):
        raise ConfigurationError(
            f"{name!r} cannot name a backend; give a string without commas, colons and spaces"
        )
    if name in _shipped() or name == "auto":
        raise ConfigurationError(
            f"{name!r} is not free: attnkit itself uses {', '.join(_shipped())} and auto; register "
            "under another name"
        )
    _REGISTERED[name] = check_class(name, backend)


def backend_names() -> dict[str, str]:
    """Every name that can be chosen -> where it comes from. Nothing is imported."""
    names = dict.fromkeys(_shipped(), "attnkit")
    names.update({p.name: f"entry point {p.value}" for p in _entry_points().values()})
    names.update(dict.fromkeys(_REGISTERED, "registered"))
    return names


def resolve(name: str) -> type[AttentionBackend]:
    """The class a name stands for, imported.

    Raises:
        UnknownBackend: nothing has this name.
        BackendUnavailable: a library it needs is not installed.
        ConfigurationError: two names with a comma whose backends cannot share a cache.
        Exception: whatever a broken module raises at import, unchanged.
    """
    if name in _shipped():
        return _load(name, _shipped()[name])
    if name in _REGISTERED:
        return _REGISTERED[name]
    points = _entry_points()
    if name in points:
        return _load(name, f"{points[name].module}:{points[name].attr}")
    if "," in name:
        parts = [part.strip() for part in name.split(",")]
        if len(parts) != 2 or not all(parts):
            raise UnknownBackend(
                f"backend {name!r} is no pair; give two names with a comma: for prefills, for decodes"
            )
        return hybrid(*map(resolve, parts))
    if ":" in name:
        return _load(name, name)
    if name.endswith(".py"):
        raise UnknownBackend(f"backend {name!r} names a file and no class in it; give {name}:Class")
    known = ", ".join(backend_names())
    raise UnknownBackend(
        f"no backend is called {name!r}; there are {known}, path/to/file.py:Class, "
        "package.module:Class, or two of them with a comma: for prefills, for decodes"
    )


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {p.name: p for p in points if p.name not in _shipped()}


def _shipped() -> dict[str, str]:
    """Every row of the tables."""
    return {**BACKENDS, **MLA_BACKENDS}


def _load(name: str, path: str) -> type[AttentionBackend]:
    where, _, class_name = path.rpartition(":")
    is_file = where.endswith(".py")
    if not is_file and not all(part.isidentifier() for part in where.split(".")):
        raise UnknownBackend(f"backend {name!r}: {where!r} is neither a module nor a .py file")
    try:
        module = _load_file(where) if is_file else importlib.import_module(where)
    except ModuleNotFoundError as missing:
        absent = missing.name or ""
        if not is_file and f"{where}.".startswith(f"{absent}."):
            file = Path(f"{where.replace('.', '/')}.py")
            instead = f"give ./{file}:{class_name}" if file.is_file() else "check the path"
            raise UnknownBackend(
                f"backend {name!r}: there is no module {absent!r} that Python finds; {instead}"
            ) from missing
        package = absent.partition(".")[0]
        if package != absent and importlib.util.find_spec(package) is not None:
            raise  # A part of what is installed is missing: broken, which is not the same as absent.
        raise BackendUnavailable(f"{absent} is not installed") from missing
    found = getattr(module, class_name, None)
    if found is None:
        raise UnknownBackend(f"backend {name!r}: {where} has no class {class_name!r}")
    return check_class(name, found)


def _load_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UnknownBackend(f"there is no file {path}; give a path to a Python file, then :Class")
    # Named after its path, so that two files of one name do not meet in sys.modules.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_class(name: str, found: object) -> type[AttentionBackend]:
    """`found`, which goes by `name`.

    Raises:
        UnknownBackend: it is no backend class, or one that cannot be asked what the contract asks.
    """
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        raise UnknownBackend(
            f"backend {name!r} is {found!r}, not a subclass of attnkit.contract.AttentionBackend; give "
            "one, or a name"
        )
    if (fault := _form_fault(found)) is not None:
        raise UnknownBackend(f"backend {name!r} cannot be asked: {fault}")
    return found


@functools.lru_cache(maxsize=64)  # Layers that are given a class ask again.
def _form_fault(backend: type[AttentionBackend]) -> str | None:
    """What the contract asks of the class, and this one answers for an object or not at all; None: it
    answers everything."""
    for name, ours in vars(AttentionBackend).items():
        if not isinstance(ours, classmethod | staticmethod):
            continue
        kind, asked = type(ours).__name__, inspect.signature(getattr(AttentionBackend, name))
        theirs = getattr(backend, name)
        if not callable(theirs):
            return f"its {name} is {theirs!r}, and the contract calls it; make it a {kind}"
        needed = [
            p
            for p in inspect.signature(theirs).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(needed) > len(asked.parameters):
            return (
                f"its {name} wants {', '.join(p.name for p in needed)}, and the contract gives it "
                f"({', '.join(asked.parameters)}), on the class; make it a {kind}"
            )
    for name in ("supported_dtypes", "supported_kv_cache_dtypes"):
        given = getattr(backend, name)
        if isinstance(given, str) or not isinstance(given, Collection):
            return f"its {name} is {given!r}; make it a list"
    return None
