"""States of units that several programs of the decode kernel share: left, folded, finished.

In: accumulated values, maximum and sum of the rows of a piece. Out: states in memory, and, from whoever
comes last, output and LSE. Device code of `decode`.
"""

# ruff: noqa: RUF005, SIM102 (device code: tuples grow by +, and `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import barrier, gl, gluon
from attnkit.backends.hopper.tile import finish_rows

RADIX = gl.constexpr(8)
"""States that are folded at once. Their loads are in flight together: 32 registers a thread."""


@gluon.jit
def place_of_state(split, first_program):
    """Where a piece leaves its state. A program has at most two pieces of shared units: the end of one,
    and the beginning of another."""
    return 2 * (first_program + split) + gl.where(split == 0, 1, 0)


@gluon.jit
def store_out(
    CONFIG: gl.constexpr,
    acc,
    top,
    total,
    row,
    column,
    token,
    kv_head,
    num_tokens,
    log2_scale,
    out_scale,
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    sinks_ptr,
    FIRST: gl.constexpr,
):
    """Finish rows and write them. `row`, `column` and states are slices of `acc`, which has some of the
    columns; FIRST: they are the first to be written, and the LSE goes with them."""
    head = kv_head * CONFIG.group_size + row % CONFIG.pack
    row_token = row // CONFIG.pack
    live = (row_token < num_tokens) & (row % CONFIG.pack < CONFIG.group_size)
    sinks = top
    if CONFIG.score.sinks:
        sinks = gl.load(sinks_ptr + head, mask=live, other=0.0)
    factor, lse = finish_rows(top, total, sinks, log2_scale, CONFIG)
    where = (token + row_token).to(gl.int64)
    if CONFIG.score.lse:
        if FIRST:
            gl.store(lse_ptr + where * lse_stride_token + head, lse, mask=live)
    if CONFIG.scaled:
        factor = factor * out_scale
    where = where * out_stride_token + head * out_stride_head
    out = (acc * gl.expand_dims(factor, 1)).to(out_ptr.dtype.element_ty)
    pointers = out_ptr + gl.expand_dims(where, 1) + gl.expand_dims(column, 0)
    gl.store(pointers, out, mask=gl.expand_dims(live, 1))


@gluon.jit
def store_state(
    CONFIG: gl.constexpr,
    acc,
    top,
    total,
    row,
    column,
    live,
    place,
    states_ptr,
    sums_ptr,
    FIRST: gl.constexpr,
):
    """Leave the state of some rows at a place. Arguments as in `store_out`."""
    where = place.to(gl.int64) * CONFIG.tile_rows + row
    pointers = gl.expand_dims(states_ptr + where * CONFIG.head_size, 1)
    gl.store(pointers + gl.expand_dims(column, 0), acc, mask=gl.expand_dims(live, 1))
    if FIRST:
        gl.store(sums_ptr + where * 2, top, mask=live)
        gl.store(sums_ptr + where * 2 + 1, total, mask=live)


@gluon.jit
def fold_states(
    CONFIG: gl.constexpr,
    FOLD_LAYOUT: gl.constexpr,
    row,
    live,
    states_ptr,
    sums_ptr,
    first_program,
    split,
    stride,
    count,
    log2_scale,
):
    """Fold up to RADIX states of some rows, in the order of their keys.

    Returns:
        accumulated values, maximum and sum of the rows.
    """
    HEAD_SIZE: gl.constexpr = CONFIG.head_size
    column = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, FOLD_LAYOUT))
    accs = ()
    tops = ()
    totals = ()
    for i in gl.static_range(RADIX):
        there = live & (i < count)
        place = place_of_state(split + i * stride, first_program).to(gl.int64)
        place = place * CONFIG.tile_rows + row
        tops = tops + (
            gl.load(sums_ptr + place * 2, mask=there, other=float("-inf"), cache_modifier=".cg"),
        )
        totals = totals + (
            gl.load(sums_ptr + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg"),
        )
        pointers = gl.expand_dims(states_ptr + place * HEAD_SIZE, 1) + gl.expand_dims(column, 0)
        accs = accs + (
            gl.load(pointers, mask=gl.expand_dims(there, 1), other=0.0, cache_modifier=".cg"),
        )
    top = tops[0]
    for i in gl.static_range(1, RADIX):
        top = gl.maximum(top, tops[i])
    base = gl.where(top == float("-inf"), 0.0, top * log2_scale)
    fade = gl.exp2(tops[0] * log2_scale - base)
    total = totals[0] * fade
    acc = accs[0] * gl.expand_dims(fade, 1)
    for i in gl.static_range(1, RADIX):
        fade = gl.exp2(tops[i] * log2_scale - base)
        total = total + totals[i] * fade
        acc = acc + accs[i] * gl.expand_dims(fade, 1)
    return acc, top, total


@gluon.jit
def merge_unit(
    CONFIG: gl.constexpr,
    split,
    num_splits,
    first_program,
    token,
    kv_head,
    num_tokens,
    log2_scale,
    out_scale,
    states_ptr,
    sums_ptr,
    counters_ptr,
    num_states,
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    sinks_ptr,
):
    """Come to the tree of this unit's states with one more; fold what is complete, up to the output.

    At each level RADIX neighbours form a group, counted at the place of its first. Whoever completes a
    group resets its counter, folds it into that place and goes on as its one member of the next level.
    """
    LANES: gl.constexpr = 32 if CONFIG.head_size >= 128 else 16
    WIDE: gl.constexpr = 2 if CONFIG.head_size == 256 else 1
    ROWS: gl.constexpr = 512 // CONFIG.head_size
    FOLD_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // LANES, LANES], [4 // WIDE, WIDE], [1, 0]
    )
    column = gl.arange(0, CONFIG.head_size, gl.SliceLayout(0, FOLD_LAYOUT))
    stride = 1
    level = 0
    going = True
    while going:
        # All threads' states are written, then one thread says so.
        barrier()
        group = split // (RADIX * stride) * (RADIX * stride)
        count = gl.minimum((num_splits - group + stride - 1) // stride, RADIX)
        place = place_of_state(group, first_program)
        counter_ptr = counters_ptr + level * num_states + place
        num_before = gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        going = num_before == count - 1
        if going:
            gl.store(counter_ptr, 0)
            is_whole = (group == 0) & (count * stride >= num_splits)
            for first_row in range(0, num_tokens * CONFIG.pack, ROWS):
                row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, FOLD_LAYOUT))
                live = row < num_tokens * CONFIG.pack
                acc, top, total = fold_states(
                    CONFIG,
                    FOLD_LAYOUT,
                    row,
                    live,
                    states_ptr,
                    sums_ptr,
                    first_program,
                    group,
                    stride,
                    count,
                    log2_scale,
                )
                if is_whole:
                    store_out(
                        CONFIG,
                        acc,
                        top,
                        total,
                        row,
                        column,
                        token,
                        kv_head,
                        num_tokens,
                        log2_scale,
                        out_scale,
                        out_ptr,
                        out_stride_token,
                        out_stride_head,
                        lse_ptr,
                        lse_stride_token,
                        sinks_ptr,
                        True,
                    )
                else:
                    # It takes the place of a member whose sums other warps of its row may still read.
                    barrier()
                    store_state(
                        CONFIG,
                        acc,
                        top,
                        total,
                        row,
                        column,
                        live,
                        place,
                        states_ptr,
                        sums_ptr,
                        True,
                    )
            split = group
            stride = stride * RADIX
            level += 1
            going = going & (is_whole == 0)
