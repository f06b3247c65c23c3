"""Cache formats: what the bytes of a page mean, byte by byte.

In: a format's name, K and V of a step, the layer's scales. Out: pages written in that format, pages
read back as float32, and specs whose pages have the format's bytes. Torch on any device and any
strides; a kernel that reads or writes pages agrees with this file.

The content of one token and one KV head, the last dimension of a page, is

    K codes | K scales | V codes | V scales

    format                          codes                    scales beside them    bytes (K; V alike)
    auto, float16, bfloat16, float32  the numbers            none                  D * itemsize
    fp8 = fp8_e4m3, fp8_e5m2        float8, one a byte       none                  D
    int8_per_token_head             int8                     one float32           D + 4
    fp8_per_token_head              float8_e4m3fn            one float32           D + 4
    int4_per_token_head             two a byte, low first    one float32           D / 2 + 4
    nvfp4                           e2m1, as int4            e4m3 per 16 numbers   D / 2 + D / 16

A number is code * scale. Where none stands beside the codes it is the layer's `_k_scale` or `_v_scale`,
one for all or one per KV head; nvfp4's is multiplied by both. Sizes of heads are multiples of 4
(int8, fp8 per token and head), 8 (int4) or 16 (nvfp4), so that float32 scales are aligned to 4 bytes
in pages that are. `codecs` says how numbers become codes: saturation, zeros, NaN.

A layer of latents (MLA) has one such row a token: the latent in place of K and the rotated part in place
of V, both scaled by `_k_scale`. `latent_format` gives the formats for those, among them

    fp8_ds_mla                      K float8, V bfloat16     float32 per 128 of K  L + L / 32 + 2 R

DeepSeek-V4's, which only that model's own kernels attend over, are in `deepseek_v4`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from attnkit.arguments import check_slots
from attnkit.contract import CACHE_DTYPES, AttentionSpec, KVQuantMode
from attnkit.errors import CacheError, ConfigurationError
from attnkit.kvcache.codecs import (
    BFloat16Codec,
    Codec,
    Fp8Codec,
    Fp8PerTokenHeadCodec,
    Fp8TileCodec,
    Fp8UnscaledCodec,
    Int4PerTokenHeadCodec,
    Int8PerTokenHeadCodec,
    Nvfp4Codec,
    Nvfp4LatentCodec,
)
from attnkit.kvcache.write import write_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentLayout:
    """Where the parts of one token and head begin, in bytes from the content's first byte.

    Attributes:
        k_scales, v_codes, v_scales: first bytes; scales that are not there have no bytes. K's codes lie
            before them all.
        num_bytes: of all of it.
    """

    k_scales: int
    v_codes: int
    v_scales: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """One way to store K and V. Take it from `cache_format`.

    Attributes:
        name: as in `CACHE_DTYPES`.
        dtype: of the cache tensor's elements; None: the model's ("auto"). Formats with a codec read
            and write bytes, so a uint8 or int8 view of the same pages will do as well.
        mode: the same as `KVQuantMode`.
        codec: numbers to bytes and back; None: the elements are the numbers.
        value_codec: the same for V, where it is another.
        scales_last: the scales beside K's codes lie behind V's codes, not before them.
    """

    name: str
    dtype: torch.dtype | None
    mode: KVQuantMode
    codec: Codec | None
    value_codec: Codec | None
    scales_last: bool = False

    @property
    def reads_layer_scales(self) -> bool:
        """`_k_scale` and `_v_scale` of the layer take part, per tensor or per KV head."""
        return self.codec is not None and self.codec.reads_layer_scale

    @property
    def has_own_scales(self) -> bool:
        """Scales lie beside the codes."""
        return self.codec is not None and not self.codec.reads_layer_scale

    def refusal(self, head_size: int, head_size_v: int) -> str | None:
        """Why heads of these sizes cannot be stored; None if they can."""
        for codec, size in ((self.codec, head_size), (self.value_codec, head_size_v)):
            if codec is not None and size % codec.granule:
                return (
                    f"KV cache dtype {self.name} needs head sizes that {codec.granule} divides, "
                    f"not {size}"
                )
        return None

    def layout(self, head_size: int, head_size_v: int) -> ContentLayout:
        """Byte offsets inside the content of a token and head.

        Raises:
            ConfigurationError: the head sizes do not fit, or the format is "auto", whose elements
                are the model's.
        """
        if (reason := self.refusal(head_size, head_size_v)) is not None:
            raise ConfigurationError(f"{reason}; use another format")
        if self.codec is None:
            if self.dtype is None:
                raise ConfigurationError(
                    'the bytes of "auto" are the model\'s own; name float16, bfloat16 or float32'
                )
            k, v = head_size * self.dtype.itemsize, head_size_v * self.dtype.itemsize
            return ContentLayout(k_scales=k, v_codes=k, v_scales=k + v, num_bytes=k + v)
        assert self.value_codec is not None
        k_codes, k_scale = self.codec.code_bytes(head_size), self.codec.scale_bytes(head_size)
        v_codes = self.value_codec.code_bytes(head_size_v)
        v_scales = k_codes + k_scale + v_codes
        return ContentLayout(
            k_scales=k_codes + v_codes if self.scales_last else k_codes,
            v_codes=k_codes if self.scales_last else k_codes + k_scale,
            v_scales=v_scales,
            num_bytes=v_scales + self.value_codec.scale_bytes(head_size_v),
        )

    def encode(
        self, key: torch.Tensor, value: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
    ) -> torch.Tensor:
        """Contents of tokens, as elements of the cache tensor.

        Args:
            key: (num_tokens, num_kv_heads, head_size).
            value: (num_tokens, num_kv_heads, head_size_v).
            k_scale, v_scale: float32, one number (shape () or (1,)) or (num_kv_heads,); finite and
                above zero, which the layer checks when it is loaded.

        Returns:
            (num_tokens, num_kv_heads, C) of `dtype`; "auto": of key's dtype.

        Raises:
            ConfigurationError: a scale has another shape, or the head sizes do not fit.
        """
        if self.codec is None:
            return torch.cat([key, value], dim=-1).to(self.dtype or key.dtype)
        layout = self.layout(key.shape[-1], value.shape[-1])
        num_kv_heads = key.shape[-2]
        k = self.codec.encode(key, _per_head("k_scale", k_scale, num_kv_heads))
        assert self.value_codec is not None
        v = self.value_codec.encode(value, _per_head("v_scale", v_scale, num_kv_heads))
        assert self.dtype is not None
        parts = [k, v]
        if self.scales_last:
            codes = layout.v_codes
            parts = [k[..., :codes], v, k[..., codes:]]
        return torch.cat(parts, dim=-1).view(self.dtype)

    def decode(
        self,
        contents: torch.Tensor,
        head_size: int,
        head_size_v: int,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of contents gathered from a cache, as float32.

        Args:
            contents: (..., num_kv_heads, C), whose last stride is 1.
            head_size, head_size_v: of the vectors to return.
            k_scale, v_scale: as in `encode`.

        Returns:
            (..., num_kv_heads, head_size) and (..., num_kv_heads, head_size_v).

        Raises:
            ConfigurationError: a scale has another shape, or the head sizes do not fit.
            CacheError: C is not what the format needs.
        """
        if self.codec is None:
            k, v = contents.split([head_size, head_size_v], dim=-1)
            return k.float(), v.float()
        layout = self.layout(head_size, head_size_v)
        data = self._bytes(contents, layout)
        if self.scales_last:
            v = data[..., layout.v_codes : layout.k_scales]
            k = torch.cat([data[..., : layout.v_codes], data[..., layout.k_scales :]], dim=-1)
        else:
            k, v = data.split([layout.v_codes, layout.num_bytes - layout.v_codes], dim=-1)
        num_kv_heads = contents.shape[-2]
        assert self.value_codec is not None
        return (
            self.codec.decode(k, head_size, _per_head("k_scale", k_scale, num_kv_heads)),
            self.value_codec.decode(v, head_size_v, _per_head("v_scale", v_scale, num_kv_heads)),
        )

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
    ) -> None:
        """Encode tokens into their slots; slot -1 writes nothing. No other byte changes.

        Args:
            key, value: as in `encode`, with at least as many rows as there are slots; rows past
                those are padding.
            kv_cache: (num_blocks, num_kv_heads, block_size, C), any strides but the last.
            slot_mapping: int64 (num_tokens,): block * block_size + offset.
            k_scale, v_scale: as in `encode`.

        Raises:
            ConfigurationError, CacheError: as in `encode` and `decode`, before anything is written.
            BatchError: a slot is past the end of the cache (on a GPU: a device-side assert); nothing
                has been written.
        """
        if self.codec is None:
            write_kv(key, value, kv_cache, slot_mapping)
            return
        pages = self._bytes(kv_cache, self.layout(key.shape[-1], value.shape[-1]))
        block_size, num_tokens = kv_cache.shape[2], slot_mapping.shape[0]
        check_slots(slot_mapping, kv_cache.shape[0], block_size)
        written = slot_mapping >= 0
        slots = slot_mapping[written]
        contents = self.encode(
            key[:num_tokens][written], value[:num_tokens][written], k_scale, v_scale
        )
        pages[slots // block_size, :, slots % block_size] = contents.view(torch.uint8)

    def _bytes(self, tensor: torch.Tensor, layout: ContentLayout) -> torch.Tensor:
        num_bytes = tensor.shape[-1] * tensor.element_size()
        if num_bytes != layout.num_bytes:
            raise CacheError(
                f"a token and head of this cache has {num_bytes} bytes, but {self.name} needs "
                f"{layout.num_bytes}; make the spec with the backend's customize_spec"
            )
        return tensor.view(torch.uint8)


def cache_format(name: str) -> CacheFormat:
    """The format of a `kv_cache_dtype`.

    Raises:
        ConfigurationError: no such format stores K and V side by side.
    """
    if name not in CACHE_FORMATS:
        raise ConfigurationError(
            f"{name!r} is no format for keys and values; use one of {', '.join(CACHE_FORMATS)}"
        )
    return CACHE_FORMATS[name]


def latent_format(name: str) -> CacheFormat:
    """The format of a `kv_cache_dtype` for rows of latents, K the latent and V the rotated part.

    Raises:
        ConfigurationError: no such format stores latents.
    """
    if name not in LATENT_FORMATS:
        raise ConfigurationError(
            f"{name!r} is no format for latents; use one of {', '.join(LATENT_FORMATS)}"
        )
    return LATENT_FORMATS[name]


def customize_spec(spec: AttentionSpec) -> AttentionSpec:
    """What a backend that reads these formats answers to `AttentionBackend.customize_spec`.

    A spec whose mode keeps scales beside the codes or packs two codes a byte gets the format's dtype
    and `state_content_bytes`, so that its page has the bytes that are written. Others, and specs
    that were packed already, come back as they are. Does not look at `block_size`.

    Raises:
        ConfigurationError: the head sizes do not fit the format.
    """
    packed = _PACKED_BY_MODE.get(spec.kv_quant_mode)
    if packed is None or spec.state_content_bytes is not None:
        return spec
    assert spec.head_size_v is not None
    return dataclasses.replace(
        spec,
        dtype=packed.dtype,
        state_content_bytes=packed.layout(spec.head_size, spec.head_size_v).num_bytes,
    )


def layer_scale(name: str, scale: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """A layer's scale as dense float32 (1,) or (num_kv_heads,), the same memory where it is that.

    Raises:
        ConfigurationError: it has another shape than one number or (num_kv_heads,).
    """
    if scale.numel() != 1 and scale.shape != (num_kv_heads,):
        raise ConfigurationError(
            f"{name} has shape {tuple(scale.shape)}; give one number, or one for each of the "
            f"{num_kv_heads} KV heads"
        )
    return scale.reshape(-1).to(torch.float32).contiguous()


def _per_head(name: str, scale: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The scale as (1, 1) or (num_kv_heads, 1)."""
    return layer_scale(name, scale, num_kv_heads)[:, None]


def format_refusal(kv_cache_dtype: str | None, head_size: int) -> str | None:
    """What `supports_combination` answers about a cache format, for backends that read them all.

    Args:
        kv_cache_dtype: None, and names that are no format, have a reason of their own.
        head_size: of keys and values.
    """
    if kv_cache_dtype not in CACHE_FORMATS:
        return None
    return cache_format(kv_cache_dtype).refusal(head_size, head_size)


def _format(
    name: str,
    codec: Codec | None,
    value_codec: Codec | None = None,
    *,
    scales_last: bool = False,
) -> CacheFormat:
    dtype, mode = CACHE_DTYPES[name]
    return CacheFormat(
        name=name,
        dtype=dtype,
        mode=mode,
        codec=codec,
        value_codec=value_codec or codec,
        scales_last=scales_last,
    )


CACHE_FORMATS: dict[str, CacheFormat] = {
    f.name: f
    for f in (
        _format("auto", None),
        _format("float16", None),
        _format("bfloat16", None),
        _format("float32", None),
        _format("fp8", Fp8Codec(torch.float8_e4m3fn)),
        _format("fp8_e4m3", Fp8Codec(torch.float8_e4m3fn)),
        _format("fp8_e5m2", Fp8Codec(torch.float8_e5m2)),
        _format("int8_per_token_head", Int8PerTokenHeadCodec()),
        _format("fp8_per_token_head", Fp8PerTokenHeadCodec()),
        _format("int4_per_token_head", Int4PerTokenHeadCodec()),
        _format("nvfp4", Nvfp4Codec()),
    )
}
"""Name -> format. Of `CACHE_DTYPES` only the formats of MLA latents are missing."""

_NAMES_OF_BOTH = (
    "auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2",
    "int8_per_token_head", "fp8_per_token_head",
)  # fmt: skip

LATENT_FORMATS: dict[str, CacheFormat] = {
    **{name: CACHE_FORMATS[name] for name in _NAMES_OF_BOTH},
    "fp8_ds_mla": _format("fp8_ds_mla", Fp8TileCodec(), BFloat16Codec()),
    "nvfp4_ds_mla": _format(
        "nvfp4_ds_mla", Nvfp4LatentCodec(), Fp8UnscaledCodec(), scales_last=True
    ),
}
"""Name -> format of the rows [latent | rotated part] of MLA layers."""

_PACKED_BY_MODE = {
    f.mode: f
    for f in CACHE_FORMATS.values()
    if f.mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
}
