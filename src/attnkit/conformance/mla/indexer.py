"""KitIndexer: lists of keys for sparse layers, from a rule that asks a query's position alone.

In: the batch that a plan was made of. Out: `topk_indices_buffer`. So a query is told the same keys
wherever it stands in a batch and on whatever pages its request lies, and the oracle, which knows the
rule too (`oracle.told`), can say what is right. Lists are in the order of the rule, not of positions.
"""

from __future__ import annotations

from typing import Any

import torch

from attnkit.contract import CommonAttentionMetadata

_A, _B, _C = 2654435761, 40503, 1 << 20


class KitIndexer:
    """What a layer of the kit is given as its indexer.

    Attributes:
        topk: keys a query is told; None: all it sees, in a list that is longer than any request.
        lists_are_whole_up_to: a query that sees no more keys is told all of them.
        block_size: of the layer; tables say how long a request may be.
        batch: of the step that runs.
    """

    def __init__(self, topk: int | None, block_size: int) -> None:
        self.topk, self.block_size = topk, block_size
        self.batch: CommonAttentionMetadata | None = None
        self.lists_are_whole_up_to = 1 << 30 if topk is None else topk
        self._planned: dict[int, tuple[Any, CommonAttentionMetadata]] = {}

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """Made anew at every look, on the device, so that recordings replay it."""
        batch = self.batch
        assert batch is not None, "no plan has run yet"
        device, width = batch.seq_lens.device, batch.block_table_tensor.shape[1]
        rows = torch.arange(batch.slot_mapping.shape[0], dtype=torch.int32, device=device)
        ends = batch.query_start_loc[1:].contiguous()
        request = torch.searchsorted(ends, rows, right=True).clamp(max=max(0, len(ends) - 1))
        position = (batch.seq_lens[request] - (ends[request] - rows))[:, None].long()
        keys = torch.arange(width * self.block_size + 3, device=device)[None]
        rank = (keys * _A + position * _B) % _C
        rank = torch.where(keys <= position, rank, _C + keys)
        lists = rank.argsort(dim=1, stable=True)
        lists = torch.where(lists <= position, lists, -1)
        return lists[:, : self.topk].int().contiguous()

    def note(self, plan: Any, batch: CommonAttentionMetadata) -> Any:
        """Remember what a plan was made of."""
        self._planned[id(plan)] = plan, batch
        return plan

    def serve(self, plan: Any) -> None:
        """This plan runs next."""
        self.batch = self._planned[id(plan)][1]


def watch_plans(layer: Any, indexer: KitIndexer) -> None:
    """Let the indexer know, for every step of a layer, which batch it is."""
    make_builder, run = layer.make_builder, layer._run

    def made(*args: Any) -> Any:
        builder = make_builder(*args)
        build, capture = builder.build, builder.build_for_cudagraph_capture
        update = builder.update_block_table

        def built(prefix: int, batch: CommonAttentionMetadata, *rest: Any) -> Any:
            return indexer.note(build(prefix, batch, *rest), batch)

        def captured(batch: CommonAttentionMetadata) -> Any:
            return indexer.note(capture(batch), batch)

        def updated(plan: Any, *rest: Any) -> Any:
            return indexer.note(update(plan, *rest), indexer._planned[id(plan)][1])

        builder.build, builder.build_for_cudagraph_capture = built, captured
        builder.update_block_table = updated
        return builder

    def served(*step: Any) -> None:
        plan = step[6]
        if plan is not None:
            indexer.serve(plan)
        run(*step)

    layer.make_builder, layer._run = made, served
