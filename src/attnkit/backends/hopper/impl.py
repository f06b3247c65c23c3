"""HopperImpl: run one layer: write K and V, prefill, decode.

In: the layer's static facts once; then per step its tensors, its cache and the plan. Out: launches, for
attention one of prompts, one of decodes, and one more for each where splits are put together. Tensor
maps of the cache are kept from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from attnkit.backends.dense import DenseImpl
from attnkit.backends.hopper.config import ScoreConfig
from attnkit.backends.hopper.plan import DecodePlan, Geometry, HopperMetadata, PrefillPlan
from attnkit.backends.hopper.tuning import (
    CACHE_DTYPES,
    CODED_CACHE_DTYPES,
    HEAD_SIZES,
    MAX_CODED_GROUP_SIZE,
    MAX_GROUP_SIZE,
    decode_config,
    prefill_config,
)
from attnkit.backends.repeat import Repeats, kind_of
from attnkit.backends.stored import Stored
from attnkit.contract import AttentionLayer, AttentionType
from attnkit.errors import BatchError, CacheError, UnsupportedConfiguration

if TYPE_CHECKING:
    from attnkit.backends.hopper.config import DecodeConfig
    from attnkit.backends.hopper.fold_launch import FoldWork
    from attnkit.backends.hopper.launch import Operands, Parts
    from attnkit.backends.kernel_call import KernelCall

_NO_WINDOW = 1 << 29
"""From here on a window is longer than any request, and sums with it would leave int32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """One call of `HopperImpl.forward`.

    Attributes:
        shape: what configs are made of: head size, group size, page size and parts of the score.
        kind: what compiled kernels depend on beside it.
    """

    layer: AttentionLayer
    query: torch.Tensor
    kv_cache: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor | None
    metadata: HopperMetadata
    shape: tuple[int, int, int, ScoreConfig]
    kind: tuple[object, ...]


