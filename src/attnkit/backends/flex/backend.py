"""The flex backend: torch's FlexAttention, whose masks and scores are functions, over gathered pages.

In: the contract's batch, one layer's tensors and its paged cache. Out: attention by torch's public
`flex_attention`: eager on a CPU, compiled for a GPU. All requests of a batch are one long sequence of
queries over one of keys, and a query sees keys of its own request alone: the block mask skips the rest.

Keys and values are copied out of the pages a layer and step at a time, so it is no rival to kernels that
read pages. It is for masks and scores that no kernel has yet.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from attnkit.backends.dense import DenseBackend, DenseImpl
from attnkit.backends.libraries import join_sinks
from attnkit.contract import (
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    AttentionVariant,
    CommonAttentionMetadata,
    DeviceCapability,
    KVCacheSpec,
)
from attnkit.kvcache.read import check_block_ids

_CACHELESS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_BLOCK = 128
"""Queries and keys in a block of the mask; both are padded to whole ones."""
_MAX_RECOMPILES = 256
"""Torch gives up on a function that was traced for 8 kinds of layers and sizes; a kit has more."""

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[..., torch.Tensor]


class FlexBackend(DenseBackend):
    """Every variant of dense attention, on CPUs and on GPUs that Triton compiles for."""

    @staticmethod
    def get_name() -> str:
        return "flex"

    @staticmethod
    def get_impl_cls() -> type[FlexImpl]:
        return FlexImpl

    @staticmethod
    def get_builder_cls() -> type[FlexMetadataBuilder]:
        return FlexMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        # What its kernels for GPUs take; its eager form takes any.
        return list(range(16, 257, 8))

    @classmethod
    def supports_head_size_v(cls, head_size: int, head_size_v: int) -> bool:
        return cls.supports_head_size(head_size_v)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.platform == "cpu" or capability >= DeviceCapability(8, 0)

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        # It copies every key it reads. Chosen by `auto` only where no kernel serves.
        return 500.0

    @classmethod
    def describe_runtime(cls) -> str:
        return f"torch {torch.__version__}, eager on a CPU, compiled for a GPU"


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
        masks: block masks that layers of the step have asked for, by their window and type.
    """

    num_actual_tokens: int
    num_tokens: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
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
    masks: dict[tuple[Any, ...], tuple[Any, torch.Tensor]] = field(default_factory=dict)

    def mask_of(self, variant: AttentionVariant) -> tuple[Any, torch.Tensor]:
        """The block mask of layers with this mask, and bool (S,): the key is seen by some query. Made
        once a step."""
        kind = (variant.attn_type, variant.sliding_window)
        if kind not in self.masks:
            from torch.nn.attention.flex_attention import create_block_mask

            keys = self.keys_of(variant)
            mask_mod = self.mask_mod(variant)
            shape = (self.request.shape[0], keys.request.shape[0])
            device = self.request.device
            mask = create_block_mask(
                mask_mod, None, None, *shape, device=str(device), BLOCK_SIZE=_BLOCK
            )
            zero = torch.zeros((), dtype=torch.int64, device=device)
            key_places = torch.arange(shape[1], device=device)
            seen = torch.zeros_like(key_places, dtype=torch.bool)
            for places in torch.arange(shape[0], device=device).split(8 * _BLOCK):
                seen |= mask_mod(zero, zero, places[:, None], key_places).any(0)
            self.masks[kind] = mask, seen
        return self.masks[kind]

    def keys_of(self, variant: AttentionVariant) -> _Keys:
        """The keys that layers of this type read."""
        return self.new if variant.attn_type in _CACHELESS else self.cached

    def mask_mod(self, variant: AttentionVariant) -> MaskMod:
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
    size = max(1, -(-num_places // _BLOCK)) * _BLOCK
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


class FlexImpl(DenseImpl[FlexMetadata]):
    """One layer."""

    backend_name = "flex"

    def prepare_layer(self) -> None:
        cap = self.variant.logits_soft_cap
        self._soft_cap = None if cap is None else torch.tensor(cap)

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's K and V; slot -1 writes nothing."""
        self.cache_format.write(key, value, kv_cache, slot_mapping, layer._k_scale, layer._v_scale)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlexMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend to the cache, or, in encoders, to `key` and `value` themselves."""
        self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        plan = attn_metadata
        variant = self.variant = self.variant.to(query.device)
        if self._soft_cap is not None:
            self._soft_cap = self._soft_cap.to(query.device)
        # Eager products of 16-bit numbers are slow on a CPU, and round the scores.
        dtype = torch.float32 if query.device.type == "cpu" else query.dtype
        mask, seen = plan.mask_of(variant)
        if variant.attn_type in _CACHELESS:
            num_keys = plan.new.request.shape[0]
            k, v = (_rows(x[: plan.num_tokens], num_keys) for x in (key, value))
        else:
            k, v = self._gather(layer, kv_cache, plan)
        # What no query sees may be NaN, and 0 * NaN is NaN.
        k, v = (torch.where(seen[:, None, None], x, 0).to(dtype) for x in (k, v))
        q = _rows(query[: plan.num_tokens].to(dtype), plan.request.shape[0])
        out, lse = _attend(
            *(x.transpose(0, 1)[None] for x in (q, k, v)),
            score_mod=self._score_mod(plan),
            block_mask=mask,
            scale=self.scale,
        )
        out = out[0].transpose(0, 1)[: plan.num_tokens]
        lse = lse[0].T[: plan.num_tokens]
        if variant.sinks is not None:
            out, lse = join_sinks(out, lse, variant.sinks)
        output[: plan.num_tokens] = out.to(output.dtype)
        return (output, lse) if self.need_to_return_lse_for_decode else output

    def _gather(
        self, layer: AttentionLayer, kv_cache: torch.Tensor, plan: FlexMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values out of the pages, (S, num_kv_heads, size) each; anything where no key is."""
        owner, position = plan.cached.request, plan.cached.position
        block_size = kv_cache.shape[2]
        if not plan.block_table.numel():
            owner = torch.full_like(owner, -1)
            blocks = torch.zeros_like(owner)
        else:
            last = plan.block_table.shape[1] - 1
            columns = (position // block_size).clamp(max=last)
            blocks = plan.block_table[owner.clamp(min=0), columns].long()
        blocks = torch.where(owner < 0, 0, blocks)
        check_block_ids(blocks, kv_cache.shape[0])
        tokens = kv_cache[blocks, :, position % block_size]
        return self.cache_format.decode(
            tokens, self.head_size, self.head_size_v, layer._k_scale, layer._v_scale
        )

    def _score_mod(self, plan: FlexMetadata) -> ScoreMod | None:
        """What becomes of q.k * scale; None: nothing."""
        variant = self.variant
        slopes, is_sqrt, cap = variant.alibi_slopes, variant.use_alibi_sqrt, self._soft_cap
        if cap is None and slopes is None:
            return None
        q_position, k_position = plan.position, plan.keys_of(variant).position

        def changed(
            score: torch.Tensor,
            b: torch.Tensor,
            h: torch.Tensor,
            q: torch.Tensor,
            k: torch.Tensor,
        ) -> torch.Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if slopes is not None:
                ahead = (k_position[k] - q_position[q]).to(torch.float32)
                if is_sqrt:
                    ahead = -torch.sqrt((-ahead).clamp(min=0))
                score = score + slopes[h] * ahead
            return score

        return changed


@functools.cache
def _compiled() -> Callable[..., Any]:
    """`flex_attention` for GPUs, compiled once for rows of any length."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: ScoreMod | None,
    block_mask: Any,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flex_attention` of (1, heads, rows, size): output, and a natural LSE of float32."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    call = flex_attention if query.device.type == "cpu" else _compiled()
    patched = torch._dynamo.config.patch(recompile_limit=_MAX_RECOMPILES)  # type: ignore[attr-defined]
    with patched, warnings.catch_warnings():
        # The eager form is meant here.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = call(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
    assert aux.lse is not None
    return out, aux.lse


def _rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(num_rows, heads, size): `x` and rows of zeros behind it."""
    return torch.cat([x, x.new_zeros(num_rows - x.shape[0], *x.shape[1:])])
