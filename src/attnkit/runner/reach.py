"""What a mask of transformers leaves visible, read from the function that defines it.

In: a mask function and how long sequences get. Out: `Reach`, or a ModelError for a mask of another kind.
The function may be asked for any positions, so no mask is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnkit.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a causal mask, or an encoder's, leaves visible; at most one of the two is given.

    Attributes:
        window: keys a query sees, itself included; in an encoder those before it, itself included, and
            as many after it.
        chunk_size: it sees the keys of its own chunk of positions (position // chunk_size) up to itself.
    """

    window: int | None = None
    chunk_size: int | None = None


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of `length` queries and keys, by the function that defines it.

    Attributes:
        where: whose it is, for errors.
        device: where the function's own tensors are.
    """

    where: str
    function: Callable[..., torch.Tensor]
    length: int
    device: torch.device

    def seen_by(self, query: int) -> torch.Tensor:
        """bool (length,): the keys that the query at a position sees."""
        return self._ask(torch.tensor(query), torch.arange(self.length))

    def num_queries_of_first_key(self) -> int:
        """How many queries see the key at position 0."""
        return int(self._ask(torch.arange(self.length), torch.tensor(0)).sum())

    def _ask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.long, device=self.device)
        try:
            visible = self.function(zero, zero, queries.to(self.device), keys.to(self.device))
        except (IndexError, RuntimeError) as error:
            raise ModelError(
                f"{self.where} has a mask that depends on more than positions ({error}); attnkit's "
                "runner does not support it: use another model"
            ) from error
        return visible.expand(self.length).cpu()


def reach_of_open_mask(mask: Mask) -> Reach:
    """For an encoder: a window of W where a query sees keys at a distance below W on both sides.

    Raises:
        ModelError: it is neither open nor such a window.
    """
    length = mask.length
    seen = {q: mask.seen_by(q) for q in (0, length // 2, length - 1)}
    width = int(seen[0].sum())
    keys = torch.arange(length)
    for query, visible in seen.items():
        if not bool((visible == ((keys - query).abs() < width)).all()):
            raise ModelError(
                f"{mask.where} has a mask that is neither open nor a window of one width on both sides "
                f"(the query at position {query} sees keys {_ranges(visible)}); attnkit does not "
                "support it: use another model"
            )
    return Reach() if width == length else Reach(window=width)


def reach_of_causal_mask(mask: Mask) -> Reach:
    """The first key is seen by all, by as many queries as a window is wide, or by those of its chunk;
    which of these it is, queries around every power of two and every edge tell.

    Raises:
        ModelError: it is none of these.
    """
    length, width = mask.length, mask.num_queries_of_first_key()
    edges = {length - 1, *(1 << n for n in range(length.bit_length())), width, 2 * width}
    queries = sorted(q for e in edges for q in (e - 1, e, e + 1) if 0 <= q < length)
    keys = torch.arange(length)
    is_window, is_chunked = width > 0, width > 0
    for query in queries:
        visible, past = mask.seen_by(query), keys <= query
        is_window = is_window and torch.equal(visible, past & (keys > query - width))
        is_chunked = is_chunked and torch.equal(visible, past & (keys >= query // width * width))
        if not is_window and not is_chunked:
            raise ModelError(
                f"{mask.where} has a mask that is neither causal nor a causal sliding window nor chunks "
                f"of one size (the query at position {query} sees keys {_ranges(visible)}); attnkit's "
                "runner does not support it: use another model"
            )
    if is_chunked and not is_window:
        return Reach(chunk_size=width)
    return Reach() if width == length else Reach(window=width)


def _ranges(visible: torch.Tensor) -> str:
    seen = visible.nonzero().flatten().tolist()
    return f"{seen[0]}..{seen[-1]} ({len(seen)} of them)" if seen else "none"
