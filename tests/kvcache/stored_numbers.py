"""What the bytes of each cache format mean, once more and in numpy: tables of every code, nearest
values by search, offsets written out. Shares nothing with `attnkit.kvcache`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = np.float32

PACKED = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4")
SCALED_BY_LAYER = ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
QUANTISED = ("fp8", "fp8_e4m3", "fp8_e5m2", *PACKED)


def magnitudes(exponent_bits: int, mantissa_bits: int, count: int) -> Array:
    """Values of the codes 0 to count - 1 of a small float without sign."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    codes = np.arange(count)
    exponent, fraction = codes // steps, codes % steps
    normal = (1 + fraction / steps) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, fraction / steps * 2.0 ** (1 - bias), normal)


E4M3 = magnitudes(4, 3, 0x7F)
E5M2 = magnitudes(5, 2, 0x7C)
E2M1 = magnitudes(2, 1, 8)
LAYER_TABLES = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}


def nearest(table: Array, x: Array) -> Array:
    """Signed code (sign in the bit above the table) of the nearest value, ties to even, saturating."""
    size = np.minimum(np.abs(x).astype(np.float64), table[-1])
    above = np.searchsorted(table, size).clip(1, len(table) - 1)
    below = above - 1
    up, down = table[above] - size, size - table[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    sign_bit = 1 << (len(table) - 1).bit_length()
    return (code + np.where(np.signbit(x), sign_bit, 0)).astype(np.uint8)


def value_of(table: Array, code: Array) -> Array:
    sign_bit = 1 << (len(table) - 1).bit_length()
    padded = np.concatenate([table, np.full(sign_bit - len(table), np.nan)])
    return np.where(code & sign_bit, -1.0, 1.0) * padded[code & (sign_bit - 1)]


def halves(codes: Array) -> Array:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unhalves(data: Array) -> Array:
    out = np.empty((*data.shape[:-1], data.shape[-1] * 2), dtype=np.uint8)
    out[..., 0::2], out[..., 1::2] = data & 15, data >> 4
    return out


def side_bytes(name: str, size: int) -> tuple[int, int]:
    """Bytes of codes and of scales of one vector."""
    return {
        "int8_per_token_head": (size, 4),
        "fp8_per_token_head": (size, 4),
        "int4_per_token_head": (size // 2, 4),
        "nvfp4": (size // 2, size // 16),
    }.get(name, (size, 0))


@np.errstate(all="ignore")
def encode(name: str, x: Array, scale: Array) -> Array:
    """uint8 (..., heads, bytes) of float32 (..., heads, size) without NaN; scale () or (heads, 1)."""
    scale = scale.astype(F32)
    if name in LAYER_TABLES:
        return nearest(LAYER_TABLES[name], x / scale)
    if name == "nvfp4":
        blocks = x.reshape(*x.shape[:-1], -1, 16)
        wanted = np.abs(blocks).max(-1) / (F32(6) * scale)
        own = nearest(E4M3, np.maximum(wanted, F32(2.0**-9)))
        step = value_of(E4M3, own).astype(F32) * scale
        codes = nearest(E2M1, blocks / step[..., None]).reshape(x.shape)
        return np.concatenate([halves(codes), own], -1)
    largest = F32({"int8": 127, "fp8_": 448, "int4": 7}[name[:4]])
    largest_here = np.minimum(np.abs(x).max(-1, keepdims=True), F32(2.0**127))
    own = np.maximum(largest_here / largest, F32(2.0**-126))
    quotients = np.clip(x / own, -largest, largest)
    if name == "fp8_per_token_head":
        codes = nearest(E4M3, quotients)
    else:
        codes = np.rint(quotients).astype(np.int8)
        codes = codes.view(np.uint8) if name[:4] == "int8" else halves((codes + 8).astype(np.uint8))
    return np.concatenate([codes, own.astype("<f4").view(np.uint8)], -1)


def decode(name: str, data: Array, size: int, scale: Array) -> Array:
    """float64 (..., heads, size) of uint8 (..., heads, bytes); scale () or (heads, 1)."""
    num_codes, _ = side_bytes(name, size)
    codes, own = data[..., :num_codes], np.ascontiguousarray(data[..., num_codes:])
    if name in LAYER_TABLES:
        return value_of(LAYER_TABLES[name], codes) * scale
    if name == "nvfp4":
        step = value_of(E4M3, own) * scale
        return value_of(E2M1, unhalves(codes)) * np.repeat(step, 16, axis=-1)
    step = own.view("<f4").astype(np.float64)
    if name == "int8_per_token_head":
        return codes.view(np.int8) * step
    if name == "fp8_per_token_head":
        return value_of(E4M3, codes) * step
    return (unhalves(codes).astype(np.float64) - 8) * step


def decode_content(
    name: str, data: Array, head_size: int, head_size_v: int, k_scale: Array, v_scale: Array
) -> tuple[Array, Array]:
    """K and V of uint8 (..., heads, content bytes)."""
    middle, end = sum(side_bytes(name, head_size)), sum(side_bytes(name, head_size_v))
    assert data.shape[-1] == middle + end
    data = np.ascontiguousarray(data)
    return (
        decode(name, np.ascontiguousarray(data[..., :middle]), head_size, k_scale),
        decode(name, np.ascontiguousarray(data[..., middle:]), head_size_v, v_scale),
    )


def largest_error(name: str, x: Array, scale: Array) -> Array:
    """How far a number may be from what is read back: half a step of its code. Not for numbers that
    saturate, nor for nvfp4 blocks whose scale is below e4m3's normal range."""
    size = np.abs(x).astype(np.float64)
    if name == "nvfp4":
        # Half of the widest step, 4 to 6, times a block scale that rounds up by at most 1/16.
        blocks = size.reshape(*x.shape[:-1], -1, 16)
        return np.repeat(blocks.max(-1) / 6 * 17 / 16, 16, axis=-1)
    largest = {"int8_per_token_head": 127, "fp8_per_token_head": 448, "int4_per_token_head": 7}
    if name in largest:
        own = np.maximum(size.max(-1, keepdims=True) / largest[name], 2.0**-126) + 0 * size
        half_step = own / 2
        if name == "fp8_per_token_head":
            half_step = np.maximum(size * 2.0**-4, own * 2.0**-10)
    elif name == "fp8_e5m2":
        half_step = np.maximum(size * 2.0**-3, scale * 2.0**-17)
    else:
        half_step = np.maximum(size * 2.0**-4, scale * 2.0**-10)
    return half_step * (1 + 1e-6)
