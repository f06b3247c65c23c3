"""HopperMetadataBuilder: plan once per step and group of layers.

In: a batch. Out: `HopperMetadata`: row tiles of the requests to prefill, shared out on the host; pieces
of the requests to decode, shared out on the device from the device's own lengths.

A plan depends on the layer's heads and window, which a builder is not told. So it is made when the
first layer of the step asks for it, or, once a layer has ever asked, already by `build`, which keeps it
out of captured graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from attnkit.backends.hopper.config import PrefillConfig, ScoreConfig
from attnkit.backends.hopper.prefill_plan import RowTiles, RowWork, programs_beside
from attnkit.backends.hopper.tuning import (
    MAX_DECODE_QUERY_LEN,
    decode_config,
    decode_programs,
    decode_rows,
    prefill_config,
)
from attnkit.contract import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCacheSpec,
    max_decode_query_len,
)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What a plan depends on beside the batch.

    Attributes:
        num_kv_heads: of the layer.
        group_size: query heads per KV head.
        head_size: of queries, keys and values.
        page_size: keys in a page of its cache.
        window: keys that a query sees; None: no window.
        coded: its pages hold float8 codes.
    """

    num_kv_heads: int
    group_size: int
    head_size: int
    page_size: int
    window: int | None
    coded: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillPlan:
    """Arguments of `launch.prefill_call`; of coded pages also which ones are unpacked for it.

    Attributes:
        parts: where the splits of row tiles leave their rows, `launch.Parts`; None: there are none.
        pages: int32 (2, P): request, and which of its pages, for `cache_launch.unpack_call`.
        page_table: int32 (R, W): where in these P pages those of a request are.
    """

    starts: torch.Tensor
    num_programs: int
    records: torch.Tensor
    parts: Any = None
    pages: torch.Tensor | None = None
    page_table: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodePlan:
    """Arguments of `launch.decode_call`, for row tiles of `tile_rows`; `states` is a `launch.States`.

    Attributes:
        fold: of row tiles of 64 their units, a `fold_launch.FoldWork`; None: the decode kernel folds.
        beside: the prefill kernel before leaves multiprocessors for these decodes.
    """

    tile_rows: int
    share: torch.Tensor
    pieces: torch.Tensor
    states: Any
    fold: Any = None
    beside: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Work of a step for layers of one geometry. None: no such request in the batch."""

    prefill: PrefillPlan | None
    decode: DecodePlan | None


def num_sms_of(device: torch.device) -> int:
    """Multiprocessors; a few where nothing is that has them."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_row_tiles(
    tiles: RowTiles, lengths: Any, config: PrefillConfig, device: torch.device
) -> PrefillPlan:
    """Upload what was shared out, and let the device fill the records of it.

    Args:
        tiles: of a batch.
        lengths: its `plan_launch.Lengths`.
        config: of the prefill kernel.
        device: of the lengths.
    """
    from attnkit.backends.hopper.launch import Parts
    from attnkit.backends.hopper.plan_launch import row_tiles_call

    arrays = [tiles.starts, tiles.requests, tiles.tokens, tiles.head_tiles]
    parts = None
    if tiles.splits is not None:
        arrays += [*tiles.splits]
        parts = Parts.make(tiles.num_tiles, config, device)
    work = _upload(np.concatenate(arrays), device)
    records = torch.empty(tiles.num_tiles, 16, dtype=torch.int32, device=device)
    row_tiles_call(work, tiles.num_tiles, len(tiles.starts), records, lengths, config).launch()
    return PrefillPlan(starts=work, num_programs=tiles.num_programs, records=records, parts=parts)


