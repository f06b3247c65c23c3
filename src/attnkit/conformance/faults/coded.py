"""Wrong readers and writers of quantised caches, each with one mistake that real ones have made.

In: nothing. Out: `CODED_FAULTS`, name -> the wrong backend and the check that has to catch it, and
`CodedTwinBackend`, the twin without a mistake: fp8 with the layer's scales and int8 with scales beside
the codes, written apart from `kvcache/codecs.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attnkit.conformance.faults.fault import FaultTable
from attnkit.conformance.twin import TwinBackend, TwinImpl
from attnkit.contract import AttentionSpec, CommonAttentionMetadata
from attnkit.kvcache.formats import customize_spec

Tensor = torch.Tensor

_FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class CodedTwinImpl(TwinImpl):
    """Right attention over codes in small steps, so that a mistake can be put into any of them."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        block_size = kv_cache.shape[2]
        k_scale, v_scale = self.layer_scales(layer)
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cell = kv_cache.view(torch.uint8)[slot // block_size, :, slot % block_size]
                k = self.encode(key[row].float(), k_scale)
                v = self.encode(value[row].float(), v_scale)
                cell[:] = torch.cat([k, v], dim=-1)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CommonAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.layer = layer  # Reading pages takes its scales.
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)

    def gather(self, kv_cache: Tensor, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        block_size = kv_cache.shape[2]
        pages = kv_cache.view(torch.uint8)[table[: -(-kv_len // block_size)]]
        tokens = pages.permute(0, 2, 1, 3).flatten(0, 1)[:kv_len]
        k, v = tokens.split([self.head_size + self.side, self.head_size_v + self.side], dim=-1)
        k_scale, v_scale = self.layer_scales(self.layer)
        return self.decode(k, k_scale), self.decode(v, v_scale)

    @property
    def side(self) -> int:
        """Bytes of scales behind the codes of a vector."""
        return 4 if self.kv_cache_dtype not in _FLOAT8 else 0

    @property
    def head_size_v(self) -> int:
        return self.head_size

    def layer_scales(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Of K and V, (1 or heads, 1)."""
        return layer._k_scale.reshape(-1, 1), layer._v_scale.reshape(-1, 1)

    def encode(self, x: Tensor, scale: Tensor) -> Tensor:
        """Bytes (heads, size + side) of one token."""
        if self.side == 0:
            return self.to_float8(x / scale).view(torch.uint8)
        own = self.own_scale(x)
        codes = (x / own).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([codes.view(torch.uint8), own.view(torch.uint8)], dim=-1)

    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        """float32 (tokens, heads, size) of bytes."""
        if self.side == 0:
            return data.view(_FLOAT8[self.kv_cache_dtype]).float() * scale
        codes, own = data[..., : -self.side], data[..., -self.side :]
        return codes.view(torch.int8).float() * self.stored_scale(own.contiguous())

    def to_float8(self, x: Tensor) -> Tensor:
        dtype = _FLOAT8[self.kv_cache_dtype]
        largest = torch.finfo(dtype).max
        return x.clamp(-largest, largest).to(dtype)

    def own_scale(self, x: Tensor) -> Tensor:
        """(heads, 1), of one token."""
        return (x.abs().amax(-1, keepdim=True) / 127).clamp(min=2.0**-126)

    def stored_scale(self, data: Tensor) -> Tensor:
        """(tokens, heads, 1) of bytes."""
        return data.view(torch.float32)


class CodedTwinBackend(TwinBackend):
    """Claims codes whose values are as long as keys."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [*_FLOAT8, "int8_per_token_head"]
    impl_cls: ClassVar[type[TwinImpl]] = CodedTwinImpl

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return customize_spec(spec)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_head_size_v(cls, head_size: int, head_size_v: int) -> bool:
        return head_size == head_size_v


CODED_FAULTS = FaultTable(CodedTwinBackend)


@CODED_FAULTS.caught_by("case:fp8-decode-fp32")
class ScalesLeftOutByTheReader(CodedTwinImpl):
    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        return super().decode(data, torch.ones(1, 1))


@CODED_FAULTS.caught_by("case:fp8-decode-fp32")
class ScalesMultipliedByTheWriter(CodedTwinImpl):
    def encode(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().encode(x, 1 / scale)


@CODED_FAULTS.caught_by("case:fp8-decode-fp32")
class ValueScaleIsTheKeys(CodedTwinImpl):
    def layer_scales(self, layer: Any) -> tuple[Tensor, Tensor]:
        k_scale, _ = super().layer_scales(layer)
        return k_scale, k_scale


@CODED_FAULTS.caught_by("case:fp8-per_head_scales-mixed")
class FirstHeadsScaleForAll(CodedTwinImpl):
    def layer_scales(self, layer: Any) -> tuple[Tensor, Tensor]:
        k_scale, v_scale = super().layer_scales(layer)
        return k_scale[:1], v_scale[:1]


@CODED_FAULTS.caught_by("case:fp8-saturated-fp16")
class LargeNumbersBecomeNaN(CodedTwinImpl):
    def to_float8(self, x: Tensor) -> Tensor:
        return super().to_float8(torch.where(x.abs() > 448, torch.nan, x))


@CODED_FAULTS.caught_by("case:fp8-saturated-fp16")
class LargeNumbersWrap(CodedTwinImpl):
    def to_float8(self, x: Tensor) -> Tensor:
        return super().to_float8(torch.where(x.abs() > 448, x % 448, x))


@CODED_FAULTS.caught_by("case:fp8_e5m2-decode-fp32")
class DeclaredE5m2WrittenE4m3(CodedTwinImpl):
    def to_float8(self, x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn)


@CODED_FAULTS.caught_by("case:fp8-denormals-bf16")
class DenormalsFlushed(CodedTwinImpl):
    def to_float8(self, x: Tensor) -> Tensor:
        return super().to_float8(torch.where(x.abs() < 2.0**-6, 0.0, x))


@CODED_FAULTS.caught_by("case:fp8-decode-bf16")
class CodesCutOffInsteadOfRounded(CodedTwinImpl):
    def to_float8(self, x: Tensor) -> Tensor:
        nearest = super().to_float8(x)
        down = (nearest.view(torch.uint8) - 1).view(nearest.dtype)
        return torch.where(nearest.float().abs() > x.abs(), down.float(), nearest.float()).to(
            nearest.dtype
        )


@CODED_FAULTS.caught_by("case:int8_per_token_head-decode-fp32")
class OneScaleForAllHeadsOfAToken(CodedTwinImpl):
    def own_scale(self, x: Tensor) -> Tensor:
        own = super().own_scale(x)
        return own.amax(0, keepdim=True).expand_as(own)


@CODED_FAULTS.caught_by("case:int8_per_token_head-zeros-fp32")
class ZerosDividedByZero(CodedTwinImpl):
    def own_scale(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True) / 127


@CODED_FAULTS.caught_by("law:unread_memory_does_not_matter")
class ScalesOfWholePages(CodedTwinImpl):
    """Codes are read up to the length, scales are summed over all slots of the page."""

    def gather(self, kv_cache: Tensor, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        k, v = super().gather(kv_cache, table, kv_len)
        if self.side and kv_len:
            page = kv_cache.view(torch.uint8)[table[(kv_len - 1) // kv_cache.shape[2]]]
            k = k + 0.0 * self.stored_scale(page[..., -4:].contiguous()).sum()
        return k, v


@CODED_FAULTS.caught_by("law:scales_of_what_is_not_quantised_do_not_matter")
class ScoresTimesTheQueryScale(CodedTwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return super().score(score * self.layer._q_scale, ahead, seen)


@CODED_FAULTS.caught_by("law:scales_of_what_is_not_quantised_do_not_matter")
class ScoresTimesTheWeightsScale(CodedTwinImpl):
    def values(self, v: Tensor, seen: Tensor) -> Tensor:
        return super().values(v, seen) * self.layer._prob_scale
