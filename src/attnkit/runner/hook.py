"""The seam to transformers: attention functions that its models call by name.

In: a model's query, key and value of one layer, packed as one sequence, and the `PackedStep` that
rides through `model(..., attnkit_step=step)`. Out: the layer's attention over our paged cache.
Two names are registered: "attnkit" runs, "attnkit_probe" hands its call to the recorder that rides
in the same place. No state lives here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from attnkit.errors import ModelError

RUN = "attnkit"
PROBE = "attnkit_probe"
STEP_KWARG = "attnkit_step"


@dataclass(frozen=True, slots=True)
class LayerSlot:
    """What one attention module of the model runs on.

    Attributes:
        attention: the `attnkit.Attention` built for the module.
        kv_cache: its pages, or None while memory is being sized.
        plan: which of a step's plans it reads.
    """

    attention: Callable[..., torch.Tensor]
    kv_cache: torch.Tensor | None
    plan: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step's plans, and where each attention module finds its own.

    Attributes:
        slots: attention module -> its slot.
        plans: attention metadata, one per group of equal layers.
    """

    slots: Mapping[nn.Module, LayerSlot]
    plans: list[Any]


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


def register() -> None:
    """Make both names known to transformers. Registering again changes nothing.

    "attnkit" has no mask function: transformers then builds no mask at all. "attnkit_probe" has one
    that tags its mask with the function that defines it, for `discovery` to read.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(RUN, run_attention)
    AttentionInterface.register(PROBE, probe_attention)
    AttentionMaskInterface.register(PROBE, tagged_mask)


def run_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attnkit_step: PackedStep | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer, in transformers' signature.

    Args:
        module: the model's attention module, which names the layer.
        query: [1, num_heads, T, head_size]; key and value alike with num_kv_heads heads. All
            requests of the step are packed in T.
        attention_mask: None; the mask follows from the step and the layer.
        attnkit_step: the step, as passed to the model.
        options: transformers' per-layer facts, read once by `discovery` and constant since.

    Returns:
        ([1, T, num_heads, head_size_v], None).
    """
    if attnkit_step is None:
        raise ModelError(
            f"{type(module).__name__} was called with attn_implementation={RUN!r} outside of attnkit's "
            "runner; use attnkit.LLM, or choose another attn_implementation"
        )
    assert attention_mask is None, "no mask function is registered, so no mask can be built"
    slot = attnkit_step.slots[module]
    output = slot.attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        slot.kv_cache,
        attnkit_step.plans[slot.plan],
    )
    return output.unsqueeze(0), None


def probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attnkit_step: Recorder | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Hand a layer's call to the recorder that rides in the step's place."""
    if attnkit_step is None:
        raise ModelError(
            f"{type(module).__name__} does not hand its caller's keyword arguments to the attention "
            "function, so attnkit cannot drive this model; use another model"
        )
    return attnkit_step.attention(module, query, key, value, attention_mask, options), None


class TaggedMask(torch.Tensor):
    """A mask without content that remembers which function defines it."""

    mask_function: Callable[..., torch.Tensor]


def tagged_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], **_: Any
) -> TaggedMask:
    """transformers' mask function for "attnkit_probe".

    `mask_function(batch, head, query position, key position)` says what is visible; positions may be
    any tensors that broadcast, so it can be asked far outside of the probe's few tokens.
    """
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool).as_subclass(TaggedMask)
    mask.mask_function = mask_function
    return mask