class HopperImpl(DenseImpl[HopperMetadata]):
    """One layer on sm_90. Its launches can be captured; prefills only inside one step."""

    backend_name = "hopper"

    def prepare_layer(self) -> None:
        self.group_size = self.num_heads // self.num_kv_heads
        variant = self.variant
        _refuse(
            self.head_size,
            self.head_size_v,
            self.group_size,
            self.kv_cache_dtype,
            variant.attn_type,
        )
        if variant.sliding_window is not None and variant.sliding_window >= _NO_WINDOW:
            self.variant = replace(variant, sliding_window=None)
        self._scores: dict[bool, ScoreConfig] = {}
        self._geometries: dict[int, Geometry] = {}
        self._repeats = Repeats()

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HopperMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend over the cache, in which this step's K and V already are.

        Raises:
            BatchError: the copy engine cannot read `query`.
            CacheError: it cannot read `kv_cache`, or that has another dtype than `query`.
        """
        self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            output.zero_()
            return output
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
        self.variant = self.variant.to(query.device)
        page_size = kv_cache.shape[2]
        table = attn_metadata.block_table
        step = _Step(
            layer=layer,
            query=query,
            kv_cache=kv_cache,
            output=output,
            lse=lse,
            metadata=attn_metadata,
            shape=(self.head_size, self.group_size, page_size, self._score(lse is not None)),
            kind=(kind_of(query, output), table.dtype, lse is None),
        )
        plan = attn_metadata.plan(self._geometry(page_size))
        if plan.prefill is not None:
            self._prefill(step, plan.prefill)
        if plan.decode is not None:
            self._decode(step, plan.decode)
        if plan.prefill is not None and plan.prefill.parts is not None:
            # Not before the decodes: these start while prompts are on their way.
            self._merge(step, plan.prefill, plan.prefill.parts)
        return output if lse is None else (output, lse)

    def _prefill(self, step: _Step, plan: PrefillPlan) -> None:
        """Prompts; of splits their parts."""
        from attnkit.backends.hopper.launch import prefill_call, prefill_changes

        is_split = plan.parts is not None
        config = prefill_config(*step.shape, scaled=self._is_coded, split=is_split)
        output, lse = (plan.parts.output, plan.parts.lse) if is_split else (step.output, step.lse)

        def call() -> KernelCall:
            operands = self._operands(step)
            if self._is_coded:
                operands = self._unpacked(operands, plan, step.metadata)
            operands = replace(operands, output=output, lse=lse)
            return prefill_call(
                operands, self.variant, plan.starts, plan.num_programs, plan.records, config
            )

        if self._is_coded:
            # The pages it reads are those of this step.
            call().launch()
            return
        table = step.metadata.block_table
        changing = prefill_changes(step.query, output, lse, table, plan.starts, plan.records)
        self._launch(step, ("prefill", is_split), (plan.num_programs,), changing, call)

    def _merge(self, step: _Step, plan: PrefillPlan, parts: Parts) -> None:
        """Splits of prompts put together."""
        from attnkit.backends.hopper.launch import merge_call, merge_changes, merge_grid

        work = (parts, plan.records, step.output, step.lse)
        config = prefill_config(*step.shape, scaled=self._is_coded, split=True)
        self._launch(
            step,
            ("merge",),
            merge_grid(plan.records),
            merge_changes(*work),
            lambda: merge_call(*work, self.variant.sinks, config),
        )

    def _decode(self, step: _Step, plan: DecodePlan) -> None:
        from attnkit.backends.hopper.launch import decode_call, decode_changes

        config = decode_config(
            *step.shape, plan.tile_rows, coded=self._is_coded, beside=plan.beside
        )
        work = (plan.share, plan.pieces, plan.states)
        table = step.metadata.block_table
        self._launch(
            step,
            ("decode", plan.tile_rows, plan.beside),
            plan.states.grid,
            decode_changes(step.query, step.output, step.lse, table, *work),
            lambda: decode_call(self._operands(step), self.variant, *work, config),
        )
        if plan.fold is not None:
            self._fold(step, plan.fold, config)

    def _fold(self, step: _Step, work: FoldWork, config: DecodeConfig) -> None:
        """Pieces of decodes put together."""
        from attnkit.backends.hopper.fold_launch import FoldShape, fold_call, fold_changes
        from attnkit.backends.hopper.launch import log2_scale

        shape = FoldShape.of(work)
        written = (work, step.output, step.lse)
        variant = self.variant
        self._launch(
            step,
            ("fold", shape),
            shape.grid(work),
            fold_changes(*written),
            lambda: fold_call(*written, config, log2_scale(variant), sinks=variant.sinks),
        )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        from attnkit.backends.hopper.cache_launch import write_call, write_changes, write_grid

        self._repeats.launch(
            ("write", kind_of(key, value), slot_mapping.dtype),
            kv_cache,
            write_grid(key, slot_mapping),
            write_changes(key, value, slot_mapping),
            lambda: write_call(key, value, self._stored(layer, kv_cache), slot_mapping),
            self._scales(layer),
        )

    def _launch(
        self,
        step: _Step,
        key: tuple[object, ...],
        grid: tuple[int, ...],
        changing: dict[str, Any],
        make: Callable[[], KernelCall],
    ) -> None:
        """A launch of attention; `key` says which."""
        whole = (*key, *step.kind)
        self._repeats.launch(whole, step.kv_cache, grid, changing, make, self._scales(step.layer))

    def _scales(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Those that kernels read."""
        return (layer._k_scale, layer._v_scale) if self._is_coded else None

    def _operands(self, step: _Step) -> Operands:
        """What a step reads and writes, if the copy engine can."""
        from attnkit.backends.hopper.launch import Operands, check_strides

        query, kv_cache = step.query, step.kv_cache
        check_strides("query", query, BatchError)
        check_strides("kv_cache", kv_cache, CacheError)
        stored = self._stored(step.layer, kv_cache)
        expected = torch.uint8 if self._is_coded else query.dtype
        if stored.key.dtype != expected:
            raise CacheError(
                f"kv_cache is {kv_cache.dtype}, query is {query.dtype}; the hopper backend reads "
                f"{expected} for kv_cache_dtype={self.kv_cache_dtype!r}"
            )
        return Operands(
            query=query,
            key=stored.key,
            value=stored.value,
            output=step.output,
            lse=step.lse,
            block_table=step.metadata.block_table,
            k_scale=stored.k_scale,
            v_scale=stored.v_scale,
        )

    @property
    def _is_coded(self) -> bool:
        return self.cache_format.reads_layer_scales

    def _stored(self, layer: AttentionLayer, kv_cache: torch.Tensor) -> Stored:
        # Codes as bytes: the copy engine has no float8.
        size, k_scale, v_scale = self.head_size, layer._k_scale, layer._v_scale
        return Stored.of(kv_cache, self.cache_format, size, size, k_scale, v_scale, has_e4m3=False)

    def _unpacked(
        self, operands: Operands, plan: PrefillPlan, metadata: HopperMetadata
    ) -> Operands:
        """The operands of a prefill over coded pages: over copies of them that hold numbers."""
        from attnkit.backends.hopper.cache_launch import unpack_call

        assert plan.pages is not None, "the plan was made for other pages"
        assert plan.page_table is not None
        _, num_kv_heads, page_size, size = operands.key.shape
        num_pages = max(1, plan.pages.shape[1])
        pool = operands.query.new_empty(num_pages, num_kv_heads, page_size, 2 * size)
        unpack_call(operands, plan.pages, metadata.batch.seq_lens, pool).launch()
        return replace(
            operands, key=pool[..., :size], value=pool[..., size:], block_table=plan.page_table
        )

    def _geometry(self, page_size: int) -> Geometry:
        geometry = self._geometries.get(page_size)
        if geometry is None:
            geometry = self._geometries[page_size] = Geometry(
                num_kv_heads=self.num_kv_heads,
                group_size=self.group_size,
                head_size=self.head_size,
                page_size=page_size,
                window=self.variant.sliding_window,
                coded=self._is_coded,
            )
        return geometry

    def _score(self, lse: bool) -> ScoreConfig:
        score = self._scores.get(lse)
        if score is None:
            from attnkit.backends.hopper.launch import score_config

            score = self._scores[lse] = score_config(self.variant, lse=lse)
        return score


