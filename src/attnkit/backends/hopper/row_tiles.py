"""Row tiles, as the prefill kernel reads what `plan_kernels.fill_row_tiles_kernel` wrote.

In: a record of 16 numbers: request, first token, head tile, number of tokens, position and reach of the
first token, keys of the request, and number of K/V tiles. Of a split also how many K/V tiles come
before, its place, which split it is, and of how many. Out: those numbers. Device code.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import gl, gluon


@gluon.jit
def read_request(tiles_ptr, i):
    """Row of the batch of row tile i."""
    return gl.load(tiles_ptr + i * 16)


@gluon.jit
def read_rows(tiles_ptr, i):
    """First token, head tile and number of tokens of row tile i."""
    record = tiles_ptr + i * 16
    return gl.load(record + 1), gl.load(record + 2), gl.load(record + 3)


@gluon.jit
def read_sight(tiles_ptr, i):
    """Position and reach of the first token, keys of the request and K/V tiles of row tile i."""
    record = tiles_ptr + i * 16
    return gl.load(record + 4), gl.load(record + 5), gl.load(record + 6), gl.load(record + 7)


@gluon.jit
def first_tile_of(tiles_ptr, i, first_key, CONFIG: gl.constexpr):
    """First K/V tile of row tile i, or of its split."""
    first_tile = first_key // CONFIG.block_n
    if CONFIG.split:
        first_tile += gl.load(tiles_ptr + i * 16 + 8)
    return first_tile


@gluon.jit
def place_of_rows(tiles_ptr, i, token, head_tile, CONFIG: gl.constexpr):
    """First token and head tile of the output. Splits have places of a row tile, one after the other."""
    if CONFIG.split:
        token = gl.load(tiles_ptr + i * 16 + 9) * CONFIG.tokens
        head_tile = token * 0
    return token, head_tile
