"""Segments of a request's keys: what decode kernels attend to by themselves and fold in order.

In: lengths and mask of a tile of queries. Out: which keys any of its rows sees, and how these are cut.
The length of a segment follows from the request alone, so the bits of an output depend neither on batch
mates nor on who does which segment. Device code.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnkit.backends.triton.tile import end_key_of, first_key_of, with_spans


@triton.jit
def span_of(
    spans_ptr,
    first_token,
    first_query,
    query_len,
    kv_len,
    reach,
    window,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """First key and end of the keys that any row of a tile of BLOCK_Q <= BLOCK_M queries sees."""
    shift = kv_len - query_len
    end_query = tl.minimum(first_query + BLOCK_Q, query_len)
    first_key = first_key_of(shift + first_query, window)
    end_key = end_key_of(shift + end_query - 1, kv_len, reach)
    if spans_ptr is not None:
        query = first_query + tl.arange(0, BLOCK_M)
        token = (first_token + query).to(tl.int64)
        starts, ends = with_spans(spans_ptr, token, query < end_query, first_key, end_key)
        first_key = tl.min(starts, 0)
        end_key = tl.max(ends, 0)
    return first_key, tl.maximum(end_key, first_key)


@triton.jit
def gap_of(prefix_lens_ptr, request, start, end_key, BLOCK_N: tl.constexpr):
    """Of a request with a prefix that no window hides: where the prefix ends (and the tile that it ends
    in), and how many keys between that tile and the window's first one, at `start`, nobody sees.

    Segments count keys without the gap.
    """
    prefix = tl.maximum(tl.minimum(tl.load(prefix_lens_ptr + request), end_key), 0)
    prefix_end = tl.cdiv(prefix, BLOCK_N) * BLOCK_N
    return prefix, prefix_end, tl.maximum(start - prefix_end, 0)


@triton.jit
def segment_len_of(span, max_segments, SEGMENT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys in a segment, a multiple of BLOCK_N, so that `span` keys make at most `max_segments`."""
    needed = tl.cdiv(tl.cdiv(span, max_segments), BLOCK_N) * BLOCK_N
    return tl.maximum(needed, SEGMENT)
