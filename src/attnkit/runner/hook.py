"""The seam to transformers: attention functions that its models call by name.

In: a model's query, key and value of one layer, and whose layer it is. Out: the layer's attention over
our paged cache. Two names are registered: `RUN` runs the layer attached to the module, with the plans
and pages of the `forward_context` around the call; `PROBE` hands its call to the recorder of
`recording`. Nothing of a step passes through the model's own code, so that it may be compiled and need
not hand on what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from attnkit.compiled import current_forward_context, new_handle, order_token
from attnkit.errors import ModelError
from attnkit.indexer import LightningIndexer
from attnkit.layer import Attention
from attnkit.mla_layer import MLAAttention
from attnkit.paged_layer import PagedLayer
from attnkit.runner.indexers import IndexerFacts, choose_again, choose_instead, index_inputs
from attnkit.runner.latents import expand_again, keep_latents
from attnkit.runner.temperature import QueryTemperature, leave_to_us, take_back

RUN = "attnkit_paged"
PROBE = "attnkit_probe"
_LAYER = "attnkit_layer"


class _InSteps(PagedLayer):
    """A layer of a model that is run step by step: outside of a step it raises."""

    def _check_outside(self, kv_cache: torch.Tensor | None, attn_metadata: Any | None) -> None:
        raise ModelError(_outside(self.layer_name))


class ModelLayer(_InSteps, Attention):
    """One that keeps keys and values.

    Attributes:
        temperature: put on queries, which the module then leaves out; None: nothing.
    """

    temperature: QueryTemperature | None = None

    def _run(self, query: torch.Tensor, *others: Any) -> None:
        context = current_forward_context()
        if self.temperature is not None and context is not None:
            assert context.positions is not None, "steps of models with temperatures tell positions"
            query = self.temperature.apply(query, context.positions)
        super()._run(query, *others)


class ModelLatentLayer(_InSteps, MLAAttention):
    """One that keeps latents.

    Attributes:
        chooser: of the keys it attends to; None: it attends to all.
    """

    chooser: ModelIndexer | None = None


class ModelIndexer:
    """Chooses keys in the place of a model's indexer. To a compiled graph it is one opaque node, as a
    layer is, and its lists are what the node writes.

    Attributes:
        module: the model's indexer, whose projections are used.
        indexer: ours.
        layer_name: key of its cache and plan.
    """

    def __init__(self, facts: IndexerFacts, indexer: LightningIndexer) -> None:
        self.module, self.indexer, self.layer_name = facts.module, indexer, indexer.layer_name
        self._order = order_token(indexer.device)
        self._handle = new_handle(self)

    def __call__(
        self, hidden_states: torch.Tensor, q_resid: torch.Tensor, rotation: Any, *_: Any, **__: Any
    ) -> None:
        """The model's call; what masks and caches say is in the step's plan."""
        inputs = index_inputs(self.module, hidden_states, q_resid, rotation)
        lists = self.indexer.topk_indices_buffer
        if torch.compiler.is_compiling():
            torch.ops.attnkit.attention(*inputs, lists, None, self._order, self._handle)
        else:
            self._fill(*inputs, lists)

    def _fill(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
        kv_cache: torch.Tensor | None = None,
        attn_metadata: Any | None = None,
    ) -> None:
        """Fill the lists; value is the weights. Cache and plan come from the step, as a layer's do."""
        context = current_forward_context()
        if context is None:
            raise ModelError(_outside(self.layer_name))
        batch = context.plan_of(self.layer_name)
        if batch is not None:
            assert key is not None
            assert value is not None
            self.indexer.choose(query, key, value, context.kv_caches[self.layer_name], batch)


class Recorder(Protocol):
    """Receives the calls of a probing run."""

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Record one layer's call; return its output [1, T, num_heads, head_size_v]."""
        ...


