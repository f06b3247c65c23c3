"""CpuMetadata: the plan of a batch, and the builder that makes it.

In: the contract's batch, tensors on the CPU. Out: the same facts dense and typed as the kernels read
them, once a step and group of layers. Where work is cut for the threads is not planned here: it
depends on each layer's window, and the kernels work it out in less time than a call takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from attnkit.backends.cpu.operands import NativeBatch
from attnkit.contract import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    KVCacheSpec,
    VllmConfig,
)
from attnkit.errors import BatchError


@dataclass(frozen=True, eq=False, kw_only=True)
class CpuMetadata(AttentionMetadata):
    """A batch of R requests as the kernels read it. Layers of a step share it.

    Attributes:
        num_actual_tokens: of the batch, padding included.
        num_tokens: rows of output that are written, from the first on.
        served: int32 (n,), requests with at least one query token.
        query_start_loc: int32 (R + 1,).
        seq_lens: int32 (R,).
        causal: bool (R,).
        block_table: int32 (R, W).
        block_size: tokens in a page, as the batch says it; None: it does not.
        views: what wrappers made of the batch, outermost first.
        slot_mapping: int64, for the layer's cache write.
        encoder_seq_lens: int32 (R,), keys of cross attention.
        spans: int32 (T, 2), keys that a token sees beside its layer's mask (`mm_token_spans`).
        prefix_lens: int32 (R,), keys below are not left of any window.
        tree: int64 (T,), which of its request's tokens a token sees (`tree_mask`).
    """

    num_actual_tokens: int
    num_tokens: int
    served: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    causal: torch.Tensor
    block_table: torch.Tensor
    block_size: int | None
    views: tuple[str, ...]
    slot_mapping: torch.Tensor
    encoder_seq_lens: torch.Tensor | None
    spans: torch.Tensor | None
    prefix_lens: torch.Tensor | None
    tree: torch.Tensor | None

    # Packed when the first layer of a kind asks: a plan does not know the layers it is for.

    @cached_property
    def decoder(self) -> NativeBatch:
        """For decoders: causal as the batch says, keys in pages."""
        return NativeBatch.pack(
            self.served,
            self.query_start_loc,
            self.seq_lens,
            self.causal,
            self.block_table,
            self.spans,
            self.prefix_lens,
            self.tree,
        )

    @cached_property
    def cross(self) -> NativeBatch:
        """For cross attention: all keys of the encoder's output, in pages."""
        return NativeBatch.pack(
            self.served,
            self.query_start_loc,
            self.kv_lens(AttentionType.ENCODER_DECODER),
            torch.zeros_like(self.causal),
            self.block_table,
        )

    @cached_property
    def encoder(self) -> NativeBatch:
        """For encoders: all tokens of the request in this step."""
        return NativeBatch.pack(
            self.served,
            self.query_start_loc,
            self.seq_lens,
            torch.zeros_like(self.causal),
            None,
        )

    def kv_lens(self, attn_type: AttentionType) -> torch.Tensor:
        """int32 (R,): keys of each request.

        Raises:
            BatchError: cross attention without encoder lengths.
        """
        if attn_type is not AttentionType.ENCODER_DECODER:
            return self.seq_lens
        if self.encoder_seq_lens is None:
            raise BatchError(
                "cross attention needs encoder_seq_lens, which this batch does not have; "
                "set it on the CommonAttentionMetadata"
            )
        return self.encoder_seq_lens


class CpuMetadataBuilder(AttentionMetadataBuilder[CpuMetadata]):
    """Finds the requests that have tokens; the kernels derive the rest per layer in microseconds."""

    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CpuMetadata:
        batch = common_attn_metadata
        num_reqs = batch.num_reqs
        query_start_loc = _int32(batch.query_start_loc[: num_reqs + 1])
        starts = query_start_loc.tolist()
        served = [r for r in range(num_reqs) if starts[r + 1] > starts[r]]
        if isinstance(batch.causal, torch.Tensor):
            causal = batch.causal[:num_reqs].to(torch.bool).contiguous()
        else:
            causal = torch.full((num_reqs,), batch.causal)
        encoder, prefix_lens = batch.encoder_seq_lens, batch.checked_rswa_prefix_lens()
        return CpuMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            num_tokens=starts[-1],
            served=torch.tensor(served, dtype=torch.int32),
            query_start_loc=query_start_loc,
            seq_lens=_int32(batch.seq_lens[:num_reqs]),
            causal=causal,
            block_table=_block_table(batch.block_table_tensor[:num_reqs]),
            block_size=batch.block_size,
            views=self.views_of(batch),
            slot_mapping=batch.slot_mapping,
            encoder_seq_lens=None if encoder is None else _int32(encoder[:num_reqs]),
            spans=batch.mm_token_spans(),
            prefix_lens=None if prefix_lens is None else prefix_lens.contiguous(),
            tree=batch.checked_tree_mask(),
        )

    def update_block_table(
        self, metadata: CpuMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CpuMetadata:
        num_reqs = metadata.seq_lens.shape[0]
        return replace(
            metadata, block_table=_block_table(blk_table[:num_reqs]), slot_mapping=slot_mapping
        )


def _int32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int32).contiguous()


def _block_table(x: torch.Tensor) -> torch.Tensor:
    """int32 with dense rows."""
    x = x.to(torch.int32)
    return x if x.stride(1) == 1 else x.contiguous()
