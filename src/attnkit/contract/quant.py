"""Names of quantised numbers: cache formats of K/V and keys of quantised outputs.

In: the strings users write (`kv_cache_dtype="fp8"`). Out: `KVQuantMode`, which an impl switches on,
the storage dtype, and `QuantKey`, by which a compiler asks an impl whether it can quantise its
output on the way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from attnkit.errors import ConfigurationError

CacheDType = str
"""A cache format's name; "auto" means the model's own dtype. See `CACHE_DTYPES`."""


class KVQuantMode(IntEnum):
    """How K and V are stored in the cache. Values are distinct; 0 is "as they are"."""

    NONE = 0
    """Numbers of the cache's dtype."""
    FP8_PER_TENSOR = 1
    """fp8 codes; the layer's `_k_scale` and `_v_scale` (one number, or one per KV head)."""
    INT8_PER_TOKEN_HEAD = 2
    """int8 codes and, in the page, a scale per token and head."""
    FP8_PER_TOKEN_HEAD = 3
    """fp8 codes and, in the page, a scale per token and head."""
    INT4_PER_TOKEN_HEAD = 4
    """4-bit codes, two in a byte, and, in the page, a scale per token and head."""
    NVFP4 = 5
    """4-bit floats, two in a byte, an fp8 scale per 16 of them, and the layer's scales on top."""
    FP8_DS_MLA = 6
    """DeepSeek's MLA row: 512 fp8 codes, four float32 scales, 64 bfloat16 rope values."""
    NVFP4_DS_MLA = 7
    """An MLA row of 512 4-bit floats, 64 fp8 rope values and an fp8 scale per 16 of the former."""


CACHE_DTYPES: dict[str, tuple[torch.dtype | None, KVQuantMode]] = {
    "auto": (None, KVQuantMode.NONE),
    "float16": (torch.float16, KVQuantMode.NONE),
    "bfloat16": (torch.bfloat16, KVQuantMode.NONE),
    "float32": (torch.float32, KVQuantMode.NONE),
    "fp8": (torch.float8_e4m3fn, KVQuantMode.FP8_PER_TENSOR),
    "fp8_e4m3": (torch.float8_e4m3fn, KVQuantMode.FP8_PER_TENSOR),
    "fp8_e5m2": (torch.float8_e5m2, KVQuantMode.FP8_PER_TENSOR),
    "int8_per_token_head": (torch.int8, KVQuantMode.INT8_PER_TOKEN_HEAD),
    "fp8_per_token_head": (torch.float8_e4m3fn, KVQuantMode.FP8_PER_TOKEN_HEAD),
    "int4_per_token_head": (torch.uint8, KVQuantMode.INT4_PER_TOKEN_HEAD),
    "nvfp4": (torch.uint8, KVQuantMode.NVFP4),
    "fp8_ds_mla": (torch.uint8, KVQuantMode.FP8_DS_MLA),
    "nvfp4_ds_mla": (torch.uint8, KVQuantMode.NVFP4_DS_MLA),
}
"""Format name -> (storage dtype, mode). The storage dtype of "auto" is the model's."""


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """The quantisation mode a cache format name stands for.

    Raises:
        ConfigurationError: the name is not in `CACHE_DTYPES`.
    """
    return _lookup(kv_cache_dtype)[1]


def kv_cache_torch_dtype(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the elements of the cache tensor: `model_dtype` for "auto".

    Raises:
        ConfigurationError: the name is not in `CACHE_DTYPES`.
    """
    return _lookup(kv_cache_dtype)[0] or model_dtype


def _lookup(kv_cache_dtype: str) -> tuple[torch.dtype | None, KVQuantMode]:
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in CACHE_DTYPES:
        raise ConfigurationError(
            f"kv_cache_dtype {kv_cache_dtype!r} is not known; use one of {', '.join(CACHE_DTYPES)}"
        )
    return CACHE_DTYPES[kv_cache_dtype]


class GroupShape(NamedTuple):
    """The rectangle of elements that share one scale: `row` by `col`; -1 spans the whole axis."""

    row: int
    col: int


@dataclass(frozen=True, slots=True)
class ScaleDesc:
    """One scale of a quantisation.

    Attributes:
        dtype: of the scale itself.
        static: known beforehand; False: computed from the values.
        group_shape: of the elements that share it.
    """

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True, slots=True)
class QuantKey:
    """What a quantised tensor looks like; equal keys are interchangeable.

    Attributes:
        dtype: of the codes (`torch.uint8` holds two fp4 codes).
        scale: the (inner) scale.
        scale2: the outer scale of two-level formats, or None.
        symmetric: no zero point.
    """

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


_TENSOR = GroupShape(-1, -1)
kFp8StaticTensorSym = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, True, _TENSOR))
kFp8Dynamic128Sym = QuantKey(
    torch.float8_e4m3fn, ScaleDesc(torch.float32, False, GroupShape(1, 128))
)
kFp8Dynamic64Sym = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, False, GroupShape(1, 64)))
kNvfp4Dynamic = QuantKey(
    torch.uint8,
    ScaleDesc(torch.float8_e4m3fn, False, GroupShape(1, 16)),
    ScaleDesc(torch.float32, True, _TENSOR),
)