_RECORDER: ContextVar[Recorder] = ContextVar("attnkit_recorder")


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Attention calls under the name `PROBE` go to `recorder`."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def register() -> None:
    """Make both names known to transformers. Registering again changes nothing.

    `RUN` has no mask function: transformers then builds no mask at all. `PROBE` has one that tags its
    mask with the function that defines it, for `discovery` to read.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, function in FUNCTIONS.items():
        AttentionInterface.register(name, function)
    AttentionMaskInterface.register(PROBE, tagged_mask)


def attach(module: nn.Module, layer: ModelLayer | ModelLatentLayer) -> None:
    """Let `layer` run what `module` asks of attention.

    Not as a submodule: it has no weights, and casting the model must not cast its scales.
    """
    object.__setattr__(module, _LAYER, layer)
    if isinstance(layer, ModelLatentLayer):
        keep_latents(module)
        if layer.chooser is not None:
            choose_instead(layer.chooser.module, layer.chooser)
    elif layer.temperature is not None:
        leave_to_us(module)


def detach(module: nn.Module) -> None:
    """Undo `attach`; nothing happens where nothing was attached."""
    layer = module.__dict__.pop(_LAYER, None)
    expand_again(module)
    if isinstance(layer, ModelLatentLayer) and layer.chooser is not None:
        choose_again(layer.chooser.module)
    if isinstance(layer, ModelLayer) and layer.temperature is not None:
        take_back(module)


def run_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer, in transformers' signature.

    Args:
        module: the model's attention module, which has a layer attached.
        query: [B, num_heads, T, head_size]; key and value alike with num_kv_heads heads, or the latents
            and rotated parts of a layer that keeps these. Row after row they are the tokens of the
            step's batch; the runner has B = 1.
        attention_mask: None, or `NO_MASK`'s shape; what is visible follows from the plan and the layer.
        options: transformers' per-layer facts, read once by `discovery` and constant since.

    Returns:
        ([B, T, num_heads, head_size_v], None).

    Raises:
        ModelError: outside of a step, with a mask, or where a gradient would be lost.
    """
    layer = getattr(module, _LAYER, None)
    if layer is None:
        raise ModelError(_outside(type(module).__name__))
    if attention_mask is not None and attention_mask.numel():
        raise ModelError(
            f"{layer.layer_name} was given a mask of its own, which attnkit would ignore; leave it out"
        )
    if query.requires_grad:
        raise ModelError(
            f"{layer.layer_name} was called where gradients are recorded, and none flows through "
            "attnkit; use torch.no_grad() or torch.inference_mode(), or train with another "
            "attn_implementation"
        )
    return call_layer(layer, query, key, value), None


def call_layer(
    layer: Attention | MLAAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *step: Any,
) -> torch.Tensor:
    """A layer's output for tensors of transformers' shapes.

    Args:
        layer: without an LSE.
        query: [B, num_heads, T, head_size], key and value alike: row after row the tokens of the batch.
        step: its cache and plan; none: from the `forward_context`.

    Returns:
        [B, T, num_heads, head_size_v].
    """
    num_rows, num_tokens = query.shape[0], query.shape[2]
    # The shortest way, for decodes; one query may also cross over to many keys.
    if num_tokens == 1 and key.shape[2] == 1 and not torch.compiler.is_compiling():
        rows: Any = layer.forward(query.squeeze(2), key.squeeze(2), value.squeeze(2), *step)
        return rows.unsqueeze(1)
    output = layer(_rows(query), _rows(key), _rows(value), *step)
    return output.unflatten(0, (num_rows, num_tokens))


def probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Hand a layer's call to the recorder."""
    recorder = _RECORDER.get()
    return recorder.attention(module, query, key, value, attention_mask, options), None


NO_MASK = (1, 1, 0, 0)
"""Shape of a mask that says nothing, for models that cut a piece out of theirs: transformers takes a
mask of four dimensions for a finished one and hands it on."""

FUNCTIONS = {RUN: run_attention, PROBE: probe_attention}
"""What each name stands for."""


class TaggedMask(torch.Tensor):
    """A mask without content that remembers which function defines it."""

    mask_function: Callable[..., torch.Tensor]


def tagged_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], **_: Any
) -> TaggedMask:
    """transformers' mask function for `PROBE`.

    `mask_function(batch, head, query position, key position)` says what is visible; positions may be
    any tensors that broadcast, so it can be asked far outside of the probe's few tokens.
    """
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool).as_subclass(TaggedMask)
    mask.mask_function = mask_function
    return mask


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] as (B * T, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def _outside(name: str) -> str:
    return (
        f"{name} was called with attn_implementation={RUN!r} outside of a step; generate with "
        "attnkit.LLM, call the model that attnkit.hf.enable was given, or choose another "
        "attn_implementation"
    )
