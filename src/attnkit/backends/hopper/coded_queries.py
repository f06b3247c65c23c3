"""Q as float16 beside float8 codes, for products of a warp (mma.sync).

In: rows of Q in shared memory, bfloat16 or float16. Out: float16 numbers there, and the operand that
stands beside four codes in a thread. A code becomes a float16 number in half an instruction, where
bfloat16 would cost two; so Q follows. Device code of the decode kernels.
"""


# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import barrier, fence_async_shared, gl, gluon


@gluon.jit
def make_float16(
    q_strips, q_numbers, OF_ROW: gl.constexpr, ROWS: gl.constexpr, STRIPS: gl.constexpr
):
    """Put Q back as float16, each row times the power of two that brings its largest number to between
    2 ** 14 and 2 ** 15. What that makes subnormal is below 2 ** -28 of the largest.

    q_strips, q_numbers: (STRIPS, ROWS, 64), the same memory. Columns are put where a plain matrix load,
    which is half the loads, hands them out as they stand beside four codes (`beside_codes`).

    Returns:
        what scores are multiplied by in turn, in the layout OF_ROW.
    """
    # A row is a warp's.
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    most = gl.zeros([ROWS, 64], gl.float32, WHOLE)
    for c in gl.static_range(STRIPS):
        x = q_strips.index(c).load(WHOLE).to(gl.float32)
        most = gl.maximum(most, gl.maximum(x, -x))
    exponent = gl.max(most, 1).to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(gl.maximum(268 - exponent, 1), 253)
    factor = gl.expand_dims((exponent << 23).to(gl.float32, bitcast=True), 1)
    for c in gl.static_range(STRIPS):
        # Loaded again: there are more numbers than registers.
        x = q_strips.index(c).load(WHOLE).to(gl.float32) * factor
        x = gl.reshape(x.to(gl.float16), [ROWS, 2, 2, 4, 2, 2])
        x = gl.reshape(gl.permute(x, [0, 1, 4, 2, 3, 5]), [ROWS, 64])
        barrier()
        q_numbers.index(c).store(x)
    fence_async_shared()
    barrier()
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    return gl.convert_layout(inverse, OF_ROW)


@gluon.jit
def beside_codes(q_tile, LAYOUT: gl.constexpr):
    """Load columns of such Q, a multiple of 64, as the operand beside codes. No register moves."""
    ROWS: gl.constexpr = q_tile.shape[0]
    COLUMNS: gl.constexpr = q_tile.shape[1]
    q = q_tile.load(gl.DotOperandLayout(0, LAYOUT, 2))
    q = gl.reshape(q, [ROWS, COLUMNS // 32, 2, 2, 4, 2])
    q = gl.reshape(gl.permute(q, [0, 1, 3, 4, 2, 5]), [ROWS, COLUMNS])
    return gl.convert_layout(q, gl.DotOperandLayout(0, LAYOUT, 4))


@gluon.jit
def beside_queries(k, LAYOUT: gl.constexpr):
    """Numbers of codes as a left operand beside such Q in shared memory. No register moves.

    k: (keys, 64), as `float16_of_codes` leaves them: four side by side.
    """
    KEYS: gl.constexpr = k.shape[0]
    k = gl.reshape(k, [KEYS, 2, 2, 4, 2, 2])
    k = gl.reshape(gl.permute(k, [0, 1, 4, 2, 3, 5]), [KEYS, 64])
    return gl.convert_layout(k, gl.DotOperandLayout(0, LAYOUT, 2))
