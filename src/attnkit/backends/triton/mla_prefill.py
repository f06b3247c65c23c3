"""TritonMLAPrefill: prefills of layers over latents in the dense attention kernel.

In: as `MLAPrefillBackend`. Out: attention. Host code; on a GPU a launch is repeated from step to step
(`repeat`).
"""

from __future__ import annotations

import torch

from attnkit.backends.repeat import Repeats, kind_of
from attnkit.backends.stored import Stored
from attnkit.backends.triton.backend import TritonBackend
from attnkit.backends.triton.operands import Operands, OutputCodes, value_offset
from attnkit.contract import MLADimensions
from attnkit.mla.plan import ContextChunk, PrefillPart
from attnkit.mla.prefill_backend import DensePrefill
from attnkit.output_quant import QuantizedOutput


class TritonMLAPrefill(DensePrefill):
    """On any GPU that Triton compiles for, or in its interpreter."""

    dense_backend = TritonBackend

    def __init__(self, num_heads: int, scale: float, dimensions: MLADimensions) -> None:
        super().__init__(num_heads, scale, dimensions)
        self._repeats = Repeats()

    @staticmethod
    def get_name() -> str:
        return "triton"

    @classmethod
    def supports_dimensions(cls, dimensions: MLADimensions) -> str | None:
        sizes = (dimensions.qk_head_dim, dimensions.v_head_dim)
        if any(size % 8 or size > 512 for size in sizes):
            return (
                f"heads of {sizes[0]} / {sizes[1]} are not supported (multiples of 8 up to 512 are)"
            )
        return None

    def run_prefill_new_tokens(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefillPart,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        self._attend_to_own(query, key, value, plan, output, lse)

    @classmethod
    def supports_quant_output(cls) -> bool:
        return True

    def run_prefill_to_codes(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefillPart,
        output: QuantizedOutput,
        lse: torch.Tensor,
    ) -> None:
        codes = OutputCodes.of(output, self.num_heads, query.shape[0])
        self._attend_to_own(query, key, value, plan, codes, lse)

    def _attend_to_own(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefillPart,
        output: torch.Tensor | OutputCodes,
        lse: torch.Tensor,
    ) -> None:
        self._attend(
            Operands(
                query=rows_of(query),
                stored=Stored(key=key, value=value),
                output=output,
                lse=lse,
                query_start_loc=plan.query_start_loc,
                # Not read: the keys are the request's own tokens.
                kv_lens=plan.query_start_loc[1:],
                block_table=None,
                causal=True,
            )
        )

    def run_prefill_context_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: ContextChunk,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        self._attend(
            Operands(
                query=rows_of(query),
                stored=Stored(key=key.transpose(1, 2), value=value.transpose(1, 2)),
                output=output,
                lse=lse,
                query_start_loc=chunk.query_start_loc,
                kv_lens=chunk.kv_lens,
                block_table=chunk.block_table,
                causal=False,
            )
        )

    def _attend(self, operands: Operands) -> None:
        from attnkit.backends.triton import launch

        o, variant = operands, self._variant
        key, value = o.stored.key, o.stored.value
        config = launch.attention_config_of(o)
        # Keys belong to the step, and those of pages have as many tokens as these.
        kind = (*o.kind, kind_of(key, value), value_offset(key, value), key.shape[2:])
        self._repeats.launch(
            (*kind, o.query.device),
            None,
            launch.attention_grid(o, o.num_tokens, o.num_kv_heads, config),
            launch.attention_changes(o, variant, 1) | launch.key_changes(key, value),
            lambda: launch.attention_call(o, variant, 1, config),
        )


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if the elements of a row do not lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
