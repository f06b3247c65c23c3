"""The contract's small words: attention types, graph levels and block-size multiples.

In: nothing. Out: enums and `MultipleOf`, which every other file of the contract reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AttentionType(str, Enum):
    """Who attends to whom. A string too, so that it survives torch.compile's guards.

    Set by the model on each layer; selection asks `AttentionBackend.supports_attn_type` with it.
    """

    DECODER = "decoder"
    """Tokens attend to themselves and the cached tokens before them (causal unless a batch says no)."""
    ENCODER = "encoder"
    """The encoder half of an encoder-decoder model: bidirectional over the tokens of this step."""
    ENCODER_ONLY = "encoder_only"
    """A model without decoder (BERT): bidirectional over the tokens of this step, no cache."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross attention: decoder queries over the cached keys of the encoder's output."""

    def __str__(self) -> str:
        return self.value


class AttentionCGSupport(Enum):
    """Which batches a builder's metadata can be replayed for inside a captured graph.

    Read through `AttentionMetadataBuilder.get_cudagraph_support`. Values are ordered: the level of
    a model is the minimum over its builders. Compare `.value`.
    """

    ALWAYS = 3
    """Any batch, prefill chunks and decodes mixed."""
    UNIFORM_BATCH = 2
    """Batches in which every request has the same query length (verification of K drafts: 1 + K)."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Batches in which every request has query length 1."""
    NEVER = 0
    """No batch."""


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """A block size a kernel can read: any positive multiple of `base`.

    Stands beside plain ints (exact sizes) in `get_supported_kernel_block_sizes`.
    """

    base: int

    def __str__(self) -> str:
        return "any" if self.base == 1 else f"multiples of {self.base}"
