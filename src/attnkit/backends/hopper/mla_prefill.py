"""HopperMLAPrefill: prefills of layers over latents in the prefill kernel, on sm_90.

In: as `MLAPrefillBackend`. Out: attention. A request's keys lie one after the other, those of this step
and those of a chunk of its context alike, so there are no pages to look up. Work is shared out once a
step and chunk, for all layers of a shape. Importing this needs neither Triton nor a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnkit.backends.hopper.plan import PrefillPlan, num_sms_of, plan_row_tiles
from attnkit.backends.hopper.prefill_plan import RowWork
from attnkit.backends.hopper.sm90 import Sm90Backend
from attnkit.backends.hopper.tuning import LATENT_HEAD_SIZES, prefill_config
from attnkit.contract import MLADimensions
from attnkit.mla.plan import ContextChunk, PrefillPart
from attnkit.mla.prefill_backend import DensePrefill


@dataclass(frozen=True, kw_only=True, eq=False)
class RaggedPlan:
    """Row tiles, and `key_starts`: int32 (n, 1), the first row of each request's keys."""

    rows: PrefillPlan
    key_starts: torch.Tensor


class HopperMLAPrefill(DensePrefill):
    """Heads of DeepSeek-V2, -V3 and Kimi on Hopper GPUs, 16-bit."""

    dense_backend = Sm90Backend

    @staticmethod
    def get_name() -> str:
        return "hopper"

    @classmethod
    def supports_dimensions(cls, dimensions: MLADimensions) -> str | None:
        sizes = (dimensions.qk_head_dim, dimensions.v_head_dim)
        if sizes not in LATENT_HEAD_SIZES:
            allowed = ", ".join(f"{qk} / {v}" for qk, v in LATENT_HEAD_SIZES)
            return f"heads of {sizes[0]} / {sizes[1]} are not supported (allowed: {allowed})"
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
        starts = plan.query_start_loc
        work = plan.shared.get(self._shape)
        if work is None:
            lens = np.diff(plan.query_start_loc_cpu)
            rows = self._share(lens, lens, starts, starts.diff(), causal=True)
            work = RaggedPlan(rows=rows, key_starts=starts[:-1, None])
            plan.shared[self._shape] = work
        self._attend(query, key, value, work, output, lse)

    def run_prefill_context_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: ContextChunk,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        work = chunk.shared.get(self._shape)
        if work is None:
            query_lens = np.diff(chunk.query_start_loc_cpu)
            rows = self._share(
                query_lens, chunk.kv_lens_cpu, chunk.query_start_loc, chunk.kv_lens, causal=False
            )
            # A request's pages are neighbours here.
            work = RaggedPlan(rows=rows, key_starts=chunk.block_table[:, :1] * key.shape[1])
            chunk.shared[self._shape] = work
        self._attend(query, key.flatten(0, 1), value.flatten(0, 1), work, output, lse)

    @property
    def _shape(self) -> tuple[str, int]:
        """Layers that it is equal for share their work."""
        return self.get_name(), self.num_heads

    def _config(self) -> Any:
        from attnkit.backends.hopper.launch import score_config

        d = self.dimensions
        score = score_config(self._variant, lse=True)
        return prefill_config(d.qk_head_dim, 1, None, score, value_size=d.v_head_dim)

    def _share(
        self,
        query_lens: npt.NDArray[np.int64],
        kv_lens: npt.NDArray[np.int64],
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        causal: bool,
    ) -> PrefillPlan:
        from attnkit.backends.hopper.plan_launch import Lengths

        device, config = query_start_loc.device, self._config()
        work = RowWork.cut(query_lens, kv_lens, self.num_heads, config, causal=causal, window=None)
        tiles = work.share(num_sms_of(device), may_split=False)
        lengths = Lengths(
            query_start_loc=query_start_loc, seq_lens=seq_lens, causal=causal, window=None
        )
        return plan_row_tiles(tiles, lengths, config, device)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        work: RaggedPlan,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        from attnkit.backends.hopper.launch import Operands, can_copy, prefill_call

        query, key, value = (x if can_copy(x) else x.contiguous() for x in (query, key, value))
        operands = Operands(
            query=query,
            key=key[:, :, None],
            value=value[:, :, None],
            output=output,
            lse=lse,
            block_table=work.key_starts,
        )
        rows = work.rows
        prefill_call(
            operands, self._variant, rows.starts, rows.num_programs, rows.records, self._config()
        ).launch()
