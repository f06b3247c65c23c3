"""The plan of a batch for FlexAttention: whose every query and key is, and which of them see each other.

In: a `CommonAttentionMetadata`. Out: `FlexMetadata`: all requests of the batch as one row of queries
over one of keys, and masks as functions of places in these rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from attnkit.backends.flex.mask import BLOCK, FlexMask, Sees, mask_of
from attnkit.contract import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    AttentionVariant,
    CommonAttentionMetadata,
    KVCacheSpec,
)

CACHELESS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
"""Layers that read the keys of this step's own tokens."""


@dataclass(frozen=True, eq=False)
class _Keys:
    """Keys of a batch in a row, padded to whole blocks.

    Attributes:
        request: int64 (S,), whose each is; -1: nobody's.
        position: int64 (S,), in its request.
    """

    request: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class FlexMetadata(AttentionMetadata):
    """A planned batch of R requests and T tokens, queries padded to whole blocks (Q).

    Attributes:
        num_actual_tokens: of the batch, padding included.
        num_tokens: real ones.
        slot_mapping: int64, where K and V are written.
        block_table: int32 (R, W).
        block_size: tokens in a page, as the batch says it; None: it does not.
        views: what wrappers made of the batch, outermost first.
        kv_lens: int64 (R,), keys of each request in the cache.
        request: int64 (Q,), of each query; -2: of none.
        position: int64 (Q,).
        context: int64 (Q,), keys before the request's new ones.
        causal: bool (Q,).
        spans: int64 (Q, 2), keys [start, end) seen beside the layer's mask; None: none.
        prefix: int64 (Q,), keys below are not left of any window; None: none.
        tree: int64 (Q,), which of its request's new tokens a query sees; 0 or None: as the rest says.
        cached: the keys that lie in pages.
        new: the keys of this step's own tokens, for encoders.
        masks: those that layers of the step have asked for, by their window and type.
    """

    num_actual_tokens: int
    num_tokens: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    block_size: int | None
    views: tuple[str, ...]
    kv_lens: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor
    context: torch.Tensor
    causal: torch.Tensor
    spans: torch.Tensor | None
    prefix: torch.Tensor | None
    tree: torch.Tensor | None
    cached: _Keys
    new: _Keys
    masks: dict[tuple[Any, ...], FlexMask] = field(default_factory=dict)

    def mask_of(self, variant: AttentionVariant) -> FlexMask:
        """Of layers with this mask. Made once a step."""
        kind = (variant.attn_type, variant.sliding_window)
        if kind not in self.masks:
            num_keys = self.keys_of(variant).request.shape[0]
            self.masks[kind] = mask_of(self.mask_mod(variant), self.request, num_keys)
        return self.masks[kind]

    def keys_of(self, variant: AttentionVariant) -> _Keys:
        """The keys that layers of this type read."""
        return self.new if variant.attn_type in CACHELESS else self.cached

    def mask_mod(self, variant: AttentionVariant) -> Sees:
        """Whether query q sees key k, as functions of their places in the rows."""
        keys, window = self.keys_of(variant), None
        if variant.sliding_window is not None:
            # A tensor: compiled for any length, numbers become unknowns that its templates do not take.
            window = torch.full_like(self.request[0], variant.sliding_window)
        is_decoder = variant.attn_type is AttentionType.DECODER
        spans = self.spans if is_decoder else None
        prefix = self.prefix if is_decoder else None
        tree = self.tree if is_decoder else None
        q_request, q_position, context = self.request, self.position, self.context
        k_request, k_position = keys.request, keys.position
        causal = self.causal if is_decoder else torch.zeros_like(self.causal)

        def sees(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
        ) -> torch.Tensor:
            ahead = k_position[k] - q_position[q]
            seen = (ahead <= 0) | ~causal[q]
            if window is not None:
                right = ahead > -window
                if prefix is not None:
                    right = right | ((k_position[k] < prefix[q]) & (ahead <= 0))
                seen = seen & right & (ahead < window)
            if spans is not None:
                seen = seen | ((k_position[k] >= spans[q, 0]) & (k_position[k] < spans[q, 1]))
            if tree is not None:
                new = k_position[k] - context[q]
                bit = (tree[q] >> new.clamp(0, 63)) & 1
                seen = torch.where(tree[q] != 0, (new < 0) | (bit != 0), seen)
            return seen & (q_request[q] == k_request[k])

        return sees


class FlexMetadataBuilder(AttentionMetadataBuilder[FlexMetadata]):
    """Lays queries and keys of all requests out in rows; counts of them come from the host."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlexMetadata:
        """Plan a batch.

        Raises:
            BatchError: lengths are not known on the host.
        """
        batch = common_attn_metadata
        num_reqs, device = batch.num_reqs, batch.query_start_loc.device
        starts = batch.query_start_loc[: num_reqs + 1].long()
        num_tokens = int(batch.query_start_loc_cpu[num_reqs])
        lens, host_lens = batch.seq_lens[:num_reqs].long(), batch.host_seq_lens("flex")
        if batch.encoder_seq_lens is not None:
            lens = batch.encoder_seq_lens[:num_reqs].long()
            host_lens = batch.encoder_seq_lens_cpu
            if host_lens is None:
                host_lens = batch.encoder_seq_lens.cpu()
        room = torch.as_tensor(host_lens)[:num_reqs].long()
        num_keys = int(room.sum())
        query_lens = starts.diff()
        contexts = lens - query_lens
        new = _row(query_lens, query_lens, num_tokens, -1)
        request = torch.where(new.request < 0, -2, new.request)
        owner = request.clamp(min=0)
        if num_reqs == 0:
            contexts = lens = starts.new_zeros(1)
        causal = batch.causal
        if isinstance(causal, torch.Tensor):
            causal = causal[owner] if num_reqs else torch.ones_like(owner, dtype=torch.bool)
        else:
            causal = torch.full_like(owner, causal, dtype=torch.bool)
        prefix = batch.checked_rswa_prefix_lens()
        return FlexMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            num_tokens=num_tokens,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table_tensor[:num_reqs],
            block_size=batch.block_size,
            views=self.views_of(batch),
            kv_lens=lens,
            request=request,
            position=contexts[owner] + new.position,
            context=contexts[owner],
            causal=causal,
            spans=_padded(batch.mm_token_spans(), owner),
            prefix=None if prefix is None or not num_reqs else prefix.long()[owner],
            tree=_padded(batch.checked_tree_mask(), owner),
            cached=_row(room.to(device, non_blocking=True), lens, num_keys, -1),
            new=new,
        )


def _row(room: torch.Tensor, lens: torch.Tensor, num_places: int, nobody: int) -> _Keys:
    """Places of all requests in a row, `room` for each, of which the first `lens` are its own."""
    device = room.device
    size = max(1, -(-num_places // BLOCK)) * BLOCK
    owner = torch.repeat_interleave(
        torch.arange(room.shape[0], device=device), room, output_size=num_places
    )
    begin = room.cumsum(0) - room
    position = torch.arange(num_places, device=device) - begin[owner]
    request = torch.where(position < lens[owner], owner, nobody)
    pad = (0, size - num_places)
    return _Keys(
        torch.nn.functional.pad(request, pad, value=nobody),
        torch.nn.functional.pad(position, pad),
    )


def _padded(per_token: torch.Tensor | None, owner: torch.Tensor) -> torch.Tensor | None:
    """int64, one entry per place of a query."""
    if per_token is None:
        return None
    rows = per_token.long()[: owner.shape[0]]
    return torch.cat([rows, rows.new_zeros(owner.shape[0] - rows.shape[0], *rows.shape[1:])])
