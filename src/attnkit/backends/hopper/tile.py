"""Parts of a tile, shared by the prefill and the decode kernel: pages, copies, scores, mask, softmax.

In: descriptors, shared memory and scalars of one tile. Out: values for the kernel's own loop. Device
code; CONFIG is a `config.KernelConfig`.

A K or V tile is `block_n` keys by `head_size`, kept as strips of `strip` columns: 128 bytes, the widest
a swizzled copy can be. A box of `rows` keys of one page and strip is one copy. Box i of
strip c of slot s lies at index (s * strips + c) * boxes + i, which makes the strips of a slot together
the swizzled matrix that the tensor cores read.

Scores are kept in units of `log2_scale`: a weight is exp2((score - max) * log2_scale).
"""

# ruff: noqa: RUF005 (device code: tuples grow by +, and `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import (
    barrier,
    fade_rows,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reciprocal,
    square_root,
    tma_load,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def first_key_of(position, window, CONFIG: gl.constexpr):
    """First key that a query at `position` sees."""
    first = position * 0
    if CONFIG.score.window:
        first = gl.maximum(position - window + 1, 0)
    return first


@gluon.jit
def pages_of_tile(table_ptr, tile, first_key, end_key, num_pages, CONFIG: gl.constexpr):
    """Physical pages of the boxes of a tile, as a tuple.

    The page of a box without a key from first_key to end_key becomes `num_pages`, out of bounds of the
    pool: a copy from there writes zeros and counts its bytes all the same. Its table cell is not read.
    """
    ROWS: gl.constexpr = CONFIG.rows
    pages = ()
    for i in gl.static_range(CONFIG.block_n // ROWS):
        key = tile * CONFIG.block_n + i * ROWS
        seen = (key + ROWS > first_key) & (key < end_key)
        page = gl.load(table_ptr + key // CONFIG.page_size, mask=seen, other=num_pages)
        pages = pages + (page,)
    return pages


@gluon.jit
def copy_tile(desc, buffer, full, pages, tile, kv_head, column, slot, CONFIG: gl.constexpr):
    """Start the copies of one K or V tile, from `column` on; all of them complete on barrier `full`."""
    STRIPS: gl.constexpr = CONFIG.head_size // CONFIG.strip
    BOXES: gl.constexpr = CONFIG.block_n // CONFIG.rows
    mbarrier.expect(full, CONFIG.block_n * CONFIG.head_size * CONFIG.element_bytes)
    for i in gl.static_range(BOXES):
        row = 0
        if CONFIG.page_size != CONFIG.rows:
            row = (tile * CONFIG.block_n + i * CONFIG.rows) % CONFIG.page_size
        for c in gl.static_range(STRIPS):
            place = buffer.index((slot * STRIPS + c) * BOXES + i)
            tma_load(desc, [pages[i], kv_head, row, column + c * CONFIG.strip], full, place)


@gluon.jit
def zero_keys(boxes, slot, box, first, end, CONFIG: gl.constexpr):
    """Zero the rows of one box of a tile outside first to end: what no query sees may be NaN.

    Every warpgroup that reads the tile does this for itself. Others may read the tile meanwhile, since
    the rows they use are written with what they hold.
    """
    STRIPS: gl.constexpr = CONFIG.head_size // CONFIG.strip
    BOXES: gl.constexpr = CONFIG.block_n // CONFIG.rows
    # 16 bytes a thread.
    WIDTH: gl.constexpr = 16 // CONFIG.element_bytes
    LANES: gl.constexpr = CONFIG.strip // WIDTH
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, WIDTH], [1, 1, 32 // LANES, LANES], [1, 1, 4, 1], [3, 2, 1, 0]
    )
    OF_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    row = gl.arange(0, CONFIG.rows, OF_ROW)
    keep = (row >= first) & (row < end)
    keep = gl.expand_dims(gl.expand_dims(gl.expand_dims(keep, 0), 1), 3)
    for c in gl.static_range(STRIPS):
        place = boxes.index((slot * STRIPS + c) * BOXES + box)
        values = place.load(LAYOUT)
        place.store(gl.where(keep, values, gl.zeros_like(values)))
    fence_async_shared()
    barrier()


@gluon.jit
def zero_past_end(boxes, slot, tile, num_keys, CONFIG: gl.constexpr):
    """Zero the rows of a V tile past the request's last key, in the box that holds it. Boxes wholly past
    it were never copied, and are zero."""
    rows = num_keys - tile * CONFIG.block_n
    if (rows > 0) & (rows < CONFIG.block_n) & (rows % CONFIG.rows != 0):
        zero_keys(boxes, slot, rows // CONFIG.rows, 0, rows % CONFIG.rows, CONFIG)


@gluon.jit
def zero_before_window(boxes, slot, tile, first_key, CONFIG: gl.constexpr):
    """Zero the rows of a V tile before the first key that any query sees, in the box that holds it."""
    rows = first_key - tile * CONFIG.block_n
    if (rows > 0) & (rows < CONFIG.block_n) & (rows % CONFIG.rows != 0):
        zero_keys(boxes, slot, rows // CONFIG.rows, rows % CONFIG.rows, CONFIG.rows, CONFIG)


@gluon.jit
def free_before(step, empty, there, CONFIG: gl.constexpr):
    """Free the tiles of the step before `step`, if there is one, by one arrival for K and V: each costs
    barriers of the whole warpgroup.

    Not at that step's end, where the assembler keeps products behind the arrival. A product that has
    been issued has its operands; a load that has been may still read, and the copy engine does not
    queue behind it. Products do not move over the border of two steps.
    """
    slot = (step + CONFIG.stages - 1) % CONFIG.stages
    mbarrier.arrive(empty.index(slot), count=1, pred=there)


@gluon.jit
def finish_scores(s, tile, sight, slopes, factors, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Scores of one tile as the softmax takes them, before the mask. A linear score stays raw.

    Args:
        s: raw q.k.
        sight: (token of each row counted from the row tile's first, position of that first token, keys
            that a query sees past its own position, keys of the request, window).
        slopes: ALiBi slope of each row, times log2(e).
        factors: (log2_scale, score_factor, cap_log2). The second is scale * log2(e), or with a soft cap
            2 * log2(e) * scale / cap; the third is cap * log2(e).
    """
    if not CONFIG.score.linear:
        row_token, position, _, _, _ = sight
        _, score_factor, cap_log2 = factors
        s = s * score_factor
        if CONFIG.score.soft_cap:
            # cap * tanh(x), with exp2(s) = exp(2 x). Where that overflows, tanh is 1.
            s = cap_log2 - 2.0 * cap_log2 * reciprocal(gl.exp2(s) + 1.0)
        if CONFIG.score.alibi != 0:
            key = tile * CONFIG.block_n + gl.arange(0, CONFIG.block_n, gl.SliceLayout(0, LAYOUT))
            ahead = gl.expand_dims(key, 0) - gl.expand_dims(position + row_token, 1)
            ahead = ahead.to(gl.float32)
            if CONFIG.score.alibi == 2:
                s = s - gl.expand_dims(slopes, 1) * square_root(gl.maximum(-ahead, 0.0))
            else:
                s = s + gl.expand_dims(slopes, 1) * ahead
    return s


@gluon.jit
def mask_scores(s, tile, sight, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """-inf where a row does not see the key."""
    row_token, position, reach, num_keys, window = sight
    key = tile * CONFIG.block_n + gl.arange(0, CONFIG.block_n, gl.SliceLayout(0, LAYOUT))
    last = gl.minimum(position + reach + row_token, num_keys - 1)
    seen = gl.expand_dims(key, 0) <= gl.expand_dims(last, 1)
    if CONFIG.score.window:
        first = position - window + 1 + row_token
        seen = seen & (gl.expand_dims(key, 0) >= gl.expand_dims(first, 1))
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def online_softmax(s, top, log2_scale, MASKED: gl.constexpr, LAZY: gl.constexpr = False):
    """One step of the running softmax.

    MASKED: rows may have seen no key yet; their maximum is -inf and 0 is subtracted instead.
    LAZY: a row's maximum stays what it was until it would rise by more than 8 powers of 2. A weight is
    then at most 256 instead of 1, which rounds alike, and `fade` is almost always 1 (see `faded`).

    Returns:
        weights, what earlier sums are multiplied by, and the new maximum.
    """
    new_top = gl.max(s, 1)
    if LAZY:
        rises = (new_top - top) * log2_scale > 8.0
        new_top = gl.where(rises, new_top, top)
    else:
        new_top = gl.maximum(top, new_top)
    base = new_top * log2_scale
    if MASKED:
        base = gl.where(new_top == float("-inf"), 0.0, base)
    fade = gl.exp2(top * log2_scale - base)
    if LAZY:
        fade = gl.where(rises, fade, 1.0)
    weights = gl.exp2(s * log2_scale - gl.expand_dims(base, 1))
    return weights, fade, new_top


@gluon.jit
def faded(acc, fade):
    """A warpgroup's accumulator times the `fade` of a lazy step, in the layout of its rows."""
    NUM: gl.constexpr = min(64, acc.shape[0] * acc.shape[1] // 128)
    return fade_rows(acc, fade, NUM)


@gluon.jit
def finish_rows(top, total, sinks, log2_scale, CONFIG: gl.constexpr):
    """What the output of each row is multiplied by, and its natural LSE.

    The sink joins here: one more logit in the denominator, without a value. A row that saw no key has
    total 0: its output becomes 0 and its LSE -inf, or the sink's.
    """
    top = top * log2_scale
    fade = top
    if CONFIG.score.sinks:
        sinks = sinks * LOG2_E
        with_sink = gl.maximum(top, sinks)
        base = gl.where(with_sink == float("-inf"), 0.0, with_sink)
        fade = gl.exp2(top - base)
        total = total * fade + gl.exp2(sinks - base)
        top = with_sink
    factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    if CONFIG.score.sinks:
        factor = factor * fade
    return factor, (top + gl.log2(total)) * LN_2
