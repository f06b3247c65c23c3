"""Choosing who prefills for a layer over latents: by name, or the impl's own; every reason is told.

In: an impl, what the layer needs, and who was asked for. Out: a `PrefillSelection`, or an error that
lists all reasons. Nothing is built here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from attnkit.backends import MLA_PREFILL_BACKENDS
from attnkit.contract import DeviceCapability, MLAAttentionImpl, MLADimensions
from attnkit.errors import UnknownBackend, UnsupportedConfiguration
from attnkit.mla.prefill_backend import MLAPrefillBackend
from attnkit.selection import Decision, format_decisions

_OWN_COST, _OTHER_COST, _REFERENCE_COST = 1.0, 2.0, 1000.0


@dataclass(frozen=True, kw_only=True)
class PrefillSelection:
    """A chosen prefill backend and how it came to be chosen.

    Attributes:
        name: it goes by.
        backend: the class.
        asked: "auto", a name or a class's name.
        decisions: one per candidate.
    """

    name: str
    backend: type[MLAPrefillBackend]
    asked: str
    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        return "prefill " + format_decisions(self.asked, self.decisions)


def resolve_prefill(name: str) -> type[MLAPrefillBackend]:
    """The class a name of the table stands for, imported.

    Raises:
        UnknownBackend: nothing has this name.
    """
    if name not in MLA_PREFILL_BACKENDS:
        known = ", ".join(MLA_PREFILL_BACKENDS)
        raise UnknownBackend(
            f"no prefill backend is called {name!r}; use auto, {known}, or a class of your own"
        )
    module, _, attribute = MLA_PREFILL_BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def select_prefill(
    impl: MLAAttentionImpl,
    asked: str | type[MLAPrefillBackend],
    *,
    device_capability: DeviceCapability,
    dtype: torch.dtype,
    dimensions: MLADimensions,
) -> PrefillSelection | None:
    """Choose who prefills.

    Args:
        impl: whose prefills they are.
        asked: a name, a class, or "auto": the one that the impl was built with.
        device_capability: where it runs.
        dtype: of the layer.
        dimensions: of the layer.

    Returns:
        None if the impl attends by itself.

    Raises:
        UnknownBackend: no prefill backend has this name.
        UnsupportedConfiguration: the one asked for cannot serve, or the impl takes none.
    """
    if not isinstance(asked, str) and not (
        isinstance(asked, type) and issubclass(asked, MLAPrefillBackend)
    ):
        raise UnknownBackend(
            f"prefill_backend {asked!r} is not allowed; give auto, a subclass of MLAPrefillBackend, "
            f"or one of {', '.join(MLA_PREFILL_BACKENDS)}"
        )
    own = impl.prefill_backend
    if own is None:
        if asked == "auto":
            return None
        reason = f"{type(impl).__name__} prefills by itself"
        raise UnsupportedConfiguration(
            f"prefill backend {asked} cannot serve this layer: {reason}; leave prefill_backend out",
            (reason,),
        )

    def reasons_against(backend: type[MLAPrefillBackend]) -> tuple[str, ...]:
        return backend.validate_configuration(device_capability, dtype, dimensions)

    if asked != "auto":
        backend = resolve_prefill(asked) if isinstance(asked, str) else asked
        name = backend.get_name()
        if reasons := reasons_against(backend):
            raise UnsupportedConfiguration(
                f"prefill backend {name} cannot serve this layer: {'; '.join(reasons)}. Change the "
                "layer, or use prefill_backend='auto'",
                reasons,
            )
        chosen = Decision(name=name, cost=_cost(name, own), chosen=True)
        return PrefillSelection(name=name, backend=backend, asked=name, decisions=(chosen,))
    decisions = []
    for name in MLA_PREFILL_BACKENDS:
        reasons = reasons_against(resolve_prefill(name))
        cost = None if reasons else _cost(name, own)
        decisions.append(
            Decision(name=name, reasons=reasons, cost=cost, chosen=name == own.get_name())
        )
    return PrefillSelection(
        name=own.get_name(), backend=type(own), asked="auto", decisions=tuple(decisions)
    )


def _cost(name: str, own: MLAPrefillBackend) -> float:
    if name == own.get_name():
        return _OWN_COST
    return _REFERENCE_COST if name == "reference" else _OTHER_COST
