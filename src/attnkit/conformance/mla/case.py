"""MLACase: one layer over latents and one batch, as plain data.

In: nothing. Out: a `Case` whose keys are latents and whose values are the rotated parts, so that pages,
batches and poison are made as for every other case; and what an MLA layer has beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnkit.conformance.case import DTYPES, Case
from attnkit.contract import AttentionType, KVCacheLayout, MLADimensions
from attnkit.kvcache.formats import CacheFormat, latent_format


@dataclass(frozen=True, slots=True, kw_only=True)
class MLABasis:
    """What a case is when it is about something else; as `Basis`.

    Attributes:
        dimensions: sizes that the backend takes.
        tiled: sizes that fit every format the backend takes.
        formats: cache formats that the backend takes.
    """

    dtypes: tuple[str, ...] = tuple(DTYPES)
    dimensions: MLADimensions
    tiled: MLADimensions
    formats: tuple[str, ...] = ("auto",)
    block_size: int = 16
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    lse: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MLACase(Case):
    """One layer over latents, one batch. The inherited `head_size` is kv_lora_rank, `head_size_v` is
    qk_rope_head_dim and `num_kv_heads` is 1; `value_gain` holds for latents and rotated parts.

    Attributes:
        qk_nope_head_dim, v_head_dim: of the layer.
        num_drafts: drafts the engine verifies: queries up to one more of them are decodes.
        decode_query_len: requests with at most this many queries are decodes; None: the builder says.
        workspace_pages: pages of context that are expanded at once; None: the builder's own.
        told: keys that each query is told to attend to; None: all it sees, which sparse layers are told
            by lists longer than any request.
    """

    num_heads: int = 4
    num_kv_heads: int = 1
    head_size: int = 32
    head_size_v: int | None = 8
    qk_nope_head_dim: int = 16
    v_head_dim: int = 24
    num_drafts: int | None = None
    decode_query_len: int | None = None
    workspace_pages: int | None = None
    told: int | None = None

    @property
    def is_latent(self) -> bool:
        return True

    @property
    def names_dense_feature(self) -> bool:
        """It asks for what only layers with keys and values have."""
        causal_decoder = self.causal is True and self.attn_type is AttentionType.DECODER
        return not causal_decoder or any(
            (
                self.sliding_window,
                self.logits_soft_cap,
                self.alibi,
                self.sinks,
                self.per_head_scales,
                self.mm_prefix,
                self.rswa,
                self.chunk_pages,
            )
        )

    @property
    def dimensions(self) -> MLADimensions:
        """Sizes of the layer."""
        return MLADimensions(
            kv_lora_rank=self.head_size,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.value_size,
            v_head_dim=self.v_head_dim,
        )

    @property
    def query_size(self) -> int:
        return self.qk_nope_head_dim + self.value_size

    @property
    def stored(self) -> CacheFormat:
        return latent_format(self.kv_cache_dtype)

    @property
    def softmax_scale(self) -> float:
        return self.query_size**-0.5 if self.scale is None else self.scale

    @property
    def weight(self) -> torch.Tensor:
        """`kv_b_proj` of the layer: (num_heads * (nope + v), kv_lora_rank) in the layer's dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        weight = torch.randn(rows, self.head_size, generator=generator) * self.head_size**-0.5
        return weight.to(self.dtype)
