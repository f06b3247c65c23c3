"""Pieces of decode work, as the decode kernels read what `plan_kernels` wrote.

In: shares of programs. Out: their pieces, one record of 16 numbers after the other. Device code.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import gl, gluon, mbarrier


@gluon.jit
def read_piece(record):
    """Start of a record of `plan_kernels.share_decodes_kernel`: request, first token, KV head, number of
    tokens, position and reach of the first token, keys of the request, first K/V tile and how many."""
    return (
        gl.load(record),
        gl.load(record + 1),
        gl.load(record + 2),
        gl.load(record + 3),
        gl.load(record + 4),
        gl.load(record + 5),
        gl.load(record + 6),
        gl.load(record + 7),
        gl.load(record + 8),
    )


@gluon.jit
def read_split(record):
    """Rest of a record: which piece of its unit it is, of how many, and the first one's program."""
    return gl.load(record + 9), gl.load(record + 10), gl.load(record + 11)


@gluon.jit
def read_unit(record):
    """End of a record: its unit."""
    return gl.load(record + 12)


@gluon.jit
def my_share(share_ptr, GROUPS: gl.constexpr):
    """First and end of this program's K/V tiles, counted over its group of programs, and its first
    record.

    First records have places of their own, so that a launch need not ask where they are.
    """
    me = gl.program_id(0)
    place = me
    size = gl.load(share_ptr)
    total = gl.load(share_ptr + 1)
    if GROUPS > 1:
        num_programs = gl.num_programs(0) // GROUPS
        place = me % num_programs
        # Programs that are left over have nothing to do.
        total = gl.where(me < num_programs * GROUPS, total, 0)
    return place * size, gl.minimum(place * size + size, total), share_ptr + 16 + me * 16


@gluon.jit
def read_share(share_ptr, share, LEVELS: gl.constexpr):
    """First and end of a share's K/V tiles, and its first record. A share past the last is empty."""
    record = share_ptr + 16 + share * 16
    total = gl.load(share_ptr + 1)
    if LEVELS == 1:
        size = gl.load(share_ptr)
        at = share * size
    else:
        num_programs = gl.num_programs(0)
        level = gl.minimum(share // num_programs, LEVELS - 1)
        size = gl.load(share_ptr + 4 + level)
        at = gl.load(share_ptr + 8 + level) + (share - level * num_programs) * size
    return at, gl.minimum(at + size, total), record


@gluon.jit
def next_share(
    CLAIMS: gl.constexpr,
    WARPS: gl.constexpr,
    num_claims,
    claims,
    claim_full,
    claim_empty,
    claims_ptr,
    share_ptr,
):
    """A share that nobody has yet. One role (CLAIMS) takes it and tells the others, through a ring of
    two; whoever takes the last leaves the count at zero for the next launch."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slot = num_claims % 2
    phase = (num_claims // 2) & 1
    if CLAIMS:
        share = gl.num_programs(0) + gl.atomic_add(claims_ptr, 1, sem="relaxed", scope="gpu")
        # Each program that had any takes one in vain.
        if share == gl.num_programs(0) + gl.load(share_ptr + 3):
            gl.store(claims_ptr, 0)
        mbarrier.wait(claim_empty.index(slot), phase ^ 1)
        claims.index(slot).store(gl.full([1], 0, gl.int32, LAYOUT) + share)
        mbarrier.arrive(claim_full.index(slot), count=1)
    else:
        mbarrier.wait(claim_full.index(slot), phase)
        share = gl.max(claims.index(slot).load(LAYOUT), 0)
        mbarrier.arrive(claim_empty.index(slot), count=1)
    return share
