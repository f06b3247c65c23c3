"""The merge of splits: rows of the prefill kernel whose keys were shared out among programs.

In: of each split its rows in float32, and their LSE. Out: output and LSE of the row tiles. Device code,
in plain Triton; `launch.merge_call` starts it.
"""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["lse_stride_token"], do_not_specialize_on_alignment=["records_ptr"])
def merge_kernel(
    records_ptr,
    parts_ptr,
    part_lses_ptr,
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    sinks_ptr,
    HEAD_SIZE: tl.constexpr,
    PACK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Program (record, i): every so many blocks of rows of the record's row tile.

    A record is one split (`plan_kernels.fill_row_tiles_kernel`), and all splits of a row tile take part.
    The sink joins here, one more logit in the denominator. A row that saw no key becomes 0, and its LSE
    -inf or the sink's. It may be launched while the kernel before it runs, and waits for its end.
    """
    gdc_wait()
    record = records_ptr + tl.program_id(0) * 16
    token = tl.load(record + 1)
    head_tile = tl.load(record + 2)
    num_rows = tl.load(record + 3) * PACK
    place = tl.load(record + 9)
    split = tl.load(record + 10)
    num_splits = tl.load(record + 11)
    column = tl.arange(0, HEAD_SIZE)
    num_mine = tl.num_programs(1)
    first_block = split * num_mine + tl.program_id(1)
    for block in range(first_block, tl.cdiv(num_rows, BLOCK_ROWS), num_splits * num_mine):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = row < num_rows
        head = head_tile * PACK + row % PACK
        # Of the first split's row; the others' stand TILE_ROWS further each.
        first = (place - split).to(tl.int64) * TILE_ROWS + row
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        if sinks_ptr is not None:
            top = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
        acc = tl.zeros([BLOCK_ROWS, HEAD_SIZE], tl.float32)
        for begin in range(0, num_splits, BLOCK_SPLITS):
            # All loads of some splits are on their way before one is used. A row is a warp's.
            tops, parts = (), ()
            for i in tl.static_range(BLOCK_SPLITS):
                rows = first + (begin + i) * TILE_ROWS
                there = row < tl.where(begin + i < num_splits, num_rows, 0)
                lse = tl.load(part_lses_ptr + rows, mask=there, other=float("-inf"))
                tops += (lse * LOG2_E,)
                place_of_part = parts_ptr + rows[:, None] * HEAD_SIZE + column[None, :]
                parts += (tl.load(place_of_part, mask=there[:, None], other=0.0),)
            new_top = top
            for i in tl.static_range(BLOCK_SPLITS):
                new_top = tl.maximum(new_top, tops[i])
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            fade = tl.exp2(top - base)
            acc = acc * fade[:, None]
            total = total * fade
            for i in tl.static_range(BLOCK_SPLITS):
                weight = tl.exp2(tops[i] - base)
                total += weight
                acc += parts[i] * weight[:, None]
            top = new_top
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place_of_row = (token + row // PACK).to(tl.int64)
        out = out_ptr + place_of_row * out_stride_token + head * out_stride_head
        tl.store(
            out[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=live[:, None]
        )
        if lse_ptr is not None:
            lse = (top + tl.log2(total)) * LN_2
            tl.store(lse_ptr + place_of_row * lse_stride_token + head, lse, mask=live)
