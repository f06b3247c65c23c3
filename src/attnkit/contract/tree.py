"""Tree masks: which of a step's own tokens each of them sees, where drafts branch.

In: per request, each new token's parent among the request's new tokens. Out: one 64-bit word per token,
bit j for the j-th of them, which kernels read. A tree has at most 64 tokens; words of 0 say that a
request is no tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnkit.errors import BatchError

MAX_TREE_TOKENS = 64


def tree_words(parents: Sequence[int]) -> npt.NDArray[np.int64]:
    """Words of one request's tokens: each sees itself and its ancestors.

    Args:
        parents: per token, which earlier token of the step it follows; -1: none, it follows the context.

    Raises:
        BatchError: there are more than 64 tokens, or a parent does not stand before its child.
    """
    if len(parents) > MAX_TREE_TOKENS:
        raise BatchError(
            f"a tree of {len(parents)} tokens was given; give at most {MAX_TREE_TOKENS}"
        )
    words: list[int] = []
    for token, parent in enumerate(parents):
        if not -1 <= parent < token:
            raise BatchError(
                f"token {token} of a tree has parent {parent}; give an earlier token of the step, from "
                "0, or -1 for none"
            )
        words.append((1 << token) | (words[parent] if parent >= 0 else 0))
    return np.array(words, dtype=np.uint64).view(np.int64)


def check_tree_words(
    words: npt.NDArray[np.int64], query_start_loc: npt.NDArray[np.integer]
) -> None:
    """Refuse words that are no tree.

    Args:
        words: (T,), at least as many as there are tokens.
        query_start_loc: (R + 1,).

    Raises:
        BatchError: a request has words for some of its tokens only, more than 64 tokens with words, a
            token that does not see itself or one that sees a later token.
    """
    for row in range(len(query_start_loc) - 1):
        own = words[query_start_loc[row] : query_start_loc[row + 1]].view(np.uint64)
        if not own.any():
            continue
        if len(own) > MAX_TREE_TOKENS:
            raise BatchError(
                f"tree_mask of row {row}: it has {len(own)} tokens; give at most {MAX_TREE_TOKENS}, or "
                "words of 0 if it is no tree"
            )
        token = np.arange(len(own), dtype=np.uint64)
        one = np.uint64(1)
        # Twice, since a shift by 64 is none.
        later = own >> token >> one
        for wrong, what in (
            (own == 0, "has no word, and others of its request have one"),
            ((own >> token) & one == 0, "does not see itself"),
            (later != 0, "sees a later token"),
        ):
            if wrong.any():
                raise BatchError(
                    f"tree_mask of row {row}: token {int(np.argmax(wrong))} {what}; give each token of "
                    "a tree its own bit and those of tokens before it"
                )