def _refuse(
    head_size: int,
    head_size_v: int | None,
    group_size: int,
    kv_cache_dtype: str,
    attn_type: str,
) -> None:
    """Say everything about a layer that the kernels do not do.

    Raises:
        UnsupportedConfiguration: with every reason.
    """
    reasons = []
    if head_size not in HEAD_SIZES:
        reasons.append(f"head size {head_size} is not one of {', '.join(map(str, HEAD_SIZES))}")
    if head_size_v not in (None, head_size):
        reasons.append(f"value head size {head_size_v} differs from key head size {head_size}")
    if group_size > MAX_GROUP_SIZE:
        reasons.append(
            f"{group_size} query heads share a KV head, and at most {MAX_GROUP_SIZE} can"
        )
    if kv_cache_dtype not in CACHE_DTYPES:
        reasons.append(f"KV cache dtype {kv_cache_dtype} is not one of {', '.join(CACHE_DTYPES)}")
    elif kv_cache_dtype in CODED_CACHE_DTYPES and group_size > MAX_CODED_GROUP_SIZE:
        reasons.append(
            f"{group_size} query heads share a KV head, and with KV cache dtype {kv_cache_dtype} at "
            f"most {MAX_CODED_GROUP_SIZE} can"
        )
    if attn_type != AttentionType.DECODER:
        reasons.append(f"attention type {attn_type} is not decoder")
    if reasons:
        raise UnsupportedConfiguration(
            f"hopper: {'; '.join(reasons)}. Change the layer, or use backend='triton'",
            tuple(reasons),
        )
