"""A mistake and the check that must catch it, and tables of them.

In: classes with one mistake each. Out: `Fault`, and `FaultTable`, which backends enter by a decorator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from attnkit.conformance.twin import TwinBackend, TwinImpl
from attnkit.contract import AttentionBackend

_Cls = TypeVar("_Cls", bound=type[TwinBackend] | type[TwinImpl])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A mistake.

    Attributes:
        backend: the twin with it.
        caught_by: name of the check that must fail.
    """

    backend: type[AttentionBackend]
    caught_by: str


class FaultTable(dict[str, Fault]):
    """Name -> fault.

    Args:
        twin: the backend without a mistake, which passes the same checks.
    """

    def __init__(self, twin: type[TwinBackend]) -> None:
        super().__init__()
        self.twin = twin

    def caught_by(self, check: str, **backend: Any) -> Callable[[_Cls], _Cls]:
        """Enter an impl with a mistake, or a backend.

        Args:
            check: that must fail.
            backend: attributes of the impl's backend that differ from the twin's.
        """

        def enter(cls: _Cls) -> _Cls:
            if issubclass(cls, TwinBackend):
                wrong: type[TwinBackend] = cls
            else:
                wrong = type(f"{cls.__name__}Backend", (self.twin,), {"impl_cls": cls, **backend})
            self[cls.__name__] = Fault(backend=wrong, caught_by=check)
            return cls

        return enter
