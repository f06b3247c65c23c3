"""HopperMLASparseMetadataBuilder: plan a batch whose queries attend to listed keys.

In: a batch. Out: an `MLAMetadata` in which every query is a request of its own with as many keys as its
list can name, some queries at a time, shared out on the device once for all layers whose lists are as
long. What lists really name is known only when a layer runs, and is put into the plan then
(`latent_gather`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attnkit.backends.hopper.mla_plan import (
    HopperMLAMetadataBuilder,
    LatentPlanner,
    SharedMLAMetadata,
)
from attnkit.backends.hopper.tuning import (
    CHOSEN_PAGE,
    LATENT_SIZES,
    chosen_pages,
    chosen_tokens,
    latent_config,
    latent_rows,
)
from attnkit.contract import CommonAttentionMetadata
from attnkit.mla.plan import DecodePart, MLAMetadata
from attnkit.mla.sparse import SparseMLAMetadataBuilder


class Lists(NamedTuple):
    """What layers are planned alike for.

    Attributes:
        num_heads: of the layer.
        size: positions in a list.
        distinct: no list names one twice, so that it names no more keys than there are.
    """

    num_heads: int
    size: int
    distinct: bool


class ChosenPlanner(LatentPlanner):
    """Shares out queries with their lists, some at a time, and has the memory for gathered rows.

    Attributes:
        kinds: `Lists` of layers that have asked so far.
        captured_tokens: queries of the largest step that was captured; what its graph reads is planned
            in every step.
    """

    def __init__(self, device: torch.device, max_num_tokens: int) -> None:
        super().__init__(device, max_num_tokens, CHOSEN_PAGE)
        self.captured_tokens = 0
        self._max_num_tokens = max_num_tokens
        self._owners: dict[tuple[int, bool, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: dict[tuple[torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._starts = torch.arange(max_num_tokens + 1, dtype=torch.int32, device=device)

    def plan(self, part: DecodePart, num_tokens: int, kind: Any) -> Any:
        """What layers of a kind work on; launches, and never waits for the device.

        Args:
            part: of the batch.
            num_tokens: its queries, which may be fewer than a graph has that was captured.
            kind: `Lists`.

        Returns:
            A list with a `latent_gather_launch.ChosenWork` for every so many queries.
        """
        at_once = chosen_tokens(kind.size, self._max_num_tokens)
        firsts = range(0, max(num_tokens, self.captured_tokens, 1), at_once)
        return [self._plan_some(part, num_tokens, kind, first, at_once) for first in firsts]

    def _plan_some(
        self, part: DecodePart, num_tokens: int, lists: Lists, first: int, at_once: int
    ) -> Any:
        from attnkit.backends.hopper.latent_gather_launch import ChosenWork, chosen_lens_call

        key = (lists.size, lists.distinct, first)
        if (memory := self._owners.get(key)) is None:
            memory = self._owners[key] = (self._empty(at_once, 2), self._empty(at_once))
        owners, lens = memory
        chosen_lens_call(
            owners,
            lens,
            part.query_start_loc,
            part.seq_lens,
            first,
            lists.size,
            distinct=lists.distinct,
        ).launch()
        # At least one, and be it nobody's, so that a captured graph does not run an older plan.
        num = max(1, min(at_once, num_tokens - first))
        tile_rows = latent_rows(lists.num_heads, 1)
        work = self._share(
            replace(
                part,
                query_start_loc=self._starts[: num + 1],
                seq_lens=lens[:num],
                max_query_len=1,
                max_seq_len=lists.size,
            ),
            latent_config(lists.num_heads, CHOSEN_PAGE, tile_rows, lse=False),
            (*lists, first),
            at_once,
        )
        return ChosenWork(first_token=first, max_num_tokens=at_once, owners=owners, work=work)

    def rows(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages for the rows of as many queries as are gathered at once, (pages, 64, 576), and their
        block table, int32 (queries, pages of each). Layers run one after the other."""
        at_once = chosen_tokens(size, self._max_num_tokens)
        pages = chosen_pages(size)
        if (memory := self._rows.get((dtype, size))) is None:
            num = at_once * pages
            memory = self._rows[dtype, size] = (
                torch.empty(
                    num, CHOSEN_PAGE, sum(LATENT_SIZES[0]), dtype=dtype, device=self._device
                ),
                torch.arange(num, dtype=torch.int32, device=self._device).view(at_once, pages),
            )
        return memory


# As in `mla_plan`.
@dataclass(kw_only=True, eq=False)
class HopperMLASparseMetadata(SharedMLAMetadata):
    """A planned batch of layers over chosen keys."""

    planner: ChosenPlanner


class HopperMLASparseMetadataBuilder(SparseMLAMetadataBuilder, HopperMLAMetadataBuilder):
    """Plans for chosen keys."""

    _planner: ChosenPlanner

    @classmethod
    def get_plan_cls(cls) -> type[HopperMLASparseMetadata]:
        return HopperMLASparseMetadata

    def make_planner(self) -> ChosenPlanner:
        scheduler = self.vllm_config.scheduler_config
        most = max(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        return ChosenPlanner(torch.device(self.device), most)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MLAMetadata:
        plan = super().build_for_cudagraph_capture(common_attn_metadata)
        self._planner.captured_tokens = max(self._planner.captured_tokens, plan.num_decode_tokens)
        return plan
