"""TritonImpl: run one layer through the Triton kernels.

In: a layer's static facts, then per step its tensors, its cache and a `TritonMetadata`. Out: attention
in `output`. Which kernel serves a request is decided on the device by its own number of queries: few
go to the decode kernel, which splits long contexts, the rest to the attention kernel. Both are
launched where a batch may need both, so decodes beside a prompt are decoded as fast as alone.
"""

from __future__ import annotations

import math

import torch

from attnkit.backends.dense import DenseImpl
from attnkit.backends.stored import Stored
from attnkit.backends.triton.configs import decode_config, decode_query_len, num_splits
from attnkit.backends.triton.operands import Operands, OutputCodes, Parts
from attnkit.backends.triton.plan import TritonMetadata
from attnkit.contract import (
    AttentionLayer,
    AttentionType,
    QuantKey,
)
from attnkit.output_quant import QuantizedOutput

_MAX_PARTS = 1 << 27
"""Float32 elements (512 MiB) that shared requests may take: batches whose parts need more have enough
requests to fill a device without sharing them."""

_CACHELESS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class TritonImpl(DenseImpl[TritonMetadata]):
    """One layer. Only launches between call and return."""

    backend_name = "triton"

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        return OutputCodes.are_supported(quant_key, self.head_size_v)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend over the cache, or over `key` and `value` themselves for the encoder types.

        Raises:
            UnsupportedConfiguration: the output is in codes that no kernel writes.
        """
        quantized = None
        if output_scale is not None or output_block_scale is not None:
            quantized = QuantizedOutput(
                codes=output, scale=output_scale, block_scale=output_block_scale
            )
            if not self.fused_output_quant_supported(quantized.key):
                self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            if quantized is None:
                output.zero_()
            else:
                quantized.write(query.new_zeros(quantized.shape))
            return output
        # Here, so that the class can be asked questions where Triton is not installed.
        from attnkit.backends.triton import launch

        plan = attn_metadata
        self.variant = self.variant.to(query.device)
        num_tokens = plan.num_actual_tokens
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = query.new_full((num_tokens, self.num_heads), -math.inf, dtype=torch.float32)
        cacheless = self.variant.attn_type in _CACHELESS
        is_decoder = self.variant.attn_type is AttentionType.DECODER
        if cacheless:
            stored = Stored(key=_rows(key[:num_tokens]), value=_rows(value[:num_tokens]))
        else:
            stored = self._stored(layer, kv_cache)
        written: torch.Tensor | OutputCodes = output[:num_tokens]
        if quantized is not None:
            written = OutputCodes.of(quantized, self.num_heads, num_tokens)
        operands = Operands(
            query=_rows(query[:num_tokens]),
            stored=stored,
            output=written,
            lse=lse,
            query_start_loc=plan.query_start_loc,
            kv_lens=plan.kv_lens,
            block_table=None if cacheless else plan.block_table,
            causal=plan.causal if is_decoder else False,
            spans=plan.spans if is_decoder else None,
            prefix_lens=plan.prefix_lens if is_decoder else None,
            tree=plan.tree if is_decoder else None,
        )
        decoded = 0
        if not cacheless:
            decoded = decode_query_len(operands.group_size, plan.decode_query_len)
        if plan.min_query_len <= decoded:
            self._decode(operands, plan, decoded)
        if plan.max_query_len > decoded:
            launch.launch_attention(operands, self.variant, min_query_len=decoded + 1)
        return output if lse is None else (output, lse)

    def _decode(self, operands: Operands, plan: TritonMetadata, decoded: int) -> None:
        """Serve the requests with at most `decoded` queries."""
        from attnkit.backends.triton import launch

        gpu = launch.gpu_of(operands.query.device)
        config = decode_config(
            self.head_size,
            self.head_size_v,
            operands.query.element_size(),
            operands.stored.key.element_size(),
            decoded * operands.group_size,
            gpu,
        )
        longest = max(plan.decode_query_len, min(decoded, plan.max_query_len))
        max_segments = max(1, min(config.max_segments, -(-plan.max_kv_len // config.segment)))
        splits = num_splits(
            operands.num_reqs * self.num_kv_heads,
            gpu.num_sms,
            max_segments,
            longest_to_mean=plan.longest_to_mean,
            is_captured=plan.is_captured,
        )
        numel = Parts.numel(operands, longest, max_segments)
        if numel > _MAX_PARTS:
            splits = 1
        parts = None
        if splits > 1:
            memory = plan.workspace.reserve(numel)
            parts = Parts.of(memory, operands, longest, max_segments)
        launch.launch_decode(
            operands,
            self.variant,
            max_query_len=decoded,
            num_splits=splits,
            parts=parts,
            config=config,
        )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's K and V; slot -1 writes nothing."""
        if kv_cache.numel() == 0:
            return
        from attnkit.backends.triton import launch

        launch.launch_write(_rows(key), _rows(value), self._stored(layer, kv_cache), slot_mapping)

    def _stored(self, layer: AttentionLayer, kv_cache: torch.Tensor) -> Stored:
        """The cache as the kernels read and write it."""
        from attnkit.backends.triton import launch

        return Stored.of(
            kv_cache,
            self.cache_format,
            self.head_size,
            self.head_size_v,
            layer._k_scale,
            layer._v_scale,
            has_e4m3=launch.gpu_of(kv_cache.device).has_e4m3,
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if the elements of a row do not lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
