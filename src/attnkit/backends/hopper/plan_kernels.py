"""Planning kernels: records of work for the attention kernels, from the lengths on the device.

In: query_start_loc, seq_lens and causal flags of a batch. Out: one record per row tile (prefill), or one
per piece of a program's share (decode), ready to be read by every layer of the step. Device code, in
plain Triton; `launch` starts it.
"""

# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

EVERYTHING = tl.constexpr(1 << 30)
"""More keys than a request has; sums with a position stay inside int32."""


@triton.jit
def reach_of(causal_ptr, causal, window, request):
    """How many keys past its own position a query sees: none, a window's, or all."""
    flag = causal
    if causal_ptr is not None:
        flag = tl.load(causal_ptr + request).to(tl.int32)
    ahead = EVERYTHING
    if window is not None:
        ahead = window - 1
    return tl.where(flag != 0, 0, ahead)


@triton.jit
def num_tiles_of(position, num_tokens, num_keys, reach, window, BLOCK_N: tl.constexpr):
    """First K/V tile that the queries from `position` on see, and how many from there; at least one."""
    first_key = position * 0
    if window is not None:
        first_key = tl.maximum(position - window + 1, 0)
    end_key = tl.maximum(tl.minimum(position + reach + num_tokens, num_keys), 0)
    first_tile = first_key // BLOCK_N
    return first_tile, tl.maximum(tl.cdiv(end_key, BLOCK_N) - first_tile, 1)


