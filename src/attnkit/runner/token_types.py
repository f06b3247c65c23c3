"""Token types: which of a prompt's tokens see each other in both directions (PrefixLMs).

In: the masks that a model makes for prompts with `token_type_ids`, by the functions that define them.
Out: `TokenTypes`, which turns the types of a prompt into ranges of positions. PaliGemma marks the prefix
of a prompt with 0, which is one range; Gemma 3 marks image tokens with 1, whose runs are a range each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from attnkit.errors import RequestError

MaskFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTypes:
    """What a model makes of `token_type_ids`: 0 or 1 for each token of a prompt.

    Attributes:
        bidirectional: the type whose tokens see those of their range, also later ones.
        in_one_range: all of them are one range; else each run of them is one.
    """

    bidirectional: int
    in_one_range: bool

    def ranges(self, types: Sequence[int]) -> list[tuple[int, int]]:
        """(first, last) positions of each range of a prompt with such types, both inside.

        Raises:
            RequestError: a type is neither 0 nor 1, or what must be one range is several.
        """
        for position, kind in enumerate(types):
            if kind not in (0, 1):
                raise RequestError(
                    f"token_type_ids has {kind!r} at position {position}; give 0 or 1 for each token"
                )
        ranges, first = [], 0
        for kind, run in groupby(types):
            end = first + len(list(run))
            if kind == self.bidirectional:
                ranges.append((first, end - 1))
            first = end
        if self.in_one_range and len(ranges) > 1:
            raise RequestError(
                f"token_type_ids is {self.bidirectional} at positions {ranges[0][0]} to {ranges[0][1]} "
                f"and again at {ranges[1][0]}; this model's prefix is one piece: give the other type "
                "behind it"
            )
        return ranges


def read_token_types(
    num_tokens: int,
    device: torch.device,
    masks_of: Callable[[torch.Tensor | None], Sequence[MaskFunction | None]],
) -> TokenTypes | None:
    """Try both types in two runs with a token between them.

    Args:
        num_tokens: of the prompts tried, at least 6.
        device: where the functions' own tensors are.
        masks_of: given int64 (num_tokens,) types or None, each layer's mask as the function
            (batch, head, query, key) -> visible; None for a mask without one.

    Returns:
        None: types change no mask, or in a way that is none of the two known.
    """
    position = torch.arange(num_tokens, device=device)
    plain = _visible(position, masks_of(None))
    if plain is None:
        return None
    for kind in (0, 1):
        types = torch.where(position % 3 == 2, 1 - kind, kind)
        given = _visible(position, masks_of(types))
        if given is None or len(given) != len(plain):
            return None
        marked = (types == kind)[:, None] & (types == kind)
        same_run = marked & (position[:, None] // 3 == position // 3)
        for in_one_range, seen in ((False, same_run), (True, marked)):
            if all(torch.equal(g, p | seen) for g, p in zip(given, plain, strict=True)):
                return TokenTypes(bidirectional=kind, in_one_range=in_one_range)
    return None


def _visible(
    position: torch.Tensor, masks: Sequence[MaskFunction | None]
) -> list[torch.Tensor] | None:
    """bool (T, T) of each mask: which keys the query at a position sees. None: one has no function."""
    zero, num_tokens = torch.zeros_like(position[0]), len(position)
    result = []
    for mask in masks:
        if mask is None:
            return None
        result.append(mask(zero, zero, position[:, None], position).expand(num_tokens, num_tokens))
    return result
