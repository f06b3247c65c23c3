"""CpuBackend: what the CPU kernels can do, and the impl that runs a layer with them.

In: a batch's plan (`plan`) and a layer's tensors, all on the CPU. Out: attention in `output`, K and V
in the cache. One foreign call a layer does either; where the native library is not there (`native` says
why) the same is done in torch, request by request. Both give a request the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnkit.backends.cpu.attend import Request, attend
from attnkit.backends.cpu.launch import DTYPE_CODES
from attnkit.backends.cpu.native import native_kernels, native_status
from attnkit.backends.cpu.operands import NativeCodes, NativeLayer
from attnkit.backends.cpu.plan import CpuMetadata, CpuMetadataBuilder
from attnkit.backends.dense import DenseBackend, DenseImpl
from attnkit.contract import (
    AttentionLayer,
    AttentionType,
    DeviceCapability,
    KVCacheLayout,
    QuantKey,
)
from attnkit.errors import BatchError
from attnkit.kvcache.formats import (
    CacheFormat,
)
from attnkit.kvcache.read import check_block_ids
from attnkit.output_quant import OUTPUT_KEYS, QuantizedOutput, attend_then_quantize

_CACHELESS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class CpuBackend(DenseBackend):
    """Every variant of dense attention, any head size, page size and cache format, on the CPU."""

    @staticmethod
    def get_name() -> str:
        return "cpu"

    @staticmethod
    def get_impl_cls() -> type[CpuImpl]:
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type[CpuMetadataBuilder]:
        return CpuMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        # Long runs of one head's rows: 64 reads about 10 % faster than 16, larger no faster.
        return max(64, default_block_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Rows of a head in sequence are what memory delivers fastest.
        return KVCacheLayout.heads_first()

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.platform == "cpu"

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        # Splits and tiles lie at fixed positions of a request, so there is no mode to switch.
        return True

    @classmethod
    def describe_runtime(cls) -> str:
        return native_status()


class CpuImpl(DenseImpl[CpuMetadata]):
    """One layer on the CPU."""

    backend_name = "cpu"

    def prepare_layer(self) -> None:
        self.variant = self.variant.to("cpu")
        self._kernels = native_kernels()
        self._layer = NativeLayer.pack(
            self.variant, self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v
        )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K and V of this step.

        Raises:
            BatchError: a slot lies outside the cache, or the cache's rows are not dense; nothing has
                been written.
        """
        _check_rows(kv_cache)
        _check_dtype("key", key)
        if self._kernels is not None:
            codes = self._codes(layer)
            if codes is None and key.dtype != kv_cache.dtype:
                key, value = key.to(kv_cache.dtype), value.to(kv_cache.dtype)
            if not slot_mapping.is_contiguous():
                slot_mapping = slot_mapping.contiguous()
            self._kernels.write_kv(_rows(key), _rows(value), kv_cache, codes, slot_mapping)
        else:
            self.cache_format.write(
                key, value, kv_cache, slot_mapping, layer._k_scale, layer._v_scale
            )

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        return quant_key in OUTPUT_KEYS

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CpuMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend to the cache, or, in encoders, to `key` and `value` themselves.

        The LSE returned has the rows of the batch's own tokens; padding has none.

        Raises:
            BatchError: a dtype or stride the kernels do not read, or block ids outside the cache;
                nothing has been written.
        """
        if output_scale is not None or output_block_scale is not None:
            return attend_then_quantize(
                self.forward,
                self.head_size_v,
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                QuantizedOutput(codes=output, scale=output_scale, block_scale=output_block_scale),
            )
        if attn_metadata is None:
            output.zero_()
            return output
        _check_dtype("query", query)
        _check_dtype("output", output)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = torch.empty(attn_metadata.num_tokens, self.num_heads)
        attn_type = self.variant.attn_type
        rows = output if output.stride(2) == 1 else torch.empty_like(output).contiguous()
        if attn_type not in _CACHELESS:
            _check_rows(kv_cache)
        if self._kernels is None:
            self._attend_in_torch(layer, query, key, value, kv_cache, attn_metadata, rows, lse)
        elif attn_type in _CACHELESS:
            self._kernels.attend_tokens(
                attn_metadata.encoder,
                self._layer,
                _rows(query),
                _rows(key),
                _rows(value),
                rows,
                lse,
            )
        else:
            decoder = attn_type is AttentionType.DECODER
            self._kernels.attend_paged(
                attn_metadata.decoder if decoder else attn_metadata.cross,
                self._layer,
                _rows(query),
                kv_cache,
                self._codes(layer),
                rows,
                lse,
            )
        if rows is not output:
            output[: attn_metadata.num_tokens] = rows[: attn_metadata.num_tokens]
        return output if lse is None else (output, lse)

    def _codes(self, layer: AttentionLayer) -> NativeCodes | None:
        """The cache's format as the kernels read it; None: its elements are the numbers."""
        if self.cache_format.codec is None:
            return None
        return NativeCodes.pack(
            self.cache_format,
            self.head_size,
            self.head_size_v,
            self.num_kv_heads,
            layer._k_scale,
            layer._v_scale,
        )

    def _attend_in_torch(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: CpuMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """The torch path."""
        variant = self.variant
        cacheless = variant.attn_type in _CACHELESS
        kv_lens = plan.kv_lens(variant.attn_type).tolist()
        starts, causal = plan.query_start_loc.tolist(), plan.causal.tolist()
        is_decoder = variant.attn_type is AttentionType.DECODER
        spans = plan.spans if is_decoder else None
        tree = plan.tree if is_decoder else None
        prefixes = [0] * len(causal)
        if is_decoder and plan.prefix_lens is not None:
            prefixes = plan.prefix_lens.tolist()
        requests = []
        for request in plan.served.tolist():
            start, end = starts[request], starts[request + 1]
            requests.append(
                Request(
                    start=start,
                    q_len=end - start,
                    kv_len=end - start if cacheless else kv_lens[request],
                    causal=is_decoder and causal[request],
                    window=variant.sliding_window,
                    spans=None if spans is None else spans[start:end],
                    tree=None if tree is None else tree[start:end],
                    prefix=prefixes[request],
                    read=_Tokens(key[start:end], value[start:end])
                    if cacheless
                    else _Pages(
                        kv_cache,
                        plan.block_table[request],
                        self.cache_format,
                        self.head_size,
                        self.head_size_v,
                        layer._k_scale,
                        layer._v_scale,
                    ),
                )
            )
        num_tokens = plan.num_tokens
        attend(query[:num_tokens], requests, self.num_kv_heads, variant, output[:num_tokens], lse)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Keys and values that lie in order, (tokens, num_kv_heads, size) each."""

    key: torch.Tensor
    value: torch.Tensor

    def __call__(
        self, start: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.key[start:end].to(dtype), self.value[start:end].to(dtype)
        return key.transpose(0, 1), value.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Pages:
    """Keys and values of one request in a paged cache, gathered a few pages at a time."""

    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cache_format: CacheFormat
    head_size: int
    head_size_v: int
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def __call__(
        self, start: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        block_size = self.kv_cache.shape[2]
        first = start // block_size
        blocks = self.block_table[first : -(-end // block_size)]
        coded = self.cache_format.codec is not None
        # As bytes, since not every operation knows every 8-bit dtype.
        cache = self.kv_cache.view(torch.uint8) if coded else self.kv_cache
        check_block_ids(blocks, cache.shape[0])
        # Selecting whole pages and then moving heads outward is 7 times faster than the reverse.
        pages = cache.index_select(0, blocks).transpose(0, 1).flatten(1, 2)
        rows = pages[:, start - first * block_size : end - first * block_size]
        if not coded:
            rows = rows.to(dtype)
            return rows[..., : self.head_size], rows[..., self.head_size :]
        keys, values = self.cache_format.decode(
            rows.transpose(0, 1), self.head_size, self.head_size_v, self.k_scale, self.v_scale
        )
        return keys.to(dtype).transpose(0, 1), values.to(dtype).transpose(0, 1)


def _check_rows(kv_cache: torch.Tensor) -> None:
    """Refuse a cache whose rows are not dense: the kernels take every stride but that one."""
    if kv_cache.stride(3) != 1:
        raise BatchError(
            f"kv_cache has stride {kv_cache.stride(3)} in its last dimension; give a cache whose rows "
            "of K and V are dense (stride 1)"
        )


def _check_dtype(name: str, x: torch.Tensor) -> None:
    """Refuse what the kernels do not read."""
    if x.dtype not in DTYPE_CODES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
        raise BatchError(f"{name} is {x.dtype}; the cpu backend takes {allowed}")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with a dense last dimension."""
    return x if x.stride(2) == 1 else x.contiguous()
