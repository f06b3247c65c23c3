"""MLADimensions: the sizes of a layer that keeps latents instead of keys and values.

In: a model's configuration. Out: a frozen value that a layer is built with and selection asks about.

With kv_c the latent of a token (kv_lora_rank numbers), k_pe its rotated part (qk_rope_head_dim), and
W_UK, W_UV the two parts of a head's `kv_b_proj` (arXiv 2405.04434, section 2.1):

    key = [W_UK kv_c | k_pe]        value = W_UV kv_c
    q.key = (W_UK^T q_nope).kv_c + q_pe.k_pe

so attention can be done over expanded keys and values (a prefill), or over the latents themselves with
an absorbed query, one KV head for all (a decode). The cache holds [kv_c | k_pe].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from attnkit.arguments import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class MLADimensions:
    """Sizes per token or head, in numbers.

    Attributes:
        kv_lora_rank: of the latent.
        qk_nope_head_dim: part of a query and key head without rotation.
        qk_rope_head_dim: the rotated part; all heads of a key share it.
        v_head_dim: of a value head.
        q_lora_rank: of the query's own compression; None: it has none. Attention does not feel it.

    Raises:
        ConfigurationError: a size that is no whole number of at least 1.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check_count(name, getattr(self, name))
        check_count("q_lora_rank", self.q_lora_rank, optional=True)

    @property
    def latent_size(self) -> int:
        """Numbers that the cache holds of a token: latent and rotated part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Of an expanded query and key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def __str__(self) -> str:
        return (
            f"latent {self.kv_lora_rank} + {self.qk_rope_head_dim}, heads "
            f"{self.qk_nope_head_dim} + {self.qk_rope_head_dim} / {self.v_head_dim}"
        )


class SparseIndexer(Protocol):
    """What an impl over latents that attends to chosen keys reads of its `indexer`.

    One that never names a position twice in a list may say so, `lists_are_distinct = True`: short
    contexts are then planned as short. One that tells a query all it sees where this is no more than so
    many keys may say it too, `lists_are_whole_up_to = n`: such prompts are then attended to like those
    of layers over all keys.
    """

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """int32 (at least the step's tokens, k): per query, the positions in its own request of the
        keys it attends to, in any order; -1: none. Filled before `forward_mqa`."""
        ...
