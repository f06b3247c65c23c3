"""StepPlanner: plans of a step, one for each group of equal layers.

In: the layers of a model, then one batch per group of its cache in each step. Out: layer name -> plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnkit.contract import AttentionMetadataBuilder, CommonAttentionMetadata
from attnkit.paged_layer import PagedLayer
from attnkit.runner.shared_pages import PagedModel


class StepPlanner:
    """Plans a step once per group of equal layers."""

    def __init__(self, packed: PagedModel) -> None:
        groups = list(enumerate(packed.kv_plan.groups))
        self._builders = [
            (i, names, builder)
            for i, group in groups
            for names, builder in builders_of({n: packed.layers[n] for n in group.layer_names})
        ]
        self._companions = [(i, name) for i, group in groups for name, _ in group.companions]

    @property
    def reorder_batch_threshold(self) -> int | None:
        """Requests with at most this many new tokens should come first; None: nobody cares."""
        wishes = [builder.reorder_batch_threshold for _, _, builder in self._builders]
        return min((w for w in wishes if w is not None), default=None)

    def plan(
        self, batches: Sequence[CommonAttentionMetadata], *, for_capture: bool = False
    ) -> dict[str, Any]:
        """Layer name -> plan; what is kept beside a layer has the batch.

        Args:
            batches: one per group of `PackedModel.kv_plan`.
            for_capture: a graph is captured with these plans.
        """
        plans: dict[str, Any] = {name: batches[group] for group, name in self._companions}
        for group, names, builder in self._builders:
            batch = batches[group]
            made = (
                builder.build_for_cudagraph_capture(batch)
                if for_capture
                else builder.build(0, batch)
            )
            plans.update(dict.fromkeys(names, made))
        return plans


def plan_key(layer: PagedLayer) -> tuple[Any, ...]:
    """Layers with equal keys can share a plan: a plan may depend on all static facts but a sink's
    values, which no builder sees."""
    indexer = getattr(layer, "indexer", None)
    return (
        layer.backend,
        layer.attn_type,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        layer.head_size_v,
        layer.sliding_window,
        layer.attention_chunk_size,
        getattr(indexer, "lists_are_whole_up_to", None),
    )


def builders_of(
    layers: Mapping[str, PagedLayer],
) -> list[tuple[list[str], AttentionMetadataBuilder[Any]]]:
    """Layers by name, of one group of a cache or of none: those that can share a plan, and who makes
    it."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(plan_key(layer), []).append(name)
    return [(names, layers[names[0]].make_builder(names)) for names in groups.values()]
