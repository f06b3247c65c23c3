"""Stored: a layer's cache as the kernels read and write it.

In: a cache tensor, its format, the layer's scales. Out: views of the codes of K and V and of the scales
beside them, and what tells the kernels apart: none of it copied. Host code; does not need Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from attnkit.errors import CacheError
from attnkit.kvcache.codecs import PerTokenHeadCodec
from attnkit.kvcache.formats import CacheFormat, layer_scale


class Codes(IntEnum):
    """What an element of the pages is, for kernels that read them. From INT4 on it holds two codes."""

    NUMBERS = 0
    """A number of its dtype, float8 and int8 too."""
    E4M3 = 1
    """A byte that is a float8_e4m3fn, for devices without that type."""
    INT4 = 2
    """Two codes, low half first, each 8 more than the number."""
    NVFP4 = 3
    """Two e2m1 codes, low half first; an e4m3 scale per 16 numbers stands behind the codes."""


class Encoding(IntEnum):
    """What the write makes of a number. From INT4 on two of them share a byte."""

    NONE = 0
    """The number itself, rounded to the dtype of the pages."""
    E4M3 = 1
    E5M2 = 2
    INT8 = 3
    INT4 = 4
    NVFP4 = 5


_ENCODINGS = {
    "fp8": Encoding.E4M3,
    "fp8_e4m3": Encoding.E4M3,
    "fp8_e5m2": Encoding.E5M2,
    "int8_per_token_head": Encoding.INT8,
    "fp8_per_token_head": Encoding.E4M3,
    "int4_per_token_head": Encoding.INT4,
    "nvfp4": Encoding.NVFP4,
}
"""Of the formats with codes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """Views of one cache. B blocks of N tokens, H KV heads.

    Attributes:
        key, value: (B, H, N, bytes or numbers of the codes).
        codes: what an element of them is.
        encoding: how it is made.
        k_scales, v_scales: beside the codes: float32 (B, H, N), or of NVFP4 uint8 (B, H, N, size / 16);
            None: there are none.
        k_scale, v_scale: the layer's, float32 (1,) or (H,), of one shape; None: they have no part.
        has_float8: the device makes float8 of numbers (from sm_89 on).
    """

    key: torch.Tensor
    value: torch.Tensor
    codes: Codes = Codes.NUMBERS
    encoding: Encoding = Encoding.NONE
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    has_float8: bool = True

    @classmethod
    def of(
        cls,
        kv_cache: torch.Tensor,
        cache_format: CacheFormat,
        head_size: int,
        head_size_v: int,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        *,
        has_e4m3: bool = True,
    ) -> Stored:
        """The parts of a layer's cache.

        Args:
            kv_cache: (B, H, N, C), any strides but the last.
            cache_format: of its pages.
            head_size, head_size_v: of the layer; they fit the format.
            k_scale, v_scale: the layer's, one number or (H,).
            has_e4m3: the device has a type float8_e4m3fn.

        Raises:
            ConfigurationError: a scale has another shape.
            CacheError: pages are not aligned to the float32 scales in them.
        """
        if cache_format.codec is None:
            return cls(key=kv_cache[..., :head_size], value=kv_cache[..., head_size:])
        heads, encoding = kv_cache.shape[1], _ENCODINGS[cache_format.name]
        layout = cache_format.layout(head_size, head_size_v)
        data = kv_cache.view(torch.uint8)
        key, value = data[..., : layout.k_scales], data[..., layout.v_codes : layout.v_scales]
        codes, beside = Codes.NUMBERS, (None, None)
        if isinstance(cache_format.codec, PerTokenHeadCodec):
            words = float32_view(data)
            beside = words[..., layout.k_scales // 4], words[..., layout.v_scales // 4]
        if encoding is Encoding.NVFP4:
            codes = Codes.NVFP4
            beside = data[..., layout.k_scales : layout.v_codes], data[..., layout.v_scales :]
        elif encoding is Encoding.INT4:
            codes = Codes.INT4
        elif encoding is Encoding.E4M3 and not has_e4m3:
            codes = Codes.E4M3
        else:
            assert cache_format.dtype is not None
            key, value = key.view(cache_format.dtype), value.view(cache_format.dtype)
        scales = (None, None)
        if cache_format.reads_layer_scales:
            k, v = layer_scale("k_scale", k_scale, heads), layer_scale("v_scale", v_scale, heads)
            if k.numel() != v.numel():
                k, v = k.expand(heads).contiguous(), v.expand(heads).contiguous()
            scales = k, v
        return cls(
            key=key,
            value=value,
            codes=codes,
            encoding=encoding,
            k_scales=beside[0],
            v_scales=beside[1],
            k_scale=scales[0],
            v_scale=scales[1],
            has_float8=has_e4m3,
        )

    @property
    def has_token_scales(self) -> bool:
        """A float32 scale stands beside the codes of every vector."""
        return self.k_scales is not None and self.k_scales.dtype is torch.float32

    @property
    def is_scaled_per_head(self) -> bool:
        """The layer has a scale for each KV head."""
        return self.k_scale is not None and self.k_scale.numel() > 1

    @property
    def unit(self) -> int:
        """Elements of `key` and `value` that strides of `places` count."""
        return 4 if self.has_token_scales else 1

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Whose strides say where a vector of K or V lies.

        With float32 scales those, in words: code and scale of a token are then at one offset, and a
        kernel sees that loads of codes are aligned to four bytes.
        """
        if not self.has_token_scales:
            return self.key, self.value
        assert self.k_scales is not None
        assert self.v_scales is not None
        return self.k_scales, self.v_scales


def float32_view(data: torch.Tensor) -> torch.Tensor:
    """Bytes as float32 (B, H, N, bytes / 4).

    Raises:
        CacheError: they are not aligned to it.
    """
    if data.data_ptr() % 4 or any(stride % 4 for stride in data.stride()[:3]):
        raise CacheError(
            "pages hold float32 scales, so they need addresses and strides that 4 divides, but the "
            f"cache has strides of {data.stride()[:3]} bytes; allocate it with PagedKVCache"
        )
    return data.view(torch.float32)
