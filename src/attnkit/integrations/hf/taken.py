"""A model that runs by name alone, and transformers' caches that it takes over into our pages.

In: the layers that `whole` makes as the model's attention modules call, and, from then on, the cache of
every call of the model, which a hook of the first module sees. Out: the same `DynamicCache`, whose
layers are `TakenLayer`s over `RowPages`; a step writes and reads these, as under `enable`, and nothing
is copied any more. Caches of other kinds stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from attnkit.errors import ModelError
from attnkit.integrations.hf.cache import PagedLayer, RowPages
from attnkit.kvcache.groups import KVCachePlan, plan_kv_cache
from attnkit.kvcache.pool import PagedKVCache
from attnkit.layer import Attention
from attnkit.runner import hook
from attnkit.runner.planner import StepPlanner, plan_key
from attnkit.runner.shared_pages import allocate_pages


@dataclass(slots=True)
class Rows:
    """What a mask says of one forward pass; its layers share the plans made of it.

    Attributes:
        num_keys: keys of each row, padding included.
        num_new: of these, tokens of this step, the last ones.
        padding: int (num_rows,), how many of the first ones are padding.
        has_padding: whether any is.
        width: how many keys the last token sees.
        plans: by `plan_key` and page, where keys are copied.
        step: plans and caches by layer name, where they are in pages; None: they are not.
        model: whose pass it is; None in the first one before a layer was made.
    """

    num_keys: int
    num_new: int
    padding: np.ndarray
    has_padding: bool
    width: int
    plans: dict[Any, Any] = field(default_factory=dict)
    step: tuple[Mapping[str, Any], Mapping[str, torch.Tensor]] | None = None
    model: TakenModel | None = None


class RowsMask(hook.TaggedMask):
    """A mask without content that says what its rows are."""

    rows: Rows


class TakenLayer(PagedLayer):
    """One layer of a cache that was taken over: once in a step it hands on what is new."""

    def __init__(self, pages: RowPages, leads: bool) -> None:
        super().__init__(pages, leads)
        self._num_steps = pages.num_steps

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This step's keys and values, which the layer's attention writes into pages.

        Raises:
            ModelError: no step of the model that the pages belong to is under way.
        """
        if self._num_steps == self.pages.num_steps:
            raise ModelError(
                "this cache lies in attnkit's pages, and only the model that filled it can go on with "
                "it, under attn_implementation='attnkit'; start with an empty cache"
            )
        self._num_steps = self.pages.num_steps
        return key_states, value_states


class TakenModel:
    """The layers of a model that nobody gave us.

    What `RowPages` and `StepPlanner` ask of a model (`kv_plan`, `layers`, `device`, ...) is known when
    all layers have been made.

    Attributes:
        by_index: the layers, by transformers' number of each.
    """

    blocks_per_block = 1
    kv_plan: KVCachePlan
    layers: Mapping[str, Attention]
    device: torch.device

    def __init__(self, first: nn.Module) -> None:
        """Look at what `first`, which runs before all others, is called with."""
        self.by_index: dict[int, Attention] = {}
        config: Any = first.config
        self._num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        self._planner: StepPlanner | None = None
        first.register_forward_pre_hook(self._before, with_kwargs=True)

    def allocate(self, num_blocks: int) -> PagedKVCache:
        """Memory for `num_blocks` pages of every layer."""
        return allocate_pages(self.kv_plan, self.layers, 1, self.device, num_blocks)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a step over pages, if that is what the model is called for."""
        given = (*args, *kwargs.values())
        rows = next((x.rows for x in given if isinstance(x, RowsMask)), None)
        cache = next((x for x in given if isinstance(x, DynamicCache)), None)
        if rows is None:
            return
        rows.model = self
        if cache is None or not self._has_all_layers():
            return
        taken = cache.layers[0] if cache.layers else None
        pages = taken.pages if isinstance(taken, TakenLayer) else self._take(cache, rows)
        if pages is None:
            return
        if pages.packed is not self:
            raise ModelError("the cache belongs to another model; start with an empty DynamicCache")
        longest = next(iter(self.layers.values())).vllm_config.model_config.max_model_len
        if rows.num_keys > longest:
            raise ModelError(
                f"{type(module).__name__} was given {rows.num_keys} tokens, but takes {longest}; "
                "shorten them"
            )
        who = type(module).__name__
        padding = pages.known_padding(who, rows.padding, has_padding=rows.has_padding)
        batches = pages.begin(rows.num_new, padding)
        assert self._planner is not None
        assert pages.cache is not None
        rows.step = self._planner.plan(batches), pages.cache.by_layer
        pages.commit(rows.num_new, padding)

    def _has_all_layers(self) -> bool:
        """Whether every layer is known, and they are equal, so that one plan serves all of them."""
        if self._planner is None:
            made = self.by_index.values()
            first = next(iter(made), None)
            if first is None or set(self.by_index) != set(range(self._num_layers)):
                return False
            kinds = {(*plan_key(x), x.block_size, x.dtype, x.device) for x in made}
            writes = not first.backend.forward_includes_kv_cache_update
            if len(kinds) > 1 or first.sliding_window is not None or not writes:
                return False
            self.layers = {x.layer_name: x for x in made}
            self.device = first.device
            self.kv_plan = plan_kv_cache(
                {n: spec for n, x in self.layers.items() if (spec := x.get_kv_cache_spec())}
            )
            self._planner = StepPlanner(self)
        return True

    def _take(self, cache: DynamicCache, rows: Rows) -> RowPages | None:
        """Put a cache's keys and values into pages; None: it is of a kind that stays as it is."""
        num_past = rows.num_keys - rows.num_new
        dense = [x for x in cache.layers if isinstance(x, DynamicLayer) and type(x) is DynamicLayer]
        expected = [len(self.by_index)] if num_past else [0, len(self.by_index)]
        if (
            type(cache) is not DynamicCache
            or cache.offloading
            or len(dense) != len(cache.layers)
            or len(dense) not in expected
            or any(x.get_seq_length() != num_past for x in dense)
        ):
            return None
        pages = RowPages(self)
        if num_past:
            padding = np.minimum(rows.padding, num_past)
            (batch,) = pages.begin(num_past, padding)
            assert pages.cache is not None
            for index, x in enumerate(dense):
                assert x.keys is not None
                assert x.values is not None
                layer = self.by_index[index]
                key, value = (t.transpose(1, 2).flatten(0, 1) for t in (x.keys, x.values))
                kv_cache = pages.cache[layer.layer_name]
                layer.impl.do_kv_cache_update(layer, key, value, kv_cache, batch.slot_mapping)
            pages.commit(num_past, padding)
        cache.layer_class_to_replicate = None
        cache.layers[:] = [TakenLayer(pages, leads=i == 0) for i in range(len(self.by_index))]
        return pages
