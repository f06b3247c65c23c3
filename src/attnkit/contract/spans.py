"""Spans: keys that tokens see beside the layer's mask: ranges inside prompts (prefix-LM) and prefixes.

In: a batch's `mm_req_doc_ranges`, both ends inside, and its host lengths. Out: per token of the step the
one range it lies in, as keys [start, end). A token sees what its layer's mask says and its range; both
hold the token itself and have no gaps, so together they are one interval: a kernel takes the smaller
start and the larger end and needs to know no more. The prefixes of R-SWA are only checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from attnkit.errors import BatchError

NO_SPAN = (1 << 30, 0)
"""Of a token in no range: neutral to the smaller start and the larger end."""


def check_ranges(ranges: Mapping[int, Sequence[tuple[int, int]]], seq_lens: Sequence[int]) -> None:
    """Refuse ranges that mean nothing, or not what their words say.

    Args:
        ranges: row of the batch -> (start, end) positions, both inside.
        seq_lens: all tokens of each request.

    Raises:
        BatchError: a row that the batch does not have, a range that is reversed, outside the request or
            overlaps another of its row. A range that ends past the request's tokens is an image cut by
            the end of a chunk: its first tokens would miss keys that are not there yet.
    """
    for row, spans in ranges.items():
        if not 0 <= row < len(seq_lens):
            raise BatchError(
                f"mm_req_doc_ranges names row {row}; the batch has {len(seq_lens)} rows, from 0"
            )
        before: tuple[int, int] | None = None
        for start, end in sorted((int(start), int(end)) for start, end in spans):
            if end < start:
                raise BatchError(
                    f"mm_req_doc_ranges of row {row}: ({start}, {end}) is reversed; give "
                    "(first, last) position, both inside"
                )
            if start < 0 or end >= seq_lens[row]:
                raise BatchError(
                    f"mm_req_doc_ranges of row {row}: ({start}, {end}) is not inside the request's "
                    f"{seq_lens[row]} tokens; compute a range in one piece, or drop it"
                )
            if before is not None and start <= before[1]:
                raise BatchError(
                    f"mm_req_doc_ranges of row {row}: {before} and ({start}, {end}) overlap; give "
                    "ranges that have no position in common"
                )
            before = (start, end)


def spans_of_tokens(
    ranges: Mapping[int, Sequence[tuple[int, int]]],
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    num_tokens: int,
) -> npt.NDArray[np.int32] | None:
    """int32 (num_tokens, 2): per token its range as keys [start, end), or `NO_SPAN`.

    Args:
        ranges: as in `check_ranges`.
        query_start_loc: (R + 1,).
        seq_lens: (R,).
        num_tokens: rows to give, those behind the last request included.

    Returns:
        None if no token of the step lies in a range, as in a batch of decodes.

    Raises:
        BatchError: as `check_ranges`.
    """
    check_ranges(ranges, seq_lens)
    spans = np.full((num_tokens, 2), NO_SPAN, dtype=np.int32)
    found = False
    for row, row_ranges in ranges.items():
        first_token, end_token = query_start_loc[row], query_start_loc[row + 1]
        shift = first_token - (seq_lens[row] - (end_token - first_token))
        for start, end in row_ranges:
            tokens = slice(max(first_token, start + shift), max(first_token, end + 1 + shift))
            spans[tokens] = (start, end + 1)
            found = found or tokens.stop > tokens.start
    return spans if found else None


def check_prefix_lens(prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
    """Refuse prefixes (R-SWA) that are no part of their request.

    Args:
        prefix_lens: per request, how many of its first tokens all later ones see.
        seq_lens: all tokens of each request.

    Raises:
        BatchError: another number of them than of requests, or one that is negative or longer than its
            request.
    """
    if len(prefix_lens) != len(seq_lens):
        raise BatchError(
            f"{len(prefix_lens)} rswa_prefix_lens were given for {len(seq_lens)} requests; give one of "
            "each, 0 for no prefix"
        )
    for row, (prefix, length) in enumerate(zip(prefix_lens, seq_lens, strict=True)):
        if not 0 <= prefix <= length:
            raise BatchError(
                f"rswa_prefix_lens of row {row} is {prefix}, and the request has {length} tokens; give "
                f"0 to {length}: of a prompt that comes in pieces, the tokens there are"
            )
