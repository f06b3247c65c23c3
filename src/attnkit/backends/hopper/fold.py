"""The fold kernel: units of decodes that several programs share become output and LSE.

In: states that a decode kernel of 64 rows, or one over latents, left, and the table of units of
`plan_kernels.share_decodes_kernel`. Out: output and LSE. Many programs fold one unit, since its states
are large: 32 to 128 KiB a piece. Device code, in plain Triton; `fold_launch` starts it.
"""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["lse_stride_token"],
    do_not_specialize_on_alignment=["share_ptr", "units_ptr", "k_scale_ptr"],
)
def fold_kernel(
    share_ptr,
    units_ptr,
    states_ptr,
    sums_ptr,
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    sinks_ptr,
    k_scale_ptr,
    log2_scale,
    GROUP_SIZE: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (unit, i, j) folds every so-many-th ROWS of its rows, the j-th COLUMNS of them, SPLITS
    states at once and always in the order of their keys. `k_scale_ptr`: of latents, which are keys and
    values."""
    unit = tl.program_id(0)
    num_units = tl.load(share_ptr + 2)
    record = units_ptr + unit * 8
    token = tl.load(record)
    head_tile = tl.load(record + 1)
    num_tokens = tl.load(record + 2)
    num_splits = tl.load(record + 3)
    first_program = tl.load(record + 4)
    if (unit >= num_units) | (num_splits == 1):
        return
    out_scale = 1.0
    if k_scale_ptr is not None:
        out_scale = tl.load(k_scale_ptr)
        log2_scale *= out_scale
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    # Few programs, since where requests are many there is often nothing to do: then their start is all.
    for first_row in tl.range(
        tl.program_id(1) * ROWS, num_tokens * PACK, tl.num_programs(1) * ROWS
    ):
        row = first_row + tl.arange(0, ROWS)
        live = row < num_tokens * PACK
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, num_splits, SPLITS):
            # All loads of some states are on their way before one is used; no thread needs another's.
            tops, totals, states = (), (), ()
            for i in tl.static_range(SPLITS):
                # Places as `states.place_of_state` gives them.
                split = begin + i
                place = 2 * (first_program + split) + tl.where(split == 0, 1, 0)
                rows = place.to(tl.int64) * TILE_ROWS + row
                there = row < tl.where(split < num_splits, num_tokens * PACK, 0)
                tops += (tl.load(sums_ptr + rows * 2, mask=there, other=float("-inf")),)
                totals += (tl.load(sums_ptr + rows * 2 + 1, mask=there, other=0.0),)
                pointers = states_ptr + rows[:, None] * HEAD_SIZE + column[None, :]
                states += (tl.load(pointers, mask=there[:, None], other=0.0),)
            highest = top
            for i in tl.static_range(SPLITS):
                highest = tl.maximum(highest, tops[i])
            base = tl.where(highest == float("-inf"), 0.0, highest * log2_scale)
            fade = tl.exp2(top * log2_scale - base)
            total = total * fade
            acc = acc * fade[:, None]
            for i in tl.static_range(SPLITS):
                fade = tl.exp2(tops[i] * log2_scale - base)
                total += totals[i] * fade
                acc += states[i] * fade[:, None]
            top = highest
        head = head_tile * GROUP_SIZE + row % PACK
        live = live & (row % PACK < GROUP_SIZE)
        top = top * log2_scale
        if sinks_ptr is not None:
            # One more logit in the denominator, without a value.
            sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
            highest = tl.maximum(top, sink)
            base = tl.where(highest == float("-inf"), 0.0, highest)
            fade = tl.exp2(top - base)
            total = total * fade + tl.exp2(sink - base)
            acc = acc * fade[:, None]
            top = highest
        total = tl.where(total == 0.0, 1.0, total)
        where = (token + row // PACK).to(tl.int64)
        if lse_ptr is not None:  # noqa: SIM102 (a constant stands alone)
            if tl.program_id(2) == 0:
                lse = (top + tl.log2(total)) * LN_2
                tl.store(lse_ptr + where * lse_stride_token + head, lse, mask=live)
        out = acc * (out_scale / total)[:, None]
        where = where * out_stride_token + head * out_stride_head
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + where[:, None] + column[None, :], out, mask=live[:, None])