class Planner:
    """Makes plans, in memory that stays where it is for captured graphs.

    Attributes:
        geometries: asked for so far.
    """

    def __init__(self, device: torch.device, max_num_reqs: int) -> None:
        self.geometries: set[Geometry] = set()
        self._device = device
        self._max_num_reqs = max_num_reqs
        self._num_sms = num_sms_of(device)
        self._decode_plans: dict[tuple[Geometry, int], DecodePlan] = {}

    def plan(self, batch: CommonAttentionMetadata, geometry: Geometry) -> Plan:
        """Plan a batch; launches, and never waits for the device."""
        from attnkit.backends.hopper.plan_launch import Lengths

        self.geometries.add(geometry)
        lengths = Lengths(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            causal=batch.causal,
            window=geometry.window,
        )
        if batch.max_query_len <= MAX_DECODE_QUERY_LEN:
            some = batch.num_reqs > 0 and batch.max_query_len > 0
            decode = self._decodes(lengths, geometry, batch.max_query_len) if some else None
            return Plan(prefill=None, decode=decode)
        query_lens = np.diff(batch.query_start_loc_cpu.numpy()).astype(np.int64)
        is_prefill = query_lens > MAX_DECODE_QUERY_LEN
        decodes = query_lens[(query_lens > 0) & ~is_prefill]
        kv_lens = np.full(len(query_lens), batch.max_seq_len, dtype=np.int64)
        if batch.seq_lens_cpu_upper_bound is not None:
            kv_lens = batch.seq_lens_cpu_upper_bound.numpy().astype(np.int64)
        prefill = self._prefills(lengths, query_lens, kv_lens, geometry, batch.causal)
        decode = None
        if decodes.size:
            decode = replace(
                self._decodes(lengths, geometry, int(decodes.max())),
                beside=prefill.num_programs < self._num_sms,
            )
        return Plan(prefill=prefill, decode=decode)

    def _prefills(
        self,
        lengths: Any,
        query_lens: np.ndarray,
        kv_lens: np.ndarray,
        geometry: Geometry,
        causal: bool | torch.Tensor,
    ) -> PrefillPlan:
        """Share out the requests that are not decoded, beside those that are."""
        g = geometry
        config = prefill_config(g.head_size, g.group_size, g.page_size, ScoreConfig())
        prompts = np.where(query_lens > MAX_DECODE_QUERY_LEN, query_lens, 0)
        work = RowWork.cut(
            prompts,
            kv_lens,
            g.num_kv_heads,
            config,
            # Per request, only the device knows; the balance is then that of causal requests.
            causal=isinstance(causal, torch.Tensor) or causal,
            window=g.window,
        )
        seen = kv_lens if g.window is None else np.minimum(kv_lens, g.window + query_lens)
        num_keys = int(seen[(prompts == 0) & (query_lens > 0)].sum())
        key_bytes = 2 * g.head_size * g.num_kv_heads * (1 if g.coded else 2)
        num_programs = self._num_sms
        if num_keys:
            num_programs = programs_beside(
                work, float(num_keys * key_bytes), g.head_size, self._num_sms
            )
        tiles = work.share(num_programs, may_split=True)
        plan = plan_row_tiles(tiles, lengths, config, self._device)
        return self._unpacked(plan, np.where(prompts > 0, kv_lens, 0), g) if g.coded else plan

    def _unpacked(self, plan: PrefillPlan, kv_lens: np.ndarray, geometry: Geometry) -> PrefillPlan:
        """With the pages of the requests to prefill, one request after the other."""
        num_pages = -(-kv_lens // geometry.page_size)
        starts = np.cumsum(num_pages) - num_pages
        requests = np.repeat(np.arange(len(kv_lens)), num_pages)
        indices = np.arange(len(requests)) - starts[requests]
        table = starts[:, None] + np.arange(max(1, num_pages.max()))
        return replace(
            plan,
            pages=_upload(np.concatenate([requests, indices]), self._device).view(2, -1),
            page_table=_upload(table.ravel(), self._device).view(table.shape),
        )

    def _decodes(self, lengths: Any, geometry: Geometry, longest: int) -> DecodePlan:
        """Share out the requests that are decoded, none of which has more queries than `longest`."""
        from attnkit.backends.hopper.fold_launch import FoldWork
        from attnkit.backends.hopper.launch import States
        from attnkit.backends.hopper.plan_launch import share_decodes_call

        g = geometry
        tile_rows = 16 if g.coded else decode_rows(g.group_size, longest)
        config = decode_config(
            g.head_size, g.group_size, g.page_size, ScoreConfig(), tile_rows, coded=g.coded
        )
        num_programs = decode_programs(config, self._num_sms)
        # Room for every batch of the engine, so that no later one moves what a graph was captured with.
        row_tiles = -(-MAX_DECODE_QUERY_LEN // (tile_rows // config.pack))
        num_reqs = max(lengths.seq_lens.shape[0], self._max_num_reqs)
        num_units = num_reqs * g.num_kv_heads * row_tiles
        num_records = num_programs + num_units
        plan = self._decode_plans.get((g, tile_rows))
        if plan is None or plan.pieces.shape[0] < num_records:
            states = States.make(num_programs, config, self._device)
            share = torch.zeros(16 + 16 * num_programs, dtype=torch.int32, device=self._device)
            fold = None
            if tile_rows == 64:
                fold = FoldWork(
                    share=share,
                    units=torch.zeros(num_units, 8, dtype=torch.int32, device=self._device),
                    acc=states.acc,
                    sums=states.sums,
                    num_rows=tile_rows,
                )
            plan = self._decode_plans[g, tile_rows] = DecodePlan(
                tile_rows=tile_rows,
                share=share,
                pieces=torch.zeros(num_records, 16, dtype=torch.int32, device=self._device),
                states=states,
                fold=fold,
            )
        share_decodes_call(
            plan.share,
            plan.pieces,
            lengths,
            g.num_kv_heads,
            num_programs,
            MAX_DECODE_QUERY_LEN,
            config,
            None if plan.fold is None else plan.fold.units,
            whole=longest > 1,
        ).launch()
        if plan.fold is None:
            return plan
        # No more programs than this batch can have units and rows.
        tokens = tile_rows // config.pack
        most = lengths.seq_lens.shape[0] * g.num_kv_heads * -(-longest // tokens)
        num_rows = min(longest, tokens) * config.pack
        return replace(
            plan, fold=replace(plan.fold, units=plan.fold.units[:most], num_rows=num_rows)
        )


# Neither frozen nor with slots: engines' wrappers subclass plans and assign their slot_mapping.
@dataclass(kw_only=True, eq=False)
class HopperMetadata:
    """One batch and its plans.

    Attributes:
        batch: as it came.
        block_table: int32 (R, W).
        slot_mapping: int64 (T,): where the layer writes this step's keys and values.
        planner: the builder's.
        plans: made so far, by geometry.
    """

    batch: CommonAttentionMetadata
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    planner: Planner
    plans: dict[Geometry, Plan] = field(default_factory=dict)

    @property
    def block_size(self) -> int | None:
        """Tokens in a page, as the batch says it; None: it does not."""
        return self.batch.block_size

    @property
    def views(self) -> tuple[str, ...]:
        """What wrappers made of the batch, outermost first."""
        return self.batch.views

    def plan(self, geometry: Geometry) -> Plan:
        """The work of layers of a geometry."""
        plan = self.plans.get(geometry)
        if plan is None:
            plan = self.plans[geometry] = self.planner.plan(self.batch, geometry)
        return plan


class HopperMetadataBuilder(AttentionMetadataBuilder[HopperMetadata]):
    """Plans of a group of layers. Requests may come in any order."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._planner = Planner(torch.device(device), max_num_reqs)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Decodes only: their work is shared out on the device, prefills on the host."""
        if max_decode_query_len(vllm_config) <= MAX_DECODE_QUERY_LEN:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: Any, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        return MAX_DECODE_QUERY_LEN

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HopperMetadata:
        metadata = HopperMetadata(
            batch=common_attn_metadata,
            block_table=common_attn_metadata.block_table_tensor,
            slot_mapping=common_attn_metadata.slot_mapping,
            planner=self._planner,
        )
        for geometry in self._planner.geometries:
            metadata.plan(geometry)
        return metadata

    def update_block_table(
        self,
        metadata: HopperMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> HopperMetadata:
        # Plans know lengths only, so both share them.
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


def _upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """One copy up that the host does not wait for."""
    buffer = torch.empty(len(values), dtype=torch.int32, pin_memory=device.type == "cuda")
    buffer.numpy()[:] = values
    return buffer.to(device, non_blocking=True)
