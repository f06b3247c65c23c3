"""Mistakes in what a forward leaves behind: its output, its LSE, its arguments.

In: nothing. Out: `OUTPUT_FAULTS`.
"""

from __future__ import annotations

from typing import Any

import torch

from attnkit.conformance.faults.fault import FaultTable
from attnkit.conformance.twin import TwinBackend, TwinImpl
from attnkit.contract import CommonAttentionMetadata, QuantKey, kFp8StaticTensorSym

Tensor = torch.Tensor

OUTPUT_FAULTS = FaultTable(TwinBackend)


@OUTPUT_FAULTS.caught_by("law:codes_of_outputs_are_those_of_numbers")
class ScaleOfTheOutputIgnored(TwinImpl):
    """Codes are the numbers themselves, whatever the next layer's scale is."""

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        return quant_key == kFp8StaticTensorSym

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
        rows = torch.zeros(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype)
        result = super().forward(layer, query, key, value, kv_cache, attn_metadata, rows)
        output.copy_(rows.view_as(output))
        return (output, result[1]) if isinstance(result, tuple) else output


@OUTPUT_FAULTS.caught_by("case:padding-decode-fp32")
class PaddingRowsZeroed(TwinImpl):
    def finish(self, output: Tensor, lse: Tensor, batch: CommonAttentionMetadata) -> None:
        output[batch.num_actual_tokens :] = 0


@OUTPUT_FAULTS.caught_by("law:profiling_writes_zeros")
class ProfilingLeavesTheOutput(TwinImpl):
    def profile(self, output: Tensor) -> Tensor:
        return output


@OUTPUT_FAULTS.caught_by("case:plain-decode-fp32")
class QueryScaledInPlace(TwinImpl):
    def forward(self, layer: Any, query: Tensor, *step: Any) -> Tensor | tuple[Tensor, Tensor]:
        result = super().forward(layer, query, *step)
        query.mul_(self.scale)
        return result


@OUTPUT_FAULTS.caught_by("law:lse_is_float32_per_token_and_head")
class LseInTheOutputDtype(TwinImpl):
    def forward(self, layer: Any, query: Tensor, *step: Any) -> Tensor | tuple[Tensor, Tensor]:
        result = super().forward(layer, query, *step)
        return (result[0], result[1].to(query.dtype)) if isinstance(result, tuple) else result
