"""Bridge: a transformers model whose every call runs as a step over our pages.

In: calls of the model as anybody makes them, `generate` above all: a batch of rows with a 2D mask and a
cache. Out: what the model returns. Around each call a hook makes the step: the model itself sees neither
mask nor cache, as under our runner, and its layers find pages and plans in the `forward_context`.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from attnkit.compiled import forward_context
from attnkit.errors import ModelError
from attnkit.integrations.hf.cache import RowPages, pages_in
from attnkit.runner import hook
from attnkit.runner.model import PackedModel
from attnkit.runner.planner import StepPlanner

_PASSED_ON = frozenset(
    {
        "input_ids", "inputs_embeds", "position_ids", "labels", "logits_to_keep", "return_dict",
        "output_hidden_states", "output_router_logits", "num_items_in_batch", "cache_position",
    }
)  # fmt: skip
"""Arguments of a model's call that do not change which keys a token sees."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A call under way."""

    context: AbstractContextManager[None]
    pages: RowPages
    num_new: int
    padding: np.ndarray
    cache: Any
    as_tuple: bool


class Bridge:
    """A model that `enable` was given.

    Attributes:
        model: the model.
        packed: its layers.
    """

    def __init__(self, packed: PackedModel) -> None:
        """Hook into the model's calls."""
        self.model, self.packed = packed.model, packed
        self._planner = StepPlanner(packed)
        self._names = list(inspect.signature(self.model.forward).parameters)
        self._cache_name = "cache" if "cache" in self._names else "past_key_values"
        self._steps: list[_Step] = []
        self._handles = [
            self.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def disable(self) -> None:
        """Give the model its former attention back. Caches in pages are of no use afterwards."""
        for handle in self._handles:
            handle.remove()
        self.packed.release()

    def __str__(self) -> str:
        """Which backend runs which layers, and why not the others."""
        return self.packed.explain()

    def _begin(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if model.config._attn_implementation != hook.RUN:
            return None  # The user, or generate_batch, has set another.
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        who = type(model).__name__
        if model.training:
            raise ModelError(
                f"{who} is in training mode, and attnkit runs inference alone; call model.eval(), or "
                "train with another attn_implementation"
            )
        if _setting(given, model, "output_attentions"):
            raise ModelError(
                f"{who} was asked for output_attentions, which attnkit never has in memory; leave it "
                "out, or use attn_implementation='eager'"
            )
        caches = [given.pop(name, None) for name in ("cache", "past_key_values")]
        cache = next((c for c in caches if c is not None), None)
        use_cache = _setting(given, model, "use_cache")
        mask = given.pop("attention_mask", None)
        for name in ("output_attentions", "use_cache"):
            given.pop(name, None)
        unknown = [k for k, v in given.items() if v is not None and k not in _PASSED_ON]
        if unknown:
            raise ModelError(
                f"{who} was given {', '.join(unknown)}, whose effect on attention attnkit does not "
                "know; leave it out, or use another attn_implementation"
            )
        if cache is None and use_cache:
            cache = DynamicCache()
        pages = RowPages(self.packed) if cache is None else pages_in(cache, self.packed)
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        if inputs is None:
            raise ModelError(
                f"{who} was given neither input_ids nor inputs_embeds; give one of them"
            )
        num_rows, num_new = inputs.shape[:2]
        if not num_rows * num_new:
            raise ModelError(
                f"{who} was given {num_rows} rows of {num_new} tokens; give one of each at least"
            )
        past, longest = pages.num_tokens, self.packed.max_model_len
        padding = _padding(who, mask, num_rows, num_new, pages)
        if past + num_new > longest and past + num_new - int(padding.min()) > longest:
            raise ModelError(
                f"{who} was given a row of {past + num_new - int(padding.min())} tokens, {past} of them "
                f"cached, but takes {longest}; shorten it"
            )
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(past, past + num_new, device=inputs.device)[None]
        elif mask is None and cache is None and bool((positions.diff(dim=-1) != 1).any()):
            raise ModelError(
                f"{who} was given position_ids that start anew within a row, as packed sequences do; "
                "give each sequence a row of its own"
            )
        batches = pages.begin(num_new, padding)
        plans = self._planner.plan(batches)
        assert pages.cache is not None
        context = forward_context(plans, pages.cache.by_layer, batches[0].positions)
        as_tuple = given.get("return_dict") is False
        given.update(position_ids=positions, use_cache=False, return_dict=True)
        if self.packed.attention_mask is not None:
            given["attention_mask"] = self.packed.attention_mask
        context.__enter__()
        self._steps.append(_Step(context, pages, num_new, padding, cache, as_tuple))
        return (), given

    def _end(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not self._steps:
            return None
        step = self._steps.pop()
        step.context.__exit__(None, None, None)
        if output is None:  # The call failed.
            return None
        step.pages.commit(step.num_new, step.padding)
        if step.cache is not None:
            output[self._cache_name] = step.cache
        return output.to_tuple() if step.as_tuple else output


def _setting(given: dict[str, Any], model: Any, name: str) -> bool:
    """A switch of the call, or else of the model's configuration."""
    value = given.get(name)
    return bool(getattr(model.config, name, False) if value is None else value)


def _padding(
    who: str, mask: torch.Tensor | None, num_rows: int, num_new: int, pages: RowPages
) -> np.ndarray:
    """How many of each row's first columns are padding, int (num_rows,).

    Padding after a row's tokens needs no care in the step it comes in: a token sees none after it.

    Raises:
        ModelError: the mask is no padding in front, or contradicts what is cached.
    """
    past = pages.num_tokens
    width = past + num_new
    pages.check_num_rows(num_rows)
    if mask is None and pages.has_padding:
        raise ModelError(
            f"{who} was given no attention_mask, but rows in its cache begin with padding; pass the "
            "mask of all tokens"
        )
    known = np.zeros(num_rows, dtype=np.int64) if pages.padding is None else pages.padding
    if mask is None:
        return known
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ModelError(
            f"{who} was given an attention_mask of shape {shape}; attnkit takes a 2D mask of padding, "
            "and applies the model's own causal or windowed mask by itself"
        )
    if tuple(mask.shape) != (num_rows, width):
        raise ModelError(
            f"{who} was given an attention_mask of shape {tuple(mask.shape)} for {num_rows} rows of "
            f"{past} cached and {num_new} new tokens; give one of shape {(num_rows, width)}"
        )
    if not pages.has_padding and bool(
        mask.all()
    ):  # As in most steps, in which numpy is not warm yet.
        return known
    visible = mask.detach().to("cpu", torch.bool).numpy()
    some = visible.any(axis=1)
    first = np.where(some, visible.argmax(axis=1), width)
    last = np.where(some, width - 1 - visible[:, ::-1].argmax(axis=1), width - 1)
    for row in np.flatnonzero(some & (visible.sum(axis=1) != last - first + 1)):
        raise ModelError(
            f"{who} was given an attention_mask with a hole in row {row}; attnkit takes padding in "
            "front of a row alone"
        )
    for row in np.flatnonzero(last < past - 1):
        raise ModelError(
            f"{who} was given an attention_mask that hides cached tokens at the end of row {row}; pad "
            "in front (padding_side='left')"
        )
    return pages.known_padding(who, first)
