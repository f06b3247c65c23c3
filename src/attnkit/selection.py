"""Choose a backend and say why: pure, and possible for a device that is not here.

In: an `AttentionRequest` (what a layer needs) and "auto" or a name. Out: a `Selection`: the class,
and a decision with every reason for each candidate that was looked at. By name a backend runs or
raises with all reasons; nothing falls back in silence.

Names: the table of attnkit, `register`ed ones, entry points of the group `attnkit.backends`,
`path/to/file.py:Class` and `package.module:Class`; two of these with a comma, for prefills and decodes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import torch

from attnkit.arguments import check_heads
from attnkit.backends import BACKENDS, MLA_BACKENDS
from attnkit.backends.wrappers import hybrid
from attnkit.contract import (
    AttentionBackend,
    AttentionType,
    DeviceCapability,
    MLADimensions,
    get_kv_quant_mode,
)
from attnkit.errors import (
    BackendUnavailable,
    ConfigurationError,
    UnknownBackend,
    UnsupportedConfiguration,
)

ENTRY_POINT_GROUP = "attnkit.backends"
ENV_BACKEND = "ATTNKIT_BACKEND"

_REGISTERED: dict[str, type[AttentionBackend]] = {}


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """What a layer needs of a backend: the questions of `validate_configuration`, and our own.

    Attributes:
        head_size_v: of values; None: as keys.
        kv_cache_dtype: None: any will do.
        block_size: the user's own; None: any will do.
        use_mla: the layer keeps latents; `head_size` is then that of a row of the cache.
        mla: its sizes; None: any will do.
        device_capability: where it is to run; the device need not be here.
        return_lse: the log-sum-exp is wanted too.

    Raises:
        ConfigurationError: a value that no layer can have, whatever the backend, or two that mean
            nothing together.
    """

    head_size: int
    dtype: torch.dtype
    num_heads: int = 1
    num_kv_heads: int = 1
    head_size_v: int | None = None
    kv_cache_dtype: str | None = "auto"
    block_size: int | None = None
    use_mla: bool = False
    mla: MLADimensions | None = None
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    device_capability: DeviceCapability = field(default_factory=DeviceCapability.cpu)
    attn_type: str = AttentionType.DECODER
    has_sliding_window: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False
    use_pcp: bool = False
    use_adaptive_verification: bool = False
    use_dcp: bool = False
    use_rswa: bool = False
    use_tree_mask: bool = False
    use_alibi: bool = False
    use_alibi_sqrt: bool = False
    has_logits_soft_cap: bool = False
    return_lse: bool = False

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v)
        if self.kv_cache_dtype is not None:
            get_kv_quant_mode(self.kv_cache_dtype)
        names = [kind.value for kind in AttentionType]
        if self.attn_type not in names:
            raise ConfigurationError(
                f"attn_type {self.attn_type!r} is not known; use one of {', '.join(names)}"
            )
        self._check_together()

    def _check_together(self) -> None:
        """A draft's place in the step is not its distance from what it follows, so masks and biases that
        count distances do not go with trees; ranges and prefixes are of a decoder's causal text."""
        other_type = self.attn_type != AttentionType.DECODER
        layers = f"attn_type {self.attn_type}"
        beside_tree = {
            "sliding_window": self.has_sliding_window,
            "use_rswa": self.use_rswa,
            "alibi_slopes": self.use_alibi,
            "use_mm_prefix": self.use_mm_prefix,
            layers: other_type,
        }
        if self.use_tree_mask and any(beside_tree.values()):
            name = next(name for name, asked in beside_tree.items() if asked)
            raise ConfigurationError(
                f"use_tree_mask and {name} exclude each other, since tokens of a tree do not stand at "
                "their distances; ask for one"
            )
        for name, asked in (("use_mm_prefix", self.use_mm_prefix), ("use_rswa", self.use_rswa)):
            if asked and other_type:
                raise ConfigurationError(
                    f"{name} is for decoder layers, and this is {layers}; leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What became of one candidate.

    Attributes:
        name: it goes by.
        reasons: why it cannot serve; empty: it can.
        cost: its relative cost, where it can serve.
        chosen: it is the winner.
        runtime: what of this machine it runs on, where the winner has something to tell.
    """

    name: str
    reasons: tuple[str, ...] = ()
    cost: float | None = None
    chosen: bool = False
    runtime: str | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A chosen backend and how it came to be chosen.

    Attributes:
        asked: "auto", a name, or where the name came from.
        decisions: one per candidate, in the order they were looked at.
    """

    name: str
    backend: type[AttentionBackend]
    asked: str
    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        return format_decisions(self.asked, self.decisions)


def format_decisions(asked: str, decisions: tuple[Decision, ...]) -> str:
    """One line per candidate: chosen, possible at a cost, or refused with every reason."""
    lines = [f"backend asked for: {asked}"]
    for d in decisions:
        if d.chosen:
            runtime = "" if d.runtime is None else f"; {d.runtime}"
            lines.append(f"  {d.name}: chosen (cost {d.cost:g}{runtime})")
        elif not d.reasons:
            lines.append(f"  {d.name}: possible (cost {d.cost:g})")
        else:
            lines.append(f"  {d.name}: refused: {'; '.join(d.reasons)}")
    return "\n".join(lines)


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
    _REGISTERED[name] = _check_class(name, backend)


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
    known = ", ".join(backend_names())
    raise UnknownBackend(
        f"no backend is called {name!r}; use auto, {known}, path/to/file.py:Class, "
        "package.module:Class, or two of them with a comma: for prefills, for decodes"
    )


def reasons_against(
    backend: type[AttentionBackend], request: AttentionRequest, *, here: bool = True
) -> tuple[str, ...]:
    """Every reason why `backend` cannot serve `request`; empty if it can.

    Args:
        here: it must also be able to run on this machine. False asks about the device named in the
            request only.
    """
    reasons: list[str] = []
    if here and (absent := backend.is_available()) is not None:
        reasons.append(absent)
    reasons += backend.validate_configuration(
        head_size=request.head_size,
        dtype=request.dtype,
        kv_cache_dtype=request.kv_cache_dtype,
        block_size=request.block_size,
        use_mla=request.use_mla,
        has_sink=request.has_sink,
        use_sparse=request.use_sparse,
        use_mm_prefix=request.use_mm_prefix,
        use_per_head_quant_scales=request.use_per_head_quant_scales,
        device_capability=request.device_capability,
        attn_type=request.attn_type,
        has_sliding_window=request.has_sliding_window,
        use_non_causal=request.use_non_causal,
        use_batch_invariant=request.use_batch_invariant,
        use_kv_connector=request.use_kv_connector,
        use_pcp=request.use_pcp,
        use_adaptive_verification=request.use_adaptive_verification,
        use_dcp=request.use_dcp,
        use_rswa=request.use_rswa,
    )
    head_size_v = request.head_size if request.head_size_v is None else request.head_size_v
    ours = (
        (request.use_alibi, backend.supports_alibi(), "ALiBi"),
        (request.use_alibi_sqrt, backend.supports_alibi_sqrt(), "square-root ALiBi"),
        (request.has_logits_soft_cap, backend.supports_logits_soft_cap(), "logits soft cap"),
        (
            head_size_v != request.head_size and not request.use_mla,
            backend.supports_head_size_v(request.head_size, head_size_v),
            f"value head size {head_size_v} beside key head size {request.head_size}",
        ),
        (request.return_lse, backend.supports_lse(), "log-sum-exp output"),
        (request.use_tree_mask, backend.supports_tree_mask(), "tree mask"),
    )
    reasons += [
        f"{feature} is asked for, which this backend does not do"
        for asked, has, feature in ours
        if asked and not has
    ]
    if request.mla is not None and backend.is_mla():
        sizes = backend.supports_mla_dimensions(request.mla, request.kv_cache_dtype)
        reasons += [] if sizes is None else [sizes]
    return tuple(reasons)


def asked_for(
    backend: str | type[AttentionBackend], *, environ: Mapping[str, str] = os.environ
) -> tuple[str | type[AttentionBackend], str]:
    """What is asked for where a user gave `backend`: "auto", a name or a class; and how to call that.

    Raises:
        UnknownBackend: it is neither a name nor a backend class.
    """
    if not isinstance(backend, str):
        name = getattr(backend, "__name__", type(backend).__name__)
        return backend, _check_class(name, backend).get_name()
    name, source = backend, ""
    if name == "auto" and environ.get(ENV_BACKEND, "") not in ("", "auto"):
        name, source = environ[ENV_BACKEND], f" (from {ENV_BACKEND})"
    if "," in name:
        name = ",".join(part.strip() for part in name.split(","))
    return name, name + source


def find_named(
    backend: str | type[AttentionBackend],
    *,
    here: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> type[AttentionBackend] | None:
    """The class that is asked for by itself or by a name; None: the choice is automatic.

    Args:
        backend, here, environ: as in `select`.

    Raises:
        UnknownBackend: no backend has this name.
        BackendUnavailable: it cannot run here.
    """
    name, asked = asked_for(backend, environ=environ)
    if name == "auto":
        return None
    try:
        cls = resolve(name) if isinstance(name, str) else name
    except BackendUnavailable as absent:
        raise _cannot_run(asked, str(absent)) from absent
    if here and (reason := cls.is_available()) is not None:
        raise _cannot_run(asked, reason)
    return cls


def decide(
    request: AttentionRequest,
    backend: str = "auto",
    *,
    here: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Decision, ...]:
    """What would become of each candidate: the decision record without the choice being made.

    Args:
        backend: a name looks at that one alone; "auto" at the one that ATTNKIT_BACKEND names, or at
            every row of the table for such layers, of which the one of lowest cost is chosen, the
            table's order deciding between equals.
        here, environ: as in `select`.

    Raises:
        UnknownBackend: no backend has this name.
    """
    decisions: list[Decision] = []
    table = MLA_BACKENDS if request.use_mla else BACKENDS
    asked, _ = asked_for(backend, environ=environ)
    assert isinstance(asked, str)
    for name in table if asked == "auto" else (asked,):
        try:
            cls = resolve(name)
        except BackendUnavailable as absent:
            decisions.append(Decision(name=name, reasons=(str(absent),)))
            continue
        reasons = reasons_against(cls, request, here=here)
        cost = None if reasons else cls.estimate_cost(request)
        decisions.append(Decision(name=name, reasons=reasons, cost=cost))
    able = [(d.cost, i) for i, d in enumerate(decisions) if d.cost is not None]
    if able:
        winner = min(able)[1]
        runtime = resolve(decisions[winner].name).describe_runtime() if here else None
        decisions[winner] = replace(decisions[winner], chosen=True, runtime=runtime)
    return tuple(decisions)


def select(
    request: AttentionRequest,
    backend: str | type[AttentionBackend] = "auto",
    *,
    here: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Selection:
    """Choose a backend.

    Args:
        request: what the layer needs.
        backend: a class, a name, or "auto": then the environment variable ATTNKIT_BACKEND names
            one, or `decide` does. Registered and entry-point backends are chosen by name only.
        here: as in `reasons_against`.
        environ: where ATTNKIT_BACKEND is looked up.

    Raises:
        UnknownBackend: no backend has this name.
        BackendUnavailable: the named one cannot run here.
        UnsupportedConfiguration: the named one, or every candidate, cannot serve; with all reasons.
    """
    name, asked = asked_for(backend, environ=environ)
    cls = find_named(backend, here=here, environ=environ)
    if cls is not None:
        return _by_name(name if isinstance(name, str) else asked, cls, asked, request, here)
    decisions = decide(request, here=here, environ={})
    for decision in decisions:
        if decision.chosen:
            cls = resolve(decision.name)
            return Selection(name=decision.name, backend=cls, asked=asked, decisions=decisions)
    raise UnsupportedConfiguration(
        "no backend can serve this layer.\n" + format_decisions(asked, decisions),
        tuple(reason for d in decisions for reason in d.reasons),
    )


Choose: TypeAlias = Callable[[AttentionRequest, str | type[AttentionBackend]], Selection]
"""`select`, or `functools.cache` around it for layers that ask alike, as those of a model do."""


def _by_name(
    name: str, cls: type[AttentionBackend], asked: str, request: AttentionRequest, here: bool
) -> Selection:
    reasons = reasons_against(cls, request, here=here)
    if reasons:
        raise UnsupportedConfiguration(
            f"backend {asked} cannot serve this layer: {'; '.join(reasons)}. Change the layer, or "
            "use backend='auto'",
            reasons,
        )
    decision = Decision(
        name=name,
        cost=cls.estimate_cost(request),
        chosen=True,
        runtime=cls.describe_runtime() if here else None,
    )
    return Selection(name=name, backend=cls, asked=asked, decisions=(decision,))


def _cannot_run(asked: str, absent: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"backend {asked} cannot run on this machine: {absent}; install or provide that, or use "
        "backend='auto'"
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
            raise UnknownBackend(
                f"backend {name!r}: there is no module {absent!r}; check the path"
            ) from missing
        package = absent.partition(".")[0]
        if package != absent and importlib.util.find_spec(package) is not None:
            raise  # A part of what is installed is missing: broken, which is not the same as absent.
        raise BackendUnavailable(f"{absent} is not installed") from missing
    found = getattr(module, class_name, None)
    if found is None:
        raise UnknownBackend(f"backend {name!r}: {where} has no class {class_name!r}")
    return _check_class(name, found)


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


def _check_class(name: str, found: object) -> type[AttentionBackend]:
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        raise UnknownBackend(
            f"backend {name!r} is {found!r}, not a subclass of attnkit.contract.AttentionBackend; give "
            "one, or a name"
        )
    return found
