"""The merge of splits: rows of the prefill kernel whose keys were shared out among programs.

In: of each split its rows in float32, and their LSE. Out: output and LSE of the row tiles. Device code,
in plain Triton; `launch.merge_call` starts it.
"""

import triton
import triton.language as tl

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
    -inf or the sink's.
    """
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
        if sinks_ptr is not None:
            top = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
        sink = top
        for begin in range(0, num_splits, BLOCK_SPLITS):
            at = begin + tl.arange(0, BLOCK_SPLITS)
            there = (at < num_splits)[:, None] & live[None, :]
            rows = first[None, :] + at[:, None] * TILE_ROWS
            lses = tl.load(part_lses_ptr + rows, mask=there, other=float("-inf"))
            top = tl.maximum(top, tl.max(lses, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        if sinks_ptr is not None:
            total = tl.exp2((sink - base) * LOG2_E)
        acc = tl.zeros([BLOCK_ROWS, HEAD_SIZE], tl.float32)
        for begin in range(0, num_splits, BLOCK_SPLITS):
            at = begin + tl.arange(0, BLOCK_SPLITS)
            there = (at < num_splits)[:, None] & live[None, :]
            rows = first[None, :] + at[:, None] * TILE_ROWS
            lses = tl.load(part_lses_ptr + rows, mask=there, other=float("-inf"))
            parts = tl.load(
                parts_ptr + rows[:, :, None] * HEAD_SIZE + column[None, None, :],
                mask=there[:, :, None],
                other=0.0,
            )
            weights = tl.exp2((lses - base[None, :]) * LOG2_E)
            total += tl.sum(weights, 0)
            acc += tl.sum(parts * weights[:, :, None], 0)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place_of_row = (token + row // PACK).to(tl.int64)
        out = out_ptr + place_of_row * out_stride_token + head * out_stride_head
        tl.store(
            out[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=live[:, None]
        )
        if lse_ptr is not None:
            lse = (base * LOG2_E + tl.log2(total)) * LN_2
            tl.store(lse_ptr + place_of_row * lse_stride_token + head, lse, mask=live)
