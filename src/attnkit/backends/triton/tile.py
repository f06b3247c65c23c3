"""Parts of a tile, shared by the attention and the decode kernels: rows, pages, scores, softmax.

In: pointers, strides and positions of one tile. Out: values for the kernel's own loop. Device code.

A tile is BLOCK_M query rows against BLOCK_N keys. The query heads of one KV head lie side by side in
the rows (token by token, GROUP_TILE heads each), so a K/V tile is loaded once for all of them.

Scores are kept in units of `log2_scale`: a weight is exp2((score - max) * log2_scale). The subtraction
comes first because it is exact where it matters: folded into one multiply-add, score * log2_scale
would be rounded differently than max * log2_scale, and logits near 1e30 would overflow.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from attnkit.backends.codes import BLOCK, INT4, NVFP4, numbers, with_block_scales
from attnkit.backends.triton.interpreter import is_interpreting, repair_small_floats, shorten

if is_interpreting():  # Here, since every kernel with floats in it has parts of this file.
    repair_small_floats()
    shorten()

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
EVERYTHING = tl.constexpr(1 << 30)
"""More keys than a request has; sums of two stay inside int32."""


@triton.jit
def tile_rows(
    first_query,
    query_len,
    head_tile,
    GROUP_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Which query and which head of the group each row is, and whether there is such a row."""
    rows = tl.arange(0, BLOCK_M)
    query = first_query + rows // GROUP_TILE
    head = head_tile * GROUP_TILE + rows % GROUP_TILE
    live = (rows // GROUP_TILE < BLOCK_M // GROUP_TILE) & (query < query_len)
    if GROUP_SIZE % GROUP_TILE != 0:
        live = live & (head < GROUP_SIZE)
    return query, head, live


@triton.jit
def reach_of(causal, window):
    """How many keys from its own position on a query sees: itself only, a window, or all."""
    ahead = EVERYTHING
    if window is not None:
        ahead = window
    return tl.where(causal != 0, 1, ahead)


@triton.jit
def first_key_of(position, window):
    """First key that a query at `position` sees."""
    first = position * 0
    if window is not None:
        first = tl.maximum(position - window + 1, 0)
    return first


@triton.jit
def end_key_of(position, kv_len, reach):
    """One past the last key that a query at `position` sees; at most 0 where it sees none."""
    return tl.minimum(position + reach, kv_len)


@triton.jit
def with_spans(spans_ptr, tokens, live, row_first, row_end):
    """Rows that see the range their token lies in, beside row_first to row_end."""
    start = tl.load(spans_ptr + 2 * tokens, mask=live, other=EVERYTHING)
    end = tl.load(spans_ptr + 2 * tokens + 1, mask=live, other=0)
    return tl.minimum(row_first, start), tl.maximum(row_end, end)


@triton.jit
def in_tree(words, keys, context):
    """(rows, keys): of a tree's own tokens, which begin at key `context`, a row sees those whose bits
    are set in its word; of the context, and where the word is 0, all."""
    new = keys - context
    place = tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)
    bit = (words[:, None] >> place[None, :]) & 1
    return (bit != 0) | (new < 0)[None, :] | (words == 0)[:, None]


@triton.jit
def request_flag(causal_ptr, causal, request):
    """Whether this request is causal: its own entry where the batch has one per request."""
    flag = causal
    if causal_ptr is not None:
        flag = tl.load(causal_ptr + request).to(tl.int32)
    return flag


