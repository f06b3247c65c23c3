"""Names: attributes of a backend's classes that nobody asks for: the contract spells them otherwise.

In: a backend. Out: nothing, or an error that has both spellings. To Python `suports_sink` is no error,
and the feature would be refused without a word that it was ever claimed.
"""

from __future__ import annotations

from difflib import get_close_matches

from attnkit.conformance.subject import LawBroken
from attnkit.contract import AttentionBackend

_LIKE = 0.9
"""Share of letters that two spellings of one name have in common at least."""
_SHORTEST = 8
"""Letters of a name that is looked at: short words are alike by chance."""


def check_names(backend: type[AttentionBackend]) -> None:
    """Look at the backend, its builder and its impl, as far as their classes are not attnkit's.

    Raises:
        LawBroken: an attribute is called almost as one of the contract.
    """
    for cls in (backend, backend.get_builder_cls(), backend.get_impl_cls()):
        bases = cls.__mro__
        known = {name for base in bases if _is_ours(base) for name in dir(base)}
        for base in bases:
            if _is_ours(base) or base is object:
                continue
            for name in sorted(set(vars(base)) - known):
                # A private name may be anything, but for those that the contract has.
                like = [k for k in known if k.startswith("_") or not name.startswith("_")]
                found = get_close_matches(name, like, n=1, cutoff=_LIKE)
                if found and len(name) >= _SHORTEST and not name.startswith("__"):
                    raise LawBroken(
                        f"{base.__name__} has {name}, which nobody asks for; the contract calls it "
                        f"{found[0]}"
                    )


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "attnkit"
