"""HopperMLAMetadataBuilder: plan a batch of latents, its decodes shared out on the device.

In: a batch. Out: an `MLAMetadata` whose decodes are cut into pieces, for each kind of layers that has
ever asked; a builder is not told how many heads they have.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch

from attnkit.backends.hopper.config import LatentConfig
from attnkit.backends.hopper.plan import num_sms_of
from attnkit.backends.hopper.tuning import (
    MAX_LATENT_QUERY_LEN,
    code_rows,
    latent_config,
    latent_rows,
)
from attnkit.contract import CommonAttentionMetadata, KVCacheSpec
from attnkit.mla.builder import ReplayedMLAMetadataBuilder
from attnkit.mla.plan import DecodePart, MLAMetadata


class Layers(NamedTuple):
    """What layers are planned alike for.

    Attributes:
        num_heads: of each.
        coded: latents are codes.
    """

    num_heads: int
    coded: bool


class LatentPlanner:
    """Shares out decodes, in memory that stays where it is for captured graphs.

    Attributes:
        kinds: `Layers` that have asked so far.
        captured_reqs: requests of the largest step that was captured; a graph of it may be replayed for
            fewer.
    """

    def __init__(self, device: torch.device, max_num_reqs: int, block_size: int) -> None:
        self.kinds: set[Any] = set()
        self.captured_reqs = 0
        self._device = device
        self._max_num_reqs = max_num_reqs
        self._block_size = block_size
        self._num_programs = num_sms_of(device)
        self._works: dict[tuple[Any, ...], Any] = {}
        self._states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def plan(self, part: DecodePart, num_tokens: int, kind: Any) -> Any:
        """What layers of a kind work on; launches, and never waits for the device.

        Args:
            part: of the batch.
            num_tokens: its queries.
            kind: `Layers`.

        Returns:
            A `latent_launch.LatentWork`.
        """
        num_reqs = part.seq_lens.shape[0]
        tile_rows = self._rows(part, kind, num_reqs)
        # A graph of more requests reads what its own row tiles are given.
        captured = self._rows(part, kind, max(num_reqs, self.captured_reqs))
        if captured != tile_rows:
            self._share_rows(part, kind, captured)
        work, config = self._share_rows(part, kind, tile_rows)
        per_request = -(-part.max_query_len // (tile_rows // config.pack)) * config.head_tiles
        return replace(work, units=work.units[: num_reqs * per_request])

    def _rows(self, part: DecodePart, kind: Layers, num_reqs: int) -> int:
        if not kind.coded:
            return latent_rows(kind.num_heads, part.max_query_len)
        return code_rows(kind.num_heads, part.max_query_len, num_reqs, self._num_programs)

    def _share_rows(
        self, part: DecodePart, kind: Layers, tile_rows: int
    ) -> tuple[Any, LatentConfig]:
        config = latent_config(
            kind.num_heads, self._block_size, tile_rows, lse=False, coded=kind.coded
        )
        max_num_reqs = max(part.seq_lens.shape[0], self._max_num_reqs)
        return self._share(part, config, (*kind, tile_rows), max_num_reqs), config

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
class SharedMLAMetadata(MLAMetadata):
    """A planned batch whose decodes are shared out.

    Attributes:
        planner: the builder's.
        works: made so far, by kind of layers.
    """

    planner: Any
    works: dict[Any, Any] = field(default_factory=dict)

    def work(self, kind: Any) -> Any:
        """What `planner` makes of the decodes for layers of a kind."""
        work = self.works.get(kind)
        if work is None:
            assert self.decode is not None, "a batch without decodes has no work"
            self.planner.kinds.add(kind)
            work = self.planner.plan(self.decode, self.num_decode_tokens, kind)
            self.works[kind] = work
        return work


@dataclass(kw_only=True, eq=False)
class HopperMLAMetadata(SharedMLAMetadata):
    """A planned batch of layers over all keys."""

    planner: LatentPlanner


class HopperMLAMetadataBuilder(ReplayedMLAMetadataBuilder):
    """Plans at once for the kinds of layers that are known."""

    decode_query_len: ClassVar[int] = MAX_LATENT_QUERY_LEN

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._planner = self.make_planner()

    def make_planner(self) -> LatentPlanner:
        """Who shares out decodes of this engine's batches."""
        scheduler = self.vllm_config.scheduler_config
        device, block_size = torch.device(self.device), self.kv_cache_spec.block_size
        return LatentPlanner(device, scheduler.max_num_seqs, block_size)

    @classmethod
    def get_plan_cls(cls) -> type[SharedMLAMetadata]:
        return HopperMLAMetadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MLAMetadata:
        plan = super().build_for_cudagraph_capture(common_attn_metadata)
        self._planner.captured_reqs = max(self._planner.captured_reqs, plan.num_decodes)
        return plan

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SharedMLAMetadata:
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = self.get_plan_cls()(**vars(plan), planner=self._planner)
        if metadata.decode is not None:
            for kind in tuple(self._planner.kinds):
                metadata.work(kind)
        return metadata