@triton.jit
def pages_of(table_ptr, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the keys start to start + BLOCK_N (a multiple of it): one per key, or one for all where
    a tile lies inside a page. Table cells of keys at or past `end` are not read.

    Loops look up the pages of the next tile while they work on this one: a K/V load that waits for its
    page index could not be issued ahead. Without a block table there is nothing to look up.
    """
    if table_ptr is None:
        page = 0
    elif PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table_ptr + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        page = tl.load(table_ptr + keys // PAGE_SIZE, mask=keys < end, other=0)
    return page


@triton.jit
def offsets_of(
    table_ptr, page, keys, first_token, stride_page, stride_row, PAGE_SIZE: tl.constexpr
):
    """int64 offsets of the keys' rows: inside their pages, or after the request's first token."""
    if table_ptr is None:
        offsets = (first_token.to(tl.int64) + keys) * stride_row
    else:
        # Inside a page 32 bits are enough; between pages they are not.
        offsets = page.to(tl.int64) * stride_page + keys % PAGE_SIZE * stride_row
    return offsets


@triton.jit
def load_rows(
    base_ptr,
    offsets,
    wanted,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    OFFSET: tl.constexpr = 0,
):
    """(len(offsets), BLOCK_SIZE) values, OFFSET elements after int64 row offsets; zero where not wanted
    and past SIZE."""
    columns = tl.arange(0, BLOCK_SIZE)
    pointers = base_ptr + offsets[:, None] + columns[None, :] + OFFSET
    if MASKED:
        if SIZE == BLOCK_SIZE:
            values = tl.load(pointers, mask=wanted[:, None], other=0.0)
        else:
            values = tl.load(pointers, mask=wanted[:, None] & (columns < SIZE)[None, :], other=0.0)
    elif SIZE == BLOCK_SIZE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    return values


@triton.jit
def load_numbers(
    base_ptr,
    scales_ptr,
    offsets,
    wanted,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    OFFSET: tl.constexpr,
    CODES: tl.constexpr,
    UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A tile of K or of V as numbers of DTYPE, without the layer's scale and that of a key.

    Offsets count UNIT elements: 4 where float32 scales stand between bytes, 1 elsewhere.
    """
    PER_BYTE: tl.constexpr = 2 if CODES >= INT4 else 1
    x = load_rows(
        base_ptr,
        offsets * UNIT,
        wanted,
        SIZE // PER_BYTE,
        BLOCK_SIZE // PER_BYTE,
        MASKED,
        OFFSET,
    )
    x = numbers(x, CODES, DTYPE)
    if CODES == NVFP4:
        scales = load_rows(scales_ptr, offsets, wanted, SIZE // BLOCK, BLOCK_SIZE // BLOCK, MASKED)
        x = with_block_scales(x, scales, DTYPE)
    return x


@triton.jit
def load_key_value(
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    page,
    keys,
    wanted,
    first_token,
    k_stride_page,
    k_stride_row,
    v_stride_page,
    v_stride_row,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    CODES: tl.constexpr,
    UNIT: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A tile of K and of V as `load_numbers` gives it. Without `v_ptr`, a value stands VALUE_OFFSET
    elements behind its key."""
    k_offsets = offsets_of(
        table_ptr, page, keys, first_token, k_stride_page, k_stride_row, PAGE_SIZE
    )
    v_offsets = k_offsets
    value_ptr = k_ptr
    if v_ptr is not None:
        value_ptr = v_ptr
        v_offsets = offsets_of(
            table_ptr, page, keys, first_token, v_stride_page, v_stride_row, PAGE_SIZE
        )
    k = load_numbers(
        k_ptr, k_scales_ptr, k_offsets, wanted, HEAD_SIZE, BLOCK_D, MASKED, 0, CODES, UNIT, DTYPE
    )
    v = load_numbers(
        value_ptr,
        v_scales_ptr,
        v_offsets,
        wanted,
        HEAD_SIZE_V,
        BLOCK_DV,
        MASKED,
        VALUE_OFFSET,
        CODES,
        UNIT,
        DTYPE,
    )
    return k, v


@triton.jit
def load_scales(
    scales_ptr,
    table_ptr,
    page,
    keys,
    wanted,
    first_token,
    stride_page,
    stride_row,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The float32 scales that stand beside the codes of a tile's keys; zero where not wanted."""
    offsets = offsets_of(table_ptr, page, keys, first_token, stride_page, stride_row, PAGE_SIZE)
    if MASKED:
        scales = tl.load(scales_ptr + offsets, mask=wanted, other=0.0)
    else:
        scales = tl.load(scales_ptr + offsets)
    return scales


@triton.jit
def head_scale(scale_ptr, kv_head, PER_HEAD: tl.constexpr):
    """The layer's scale of a KV head."""
    return tl.load(scale_ptr + (kv_head if PER_HEAD else 0))


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """Hyperbolic tangent that neither overflows nor, if PRECISE, loses small arguments.

    (1 - e) / (1 + e) with e = exp(-2|x|) <= 1 has an absolute error near 1e-7, so a relative one that
    grows below 1. There PRECISE takes the continued fraction of tanh to seven terms, whose error at
    |x| = 1 is 3e-9.
    """
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    if PRECISE:
        near = tl.minimum(size, 1.0)
        s = near * near
        top = 135135.0 + s * (17325.0 + s * (378.0 + s))
        bottom = 135135.0 + s * (62370.0 + s * (3150.0 + s * 28.0))
        far = tl.where(size < 1.0, near * top / bottom, far)
    return tl.where(x < 0.0, -far, far)


@triton.jit
def scores(
    q,
    k,
    k_scales,
    keys,
    positions,
    slopes,
    scale,
    soft_cap,
    LINEAR: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
):
    """(BLOCK_M, BLOCK_N) scores before the mask. `k_scales`: one more factor a key, or None.

    LINEAR: plain q.k; `log2_scale` then holds scale * log2(e). Otherwise the score is finished here,
    in base 2: q.k * scale, soft cap, ALiBi, times log2(e).
    """
    # "ieee" concerns float32 only: TF32 would keep 10 of its 23 bits.
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if k_scales is not None:
        s = s * k_scales[None, :]
    if not LINEAR:
        s = s * scale
        if soft_cap is not None:
            s = soft_cap * tanh(s / soft_cap, q.dtype == tl.float32)
        if slopes is not None:
            ahead = (keys[None, :] - positions[:, None]).to(tl.float32)
            if ALIBI_SQRT:
                ahead = -tl.sqrt(tl.maximum(-ahead, 0.0))
            s = s + slopes[:, None] * ahead
        s = s * LOG2_E
    return s


@triton.jit
def finite_or_zero(top):
    """A maximum to subtract: 0 stands in for that of a row which has seen no key."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def online_softmax(s, top, total, log2_scale):
    """One step of the running softmax.

    Returns:
        weights (BLOCK_M, BLOCK_N), the new maximum and sum, and what earlier sums are multiplied by.
    """
    new_top = tl.maximum(top, tl.max(s, 1))
    base = finite_or_zero(new_top)
    weights = tl.exp2((s - base[:, None]) * log2_scale)
    fade = tl.exp2((top - base) * log2_scale)
    return weights, new_top, total * fade + tl.sum(weights, 1), fade


@triton.jit
def add_values(acc, fade, weights, v, v_scales):
    """The weighted sum, rescaled, plus that of one more tile.

    The scales beside V go to the weights, of which there are fewer. Small weights times small scales
    would leave float16's range, so there they go to V.
    """
    if v_scales is not None:
        if v.dtype == tl.float16:
            v = (v.to(tl.float32) * v_scales[:, None]).to(tl.float16)
        else:
            weights = weights * v_scales[None, :]
    return tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")


@triton.jit
def fold(top, total, acc, part_top, part_total, part_acc, log2_scale):
    """Add the state of later keys to that of earlier ones.

    The multiply-adds are explicit, so that registers and the merge kernel give the same bits.
    """
    new_top = tl.maximum(top, part_top)
    base = finite_or_zero(new_top)
    fade = tl.exp2((top - base) * log2_scale)
    part_fade = tl.exp2((part_top - base) * log2_scale)
    new_total = tl.fma(total, fade, part_total * part_fade)
    fade_all = tl.broadcast_to(fade[:, None], acc.shape)
    new_acc = tl.fma(acc, fade_all, part_acc * part_fade[:, None])
    return new_top, new_total, new_acc


@triton.jit
def finish(top, total, acc, sinks, log2_scale, v_scale):
    """Output and natural LSE of rows from their final state; `v_scale` is a factor on V, or None.

    The sink joins here, once: one more logit in the denominator, without a value. A row without keys
    has total 0: output 0 and LSE -inf, or the sink's.
    """
    top = top * log2_scale
    if sinks is not None:
        sink = sinks * LOG2_E
        with_sink = tl.maximum(top, sink)
        base = finite_or_zero(with_sink)
        fade = tl.exp2(top - base)
        total = total * fade + tl.exp2(sink - base)
        acc = acc * fade[:, None]
        top = with_sink
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * LN_2)
    out = acc / divisor[:, None]
    if v_scale is not None:
        out = out * v_scale
    return out, lse