@triton.jit(
    do_not_specialize=["num_tiles", "causal", "window"],
    do_not_specialize_on_alignment=[
        "requests_ptr",
        "tokens_ptr",
        "head_tiles_ptr",
        "splits_ptr",
        "num_splits_ptr",
        "places_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "causal_ptr",
    ],
)
def fill_row_tiles_kernel(
    tiles_ptr,
    requests_ptr,
    tokens_ptr,
    head_tiles_ptr,
    splits_ptr,
    num_splits_ptr,
    places_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    causal_ptr,
    num_tiles,
    causal,
    window,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Records of 16 numbers as `row_tiles` and `merge` read them. TOKENS: of a full row tile.

    Where `splits_ptr` is not None, a record is one split of a row tile: a share of the K/V tiles, whose
    rows go to a place of their own. A split without any gets the tile past the last, which nobody
    sees.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < num_tiles
    request = tl.load(requests_ptr + i, mask=there, other=0)
    offset = tl.load(tokens_ptr + i, mask=there, other=0)
    head_tile = tl.load(head_tiles_ptr + i, mask=there, other=0)
    first = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first
    num_keys = tl.load(seq_lens_ptr + request)
    num_tokens = tl.minimum(query_len - offset, TOKENS)
    position = num_keys - query_len + offset
    reach = reach_of(causal_ptr, causal, window, request)
    _, num_kv_tiles = num_tiles_of(position, num_tokens, num_keys, reach, window, BLOCK_N)
    record = tiles_ptr + i * 16
    if splits_ptr is not None:
        split = tl.load(splits_ptr + i, mask=there, other=0)
        num_splits = tl.load(num_splits_ptr + i, mask=there, other=1)
        begin = num_kv_tiles * split // num_splits
        share = num_kv_tiles * (split + 1) // num_splits - begin
        tl.store(record + 8, tl.where(share == 0, num_kv_tiles, begin), mask=there)
        tl.store(record + 9, tl.load(places_ptr + i, mask=there, other=0), mask=there)
        tl.store(record + 10, split, mask=there)
        tl.store(record + 11, num_splits, mask=there)
        num_kv_tiles = tl.maximum(share, 1)
    tl.store(record, request, mask=there)
    tl.store(record + 1, first + offset, mask=there)
    tl.store(record + 2, head_tile, mask=there)
    tl.store(record + 3, num_tokens, mask=there)
    tl.store(record + 4, position, mask=there)
    tl.store(record + 5, reach, mask=there)
    tl.store(record + 6, num_keys, mask=there)
    tl.store(record + 7, num_kv_tiles, mask=there)


@triton.jit(
    do_not_specialize=["num_reqs", "causal", "window", "max_query_len", "num_programs"],
    do_not_specialize_on_alignment=[
        "share_ptr",
        "pieces_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "causal_ptr",
        "units_ptr",
    ],
)
def share_decodes_kernel(
    share_ptr,
    pieces_ptr,
    units_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    causal_ptr,
    num_reqs,
    causal,
    window,
    max_query_len,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    SPARE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
):
    """Program (request, KV head) writes the records of that unit's pieces.

    Units stand in a row: requests of 1 to max_query_len queries, in each the KV heads, in each the row
    tiles of TOKENS tokens. Their K/V tiles, counted over the batch, are cut into equal shares, at least
    LEAST. The record of unit u's piece in program p is at p + u: one of 16 numbers, as
    `pieces.read_piece` and what follows it read them. `share_ptr`: tiles of a share, tiles of a
    group, units, programs of a group and of all groups, and from 16 on the first record of each program,
    which is only there. `units_ptr`, where it is
    not None: of each unit 8 numbers as `fold` reads them.

    GROUPS: so many rows of units, each of as many KV heads, and as many programs for each. What programs
    of different groups do at a time is then the same place of the same requests.
    SPARE: where all units are alike, shares grow by up to so many percent if they then begin and end
    with units, or units with shares.
    """
    me = tl.program_id(0)
    kv_head = tl.program_id(1)
    HEADS: tl.constexpr = NUM_KV_HEADS // GROUPS
    group_programs = num_programs // GROUPS
    work = 0
    work_before = 0
    num_units = 0
    longest = 0
    units_before = 0
    for block in range(0, num_reqs, BLOCK_REQS):
        request = block + tl.arange(0, BLOCK_REQS)
        there = request < num_reqs
        first = tl.load(query_start_loc_ptr + request, mask=there, other=0)
        query_len = tl.load(query_start_loc_ptr + request + 1, mask=there, other=0) - first
        num_keys = tl.load(seq_lens_ptr + request, mask=there, other=0)
        mine = there & (query_len > 0) & (query_len <= max_query_len)
        # A request's row tiles all read the same keys: those that any of its queries sees.
        _, tiles = num_tiles_of(
            num_keys - query_len, query_len, num_keys, EVERYTHING, window, BLOCK_N
        )
        units = tl.where(mine, tl.cdiv(query_len, TOKENS) * HEADS, 0)
        work += tl.sum(units * tiles, 0)
        num_units += tl.sum(units, 0)
        longest = tl.maximum(longest, tl.max(tl.where(units > 0, tiles, 0), 0))
        units_before += tl.sum(tl.where(request < me, units, 0), 0)
        work_before += tl.sum(tl.where(request < me, units * tiles, 0), 0)
    size = tl.maximum(tl.cdiv(work, group_programs), LEAST)
    if SPARE > 0 and work == num_units * longest:
        whole = tl.cdiv(size, longest) * longest
        if size < longest:
            whole = tl.cdiv(longest, longest // size)
        if whole * 100 <= size * (100 + SPARE):
            size = whole
    if (me == 0) & (kv_head == 0):
        tl.store(share_ptr, size)
        tl.store(share_ptr + 1, work)
        tl.store(share_ptr + 2, num_units * GROUPS)
        tl.store(share_ptr + 3, group_programs)
        tl.store(share_ptr + 4, group_programs * GROUPS)

    first = tl.load(query_start_loc_ptr + me)
    query_len = tl.load(query_start_loc_ptr + me + 1) - first
    if (query_len <= 0) | (query_len > max_query_len):
        return
    num_keys = tl.load(seq_lens_ptr + me)
    first_tile, tiles = num_tiles_of(
        num_keys - query_len, query_len, num_keys, EVERYTHING, window, BLOCK_N
    )
    reach = reach_of(causal_ptr, causal, window, me)
    row_tiles = tl.cdiv(query_len, TOKENS)
    group = kv_head // HEADS
    for row_tile in range(0, row_tiles):
        unit = kv_head % HEADS * row_tiles + row_tile
        begin = work_before + unit * tiles
        end = begin + tiles
        unit += units_before + group * num_units
        # Counted in the group until the records are written.
        first_program = begin // size
        num_splits = (end - 1) // size - first_program + 1
        offset = row_tile * TOKENS
        num_tokens = tl.minimum(query_len - offset, TOKENS)
        if units_ptr is not None:
            tl.store(units_ptr + unit * 8, first + offset)
            tl.store(units_ptr + unit * 8 + 1, kv_head)
            tl.store(units_ptr + unit * 8 + 2, num_tokens)
            tl.store(units_ptr + unit * 8 + 3, num_splits)
            tl.store(units_ptr + unit * 8 + 4, group * group_programs + first_program)
        for block in range(0, num_splits, BLOCK_PIECES):
            split = block + tl.arange(0, BLOCK_PIECES)
            there = split < num_splits
            program = first_program + split
            piece_begin = tl.maximum(begin, program * size)
            piece_end = tl.minimum(end, program * size + size)
            here = group * group_programs + program
            record = pieces_ptr + (here + unit) * 16
            first_record = share_ptr + 16 + here * 16
            record = tl.where(piece_begin == program * size, first_record, record)
            zero = split * 0
            tl.store(record, me + zero, mask=there)
            tl.store(record + 1, first + offset + zero, mask=there)
            tl.store(record + 2, kv_head + zero, mask=there)
            tl.store(record + 3, num_tokens + zero, mask=there)
            tl.store(record + 4, num_keys - query_len + offset + zero, mask=there)
            tl.store(record + 5, reach + zero, mask=there)
            tl.store(record + 6, num_keys + zero, mask=there)
            tl.store(record + 7, first_tile + piece_begin - begin, mask=there)
            tl.store(record + 8, piece_end - piece_begin, mask=there)
            tl.store(record + 9, split, mask=there)
            tl.store(record + 10, num_splits + zero, mask=there)
            tl.store(record + 11, group * group_programs + first_program + zero, mask=there)
            tl.store(record + 12, unit + zero, mask=there)


@triton.jit
def put_num_keys(share_ptr, pieces_ptr, units_ptr, unit, num_keys):
    """Let the pieces of a unit end at fewer keys than were shared out; those past them see none."""
    num_splits = tl.load(units_ptr + unit * 8 + 3)
    first_program = tl.load(units_ptr + unit * 8 + 4)
    for block in range(0, num_splits, 32):
        split = block + tl.arange(0, 32)
        there = split < num_splits
        program = first_program + split
        tl.store(pieces_ptr + (program + unit) * 16 + 6, num_keys + split * 0, mask=there)
        # Where a piece is its program's first, it stands here instead.
        record = share_ptr + 16 + program * 16
        is_first = there & (tl.load(record + 12, mask=there, other=-1) == unit)
        tl.store(record + 6, num_keys + split * 0, mask=is_first)
