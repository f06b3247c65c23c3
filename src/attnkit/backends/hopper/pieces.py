"""Pieces of decode work, as the decode kernels read what `plan_kernels` wrote.

In: a program's share. Out: its pieces, one record of 16 numbers after the other. Device code.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import gl, gluon


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
def my_share(share_ptr):
    """First and end of this program's K/V tiles, counted over its group of programs, and its first
    record.

    First records have places of their own, so that a launch need not ask where they are.
    """
    me = gl.program_id(0)
    size = gl.load(share_ptr)
    total = gl.load(share_ptr + 1)
    group_programs = gl.load(share_ptr + 3)
    place = me % group_programs
    # Programs that are left over have nothing to do.
    total = gl.where(me < gl.load(share_ptr + 4), total, 0)
    return place * size, gl.minimum(place * size + size, total), share_ptr + 16 + me * 16
