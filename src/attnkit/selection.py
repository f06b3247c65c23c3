"""Choose a backend and say why: pure, and possible for a device that is not here.

In: an `AttentionRequest` (what a layer needs) and "auto" or a name. Out: a `Selection`: the class,
and a decision with every reason for each candidate that was looked at. By name a backend runs or
raises with all reasons; nothing falls back in silence. What a name stands for: `registry`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeAlias

import torch

from attnkit.arguments import check_count, check_dtype, check_flags, check_heads, check_kind
from attnkit.backends import BACKENDS, MLA_BACKENDS
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
from attnkit.registry import backend_names, check_class, register, resolve

ENV_BACKEND = "ATTNKIT_BACKEND"
_FROM_ENV = f" (from {ENV_BACKEND})"

__all__ = [
    "AttentionRequest",
    "Choose",
    "Decision",
    "Selection",
    "asked_for",
    "backend_names",
    "decide",
    "find_named",
    "format_decisions",
    "reasons_against",
    "register",
    "resolve",
    "select",
]


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
        check_dtype(self.dtype)
        check_count("block_size", self.block_size, optional=True)
        check_kind(
            "device_capability",
            self.device_capability,
            DeviceCapability,
            "a DeviceCapability, DeviceCapability.of('cpu') say",
        )
        check_flags({f.name: getattr(self, f.name) for f in fields(self) if f.default is False})
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


def reasons_against(
    backend: type[AttentionBackend], request: AttentionRequest, *, here: bool = True
) -> tuple[str, ...]:
    """Every reason why `backend` cannot serve `request`; empty if it can.

    Args:
        here: it must also be able to run on this machine. False asks about the device named in the
            request only.
    """
    reasons: list[str] = []
    if here and (absent := backend.unavailable_reason()) is not None:
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
        return backend, check_class(name, backend).get_name()
    name, source = backend, ""
    if name == "auto" and environ.get(ENV_BACKEND, "") not in ("", "auto"):
        name, source = environ[ENV_BACKEND], _FROM_ENV
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
        cls = _found(name, asked) if isinstance(name, str) else name
    except BackendUnavailable as absent:
        raise _cannot_run(asked, str(absent)) from absent
    if here and (reason := cls.unavailable_reason()) is not None:
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
        ConfigurationError: `request` is none.
    """
    _check_request(request)
    decisions: list[Decision] = []
    table = MLA_BACKENDS if request.use_mla else BACKENDS
    asked, spoken = asked_for(backend, environ=environ)
    assert isinstance(asked, str)
    for name in table if asked == "auto" else (asked,):
        try:
            cls = _found(name, spoken)
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
        ConfigurationError: `request` is none.
    """
    _check_request(request)
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


def _check_request(request: object) -> None:
    check_kind(
        "request", request, AttentionRequest, "an AttentionRequest(head_size=..., dtype=...)"
    )


def _by_name(
    name: str, cls: type[AttentionBackend], asked: str, request: AttentionRequest, here: bool
) -> Selection:
    reasons = reasons_against(cls, request, here=here)
    if reasons:
        raise UnsupportedConfiguration(
            f"backend {asked} cannot serve this layer: {'; '.join(reasons)}. Change the layer, or "
            f"{_instead(asked)}",
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
        f"backend {asked} cannot run on this machine: {absent}; install or provide that, or "
        f"{_instead(asked)}"
    )


def _found(name: str, asked: str) -> type[AttentionBackend]:
    """`resolve`, where "auto" would have been an answer too."""
    try:
        return resolve(name)
    except UnknownBackend as unknown:
        raise UnknownBackend(f"{unknown}. Or {_instead(asked)}") from unknown


def _instead(asked: str) -> str:
    """What else a user can do who asked for a backend by name."""
    return f"unset {ENV_BACKEND}" if asked.endswith(_FROM_ENV) else "use backend='auto'"
