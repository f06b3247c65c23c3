"""Codes of quantised caches: bytes to numbers where K and V are read, numbers to bytes where written.

In: bytes or numbers of a tile, in registers. Out: the numbers, exactly, in the dtype of the queries; or
codes equal to those of `kvcache/codecs.py` to the bit. Device code, shared by the attention, the decode
and the encode kernels. `kvcache/formats.py` says what the bytes of a format are.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from attnkit.backends.stored import Codes

E4M3 = tl.constexpr(int(Codes.E4M3))
INT4 = tl.constexpr(int(Codes.INT4))
NVFP4 = tl.constexpr(int(Codes.NVFP4))

BLOCK = tl.constexpr(16)
"""Numbers that share a scale of nvfp4."""
TILE = tl.constexpr(128)
"""Numbers of a latent that share a scale beside them."""
ONE_NAN = tl.constexpr(0x7FC00000)
"""Every NaN that is stored, as float32."""


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def e4m3_numbers(codes):
    """float16 from bytes. Shifted by 7 a magnitude is a float16 of 1 / 256 of its size, subnormal where
    the code is, and only the last one is NaN instead."""
    codes = codes.to(tl.uint16)
    magnitude = codes & 0x7F
    sign = (codes & 0x80) << 8
    x = (sign | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), x).to(tl.float16)


@triton.jit
def e2m1_numbers(codes):
    """float32 from the low four bits: shifted by 9 a float16 of 2^-14 of its size."""
    codes = codes.to(tl.uint16)
    x = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True)
    return x.to(tl.float32) * 16384.0


@triton.jit
def numbers(codes, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """(N, SIZE) numbers of (N, SIZE) or (N, SIZE / 2) codes, exactly; those of nvfp4 without the scales
    of their blocks."""
    if CODES == INT4:
        low = ((codes & 15).to(tl.int32) - 8).to(tl.float32)
        high = ((codes >> 4).to(tl.int32) - 8).to(tl.float32)
        x = tl.interleave(low.to(DTYPE), high.to(DTYPE))
    elif CODES == NVFP4:
        x = tl.interleave(e2m1_numbers(codes & 15), e2m1_numbers(codes >> 4))
    elif CODES == E4M3:
        x = e4m3_numbers(codes).to(DTYPE)
    else:
        if codes.dtype == tl.float8e5:
            # A float16 with fewer bits. Straight to bfloat16, Triton makes numbers of infinity and NaN.
            codes = codes.to(tl.float16)
        x = codes.to(DTYPE)
    return x


@triton.jit
def with_block_scales(x, scales, DTYPE: tl.constexpr):
    """(N, SIZE) numbers times (N, SIZE / BLOCK) e4m3 scales. A product has six significant bits."""
    rows: tl.constexpr = x.shape[0]
    size: tl.constexpr = x.shape[1]
    scales = e4m3_numbers(scales).to(tl.float32)
    blocks = tl.reshape(x, [rows, size // BLOCK, BLOCK]) * scales[:, :, None]
    return tl.reshape(blocks, [rows, size]).to(DTYPE)


@triton.jit
def with_tile_scales(x, scales, DTYPE: tl.constexpr):
    """(N, SIZE) numbers times (N, SIZE / TILE) float32 scales."""
    rows: tl.constexpr = x.shape[0]
    size: tl.constexpr = x.shape[1]
    tiles = tl.reshape(x.to(tl.float32), [rows, size // TILE, TILE]) * scales[:, :, None]
    return tl.reshape(tiles, [rows, size]).to(DTYPE)


@triton.jit
def divide(x, scale):
    """x / scale, rounded once as a division is. `scale`: of as many dimensions as x, with fewer numbers:
    their reciprocals are made once, and a quotient is mended by what it leaves (Markstein 1990), in half
    of the instructions.

    What is left has to be a number, so scales are neither very small nor very large; numbers so small
    that it is none are no codes but 0 over such a scale.
    """
    size = tl.abs(scale)
    everywhere = tl.broadcast_to(scale, x.shape)
    if (tl.min(size) >= 8.271806125530277e-25) & (tl.max(size) <= 1.2089258196146292e24):
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        inverse = tl.broadcast_to(inverse, x.shape)
        # Beyond 2^20 every code is the largest, and infinity times a scale would leave NaN.
        near = tl.minimum(tl.maximum(x * inverse, -1048576.0), 1048576.0)
        left = tl.fma(-near, everywhere, x)
        # A sum with what is left, 0, would lose the sign of -0.
        quotient = tl.where(left == 0, near, tl.fma(left, inverse, near))
    else:
        quotient = tl.div_rn(x, everywhere)
    return quotient


@triton.jit
def to_float8(x, E5M2: tl.constexpr, HAS_FLOAT8: tl.constexpr):
    """Bytes of float32 numbers: nearest, ties to even; too large becomes the largest, NaN 0x7F.

    That is what a device with float8 types does in one instruction. Without them, adding
    2^(23 - the exponent of the least subnormal) leaves exactly a subnormal's code at the low end.
    """
    if HAS_FLOAT8:
        codes = x.to(tl.float8e5) if E5M2 else x.to(tl.float8e4nv)
        return codes.to(tl.uint8, bitcast=True)
    BITS: tl.constexpr = 2 if E5M2 else 3
    REBIAS: tl.constexpr = 112 if E5M2 else 120
    LARGEST: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000
    LEAST_NORMAL: tl.constexpr = 0x38800000 if E5M2 else 0x3C800000
    ALIGNER: tl.constexpr = 128.0 if E5M2 else 16384.0
    ALIGNER_BITS: tl.constexpr = 0x43000000 if E5M2 else 0x46800000
    DROP: tl.constexpr = 23 - BITS
    bits = bits_of(x)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, LARGEST)
    even = (size >> DROP) & 1
    normal = ((size + ((1 << (DROP - 1)) - 1) + even) >> DROP) - (REBIAS << BITS)
    aligned = size.to(tl.float32, bitcast=True) + ALIGNER
    subnormal = bits_of(aligned) - ALIGNER_BITS
    code = sign | tl.where(size < LEAST_NORMAL, subnormal, normal)
    return tl.where(is_nan, 0x7F, code).to(tl.uint8)


@triton.jit
def to_integer(x):
    """Nearest integer, ties to even, of a number of less than 2^22."""
    shifted = x + 12582912.0
    return bits_of(shifted).to(tl.int32) - 0x4B400000


@triton.jit
def to_e2m1(x):
    """Four bits: nearest, ties to even, saturating at 6."""
    bits = bits_of(x)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    code = (bits >> 28) & 8
    code += (size > 0.25).to(tl.uint32) + (size >= 0.75).to(tl.uint32)
    code += (size > 1.25).to(tl.uint32) + (size >= 1.75).to(tl.uint32)
    code += (size > 2.5).to(tl.uint32) + (size >= 3.5).to(tl.uint32)
    return (code + (size > 5.0).to(tl.uint32)).to(tl.uint8)


@triton.jit
def quotients(x, scale, LARGEST: tl.constexpr):
    """x / scale within +-LARGEST; NaN becomes 0."""
    q = divide(x, scale)
    return tl.where(q == q, tl.minimum(tl.maximum(q, -LARGEST), LARGEST), 0.0)


@triton.jit
def token_scale(largest, LARGEST: tl.constexpr):
    """The scale beside codes of at most LARGEST, from the bits of the largest magnitude."""
    magnitude = tl.minimum(largest, 0x7F000000).to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, tl.full(magnitude.shape, LARGEST, tl.float32))
    bits = tl.maximum(bits_of(scale), 0x00800000)
    return tl.where(largest > 0x7F800000, ONE_NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def halves(codes):
    """(N, SIZE / 2) bytes of (N, SIZE) codes of four bits."""
    rows: tl.constexpr = codes.shape[0]
    size: tl.constexpr = codes.shape[1]
    low, high = tl.split(tl.reshape(codes, [rows, size // 2, 2]))
    return low | (high << 4)
