"""PrefixTree: one object for each prefix of whole blocks, so that equal prefixes are identical.

In: extra keys, and token ids block by block. Out: `Prefix` objects, the keys under which `BlockPool`
finds blocks again. Each is looked up by (the prefix before it, its block's token ids and extra keys),
which is the chained hash that paged caches use, but compared in full: no collision can serve another
prompt's pages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary


class Prefix:
    """All tokens up to the end of a block, and whatever else their keys and values depend on.

    Made by `PrefixTree` only; equal means identical. It keeps the prefixes before it alive.
    """

    __slots__ = ("__weakref__", "_parent")

    def __init__(self, parent: Prefix | None) -> None:
        self._parent = parent


class PrefixTree:
    """Every prefix that a request or a cached block still refers to."""

    def __init__(self) -> None:
        self._prefixes: WeakValueDictionary[tuple[Prefix | None, Hashable], Prefix] = (
            WeakValueDictionary()
        )

    def __len__(self) -> int:
        return len(self._prefixes)

    def root(self, extra_keys: tuple[Hashable, ...] = ()) -> Prefix:
        """The empty prefix under what else decides the contents: a salt, an adapter, an image."""
        return self._get(None, extra_keys)

    def extend(
        self, prefix: Prefix, token_ids: Sequence[int], extra_keys: tuple[Hashable, ...] = ()
    ) -> Prefix:
        """The prefix that goes on with one whole block of tokens, and what else it depends on."""
        return self._get(prefix, (tuple(token_ids), extra_keys))

    def _get(self, parent: Prefix | None, content: Hashable) -> Prefix:
        key = (parent, content)
        found = self._prefixes.get(key)
        if found is None:
            found = self._prefixes[key] = Prefix(parent)
        return found
