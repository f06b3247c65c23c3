"""HopperMLAMetadataBuilder: plan a batch of latents, its decodes shared out on the device.

In: a batch. Out: an `MLAMetadata` whose decodes are cut into pieces, for layers of each number of heads
that has ever asked; a builder is not told how many they have.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from attnkit.backends.hopper.config import LatentConfig
from attnkit.backends.hopper.plan import num_sms_of
from attnkit.backends.hopper.tuning import (
    MAX_LATENT_QUERY_LEN,
    latent_config,
    latent_rows,
)
from attnkit.contract import (
    AttentionCGSupport,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from attnkit.mla.builder import MLAMetadataBuilder
from attnkit.mla.plan import DecodePart, MLAMetadata


class LatentPlanner:
    """Shares out decodes, in memory that stays where it is for captured graphs.

    Attributes:
        layers: number of heads, and whether latents are codes, of layers that have asked so far.
    """

    def __init__(self, device: torch.device, max_num_reqs: int, block_size: int) -> None:
        self.layers: set[tuple[int, bool]] = set()
        self._device = device
        self._max_num_reqs = max_num_reqs
        self._block_size = block_size
        self._num_programs = num_sms_of(device)
        self._works: dict[tuple[Any, ...], Any] = {}
        self._states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def plan(self, part: DecodePart, num_heads: int, coded: bool) -> Any:
        """A `latent_launch.LatentWork`; launches, and never waits for the device."""
        self.layers.add((num_heads, coded))
        tile_rows = latent_rows(num_heads, part.max_query_len, coded=coded)
        config = latent_config(num_heads, self._block_size, tile_rows, lse=False, coded=coded)
        key = (num_heads, tile_rows, coded)
        num_reqs = part.seq_lens.shape[0]
        work = self._share(part, config, key, max(num_reqs, self._max_num_reqs))
        per_request = -(-part.max_query_len // (tile_rows // config.pack)) * config.head_tiles
        return replace(work, units=work.units[: num_reqs * per_request])

    def _share(
        self, part: DecodePart, config: LatentConfig, key: tuple[Any, ...], max_num_reqs: int
    ) -> Any:
        """The `LatentWork` of some requests, in the memory of `key`; there are up to `max_num_reqs`, and
        units of as many."""
        from attnkit.backends.hopper.latent_launch import LatentWork
        from attnkit.backends.hopper.plan_launch import Lengths, share_decodes_call

        tile_rows = config.tile_rows
        tokens = tile_rows // config.pack
        room = max_num_reqs * -(-part.max_query_len // tokens) * config.head_tiles
        num = self._num_programs
        # Layers run one after the other.
        if (states := self._states.get(tile_rows)) is None:
            states = self._states[tile_rows] = (
                torch.empty(2 * num, tile_rows, config.head_size, device=self._device),
                torch.empty(2 * num, tile_rows, 2, device=self._device),
            )
        work = self._works.get(key)
        if work is None or work.units.shape[0] < room:
            work = self._works[key] = LatentWork(
                share=self._empty(16 + 16 * num),
                pieces=self._empty(num + room, 16),
                units=self._empty(room, 8),
                acc=states[0],
                sums=states[1],
                num_rows=0,
            )
        share_decodes_call(
            work.share,
            work.pieces,
            Lengths(
                query_start_loc=part.query_start_loc,
                seq_lens=part.seq_lens,
                causal=True,
                window=None,
            ),
            config.head_tiles,
            num,
            part.max_query_len,
            config,
            work.units,
        ).launch()
        return replace(work, num_rows=min(part.max_query_len, tokens) * config.pack)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self._device)


# Neither frozen nor with slots: engines' wrappers subclass plans and assign their slot_mapping.
@dataclass(kw_only=True, eq=False)
class HopperMLAMetadata(MLAMetadata):
    """A planned batch.

    Attributes:
        planner: the builder's.
        works: made so far, by number of heads and whether latents are codes.
        is_captured: launched into a graph, which other lengths will be replayed with.
    """

    planner: LatentPlanner
    works: dict[tuple[int, bool], Any] = field(default_factory=dict)
    is_captured: bool = False

    def work(self, num_heads: int, coded: bool) -> Any:
        """The decodes' `latent_launch.LatentWork` for layers of so many heads over such latents."""
        work = self.works.get((num_heads, coded))
        if work is None:
            assert self.decode is not None, "a batch without decodes has no work"
            work = self.planner.plan(self.decode, num_heads, coded)
            self.works[num_heads, coded] = work
        return work


class HopperMLAMetadataBuilder(MLAMetadataBuilder):
    """Plans are replayed for batches of decodes."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    decode_query_len: ClassVar[int] = MAX_LATENT_QUERY_LEN

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._planner = LatentPlanner(
            torch.device(device),
            vllm_config.scheduler_config.max_num_seqs,
            kv_cache_spec.block_size,
        )

    @classmethod
    def get_plan_cls(cls) -> type[HopperMLAMetadata]:
        return HopperMLAMetadata

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HopperMLAMetadata:
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = HopperMLAMetadata(**vars(plan), planner=self._planner)
        if metadata.decode is not None:
            for layer in self._planner.layers:
                metadata.work(*layer)
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> HopperMLAMetadata:
        """Plan for any batch of decodes of at most these requests and queries, of any contexts."""
        plan = self.build(0, common_attn_metadata)
        assert plan.prefill is None, "only batches of decodes are captured"
        plan.is_captured = True
        return plan
