"""The flex backend: torch's FlexAttention, whose masks and scores are functions, over gathered pages.

In: the contract's batch, one layer's tensors and its paged cache. Out: attention by torch's public
`flex_attention`: eager on a CPU, some queries at a time, and compiled for a GPU. All requests of a batch
are one long sequence of queries over one of keys, and a query sees keys of its own request alone: the
block mask skips the rest.

Keys and values are copied out of the pages a layer and step at a time, so it is no rival to kernels that
read pages. It is for masks and scores that no kernel has yet.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from attnkit.backends.dense import DenseBackend, DenseImpl
from attnkit.backends.flex.mask import shifted
from attnkit.backends.flex.plan import CACHELESS, FlexMetadata, FlexMetadataBuilder
from attnkit.backends.libraries import join_sinks
from attnkit.contract import AttentionLayer, AttentionType, DeviceCapability
from attnkit.kvcache.read import check_block_ids

_MAX_RECOMPILES = 256
"""Torch gives up on a function that was traced for 8 kinds of layers and sizes; a kit has more."""

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
        """Above every kernel, since it copies each key it reads. On a CPU above the reference too where
        there are decodes: eager, with masks made for blocks of 128 queries, those took 9 to 25 times its
        time (1 and 16 requests of 128 and 1,024 keys on two cores), prompts of 64 and 512 tokens 0.7 and
        0.26."""
        on_cpu = request.device_capability.platform == "cpu"
        decodes = request.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        return 2000.0 if on_cpu and decodes else 500.0

    @classmethod
    def describe_runtime(cls) -> str:
        return f"torch {torch.__version__}, eager on a CPU, compiled for a GPU"


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
        # Eager products of 16-bit numbers are slow on a CPU, and round the scores; a code times its
        # scale is no 16-bit number.
        is_wide = query.device.type == "cpu" or self.cache_format.codec is not None
        dtype = torch.float32 if is_wide else query.dtype
        mask = plan.mask_of(variant)
        if variant.attn_type in CACHELESS:
            num_keys = plan.new.request.shape[0]
            k, v = (_rows(x[: plan.num_tokens], num_keys) for x in (key, value))
        else:
            k, v = self._gather(layer, kv_cache, plan)
        # What no query sees may be NaN, and 0 * NaN is NaN.
        k, v = (torch.where(mask.seen[:, None, None], x, 0).to(dtype) for x in (k, v))
        q = _rows(query[: plan.num_tokens].to(dtype), plan.request.shape[0])
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        score_mod = self._score_mod(plan)
        out = q.new_empty(q.shape[2], self.num_heads, self.head_size_v)
        lse = torch.empty(out.shape[:2], device=q.device)
        for part in mask.parts:
            rows, rows_lse = _attend(
                q[:, :, part.rows],
                k,
                v,
                score_mod=score_mod and shifted(score_mod, part.start),
                block_mask=part.block_mask,
                scale=self.scale,
            )
            out[part.rows], lse[part.rows] = rows[0].transpose(0, 1), rows_lse[0].T
        out, lse = out[: plan.num_tokens], lse[: plan.num_tokens]
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
