"""Claims of a backend over latents: what its class says, held against what it then does.

In: an `MLASubject`'s basis. Out: the claims of `conformance.claims`, for layers that keep latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnkit.conformance.claims import Claim, common_claims
from attnkit.conformance.mla.case import MLABasis, MLACase
from attnkit.conformance.mla.cases import SIZES
from attnkit.contract import CACHE_DTYPES, AttentionBackend, AttentionType, MLADimensions


def all_mla_claims(basis: MLABasis) -> tuple[Claim, ...]:
    """Every flag of the contract that concerns latents.

    Args:
        basis: of the cases that show them.
    """
    return (*common_claims(), *_formats(), *_sizes(basis), *_chosen_keys(), *_refusals())


def _formats() -> list[Claim]:
    return [
        Claim(
            name=f"cache format {name}",
            made=lambda b, name=name: b.supports_kv_cache_dtype(name),
            request={"kv_cache_dtype": name},
            layer={"kv_cache_dtype": name},
            shown_by=lambda c, name=name: c.kv_cache_dtype == name,
        )
        for name in CACHE_DTYPES
    ]


def _sizes(basis: MLABasis) -> list[Claim]:
    def takes(backend: type[AttentionBackend], d: MLADimensions) -> bool:
        if not backend.supports_head_size(d.latent_size):
            return False
        return backend.supports_mla_dimensions(d, "auto") is None

    def has(case: Any, d: MLADimensions) -> bool:
        return isinstance(case, MLACase) and case.dimensions == d

    return [
        Claim(
            name=f"sizes {d}",
            made=lambda b, d=d: takes(b, d),
            request={"head_size": d.latent_size, "mla": d},
            layer={
                "head_size": d.kv_lora_rank,
                "head_size_v": d.qk_rope_head_dim,
                "qk_nope_head_dim": d.qk_nope_head_dim,
                "v_head_dim": d.v_head_dim,
            },
            shown_by=lambda c, d=d: has(c, d),
        )
        for d in dict.fromkeys((basis.dimensions, *SIZES))
    ]


def _chosen_keys() -> list[Claim]:
    return [
        Claim(
            name="all keys",
            made=lambda b: not b.is_sparse(),
            request={"use_sparse": False},
            shown_by=lambda c: getattr(c, "told", None) is None,
        ),
        Claim(
            name="chosen keys",
            made=lambda b: b.is_sparse(),
            request={"use_sparse": True},
            layer={"told": 3},
            shown_by=lambda c: getattr(c, "told", None) is not None,
        ),
    ]


def _refusals() -> list[Claim]:
    """What layers over latents are not, or what this kit has no cases for: a no is checked, a yes
    stays unjudged."""
    flags: dict[str, tuple[Callable[[type[AttentionBackend]], bool], dict[str, Any]]] = {
        "keys and values": (lambda b: not b.is_mla(), {"use_mla": False, "mla": None}),
        "attention sinks": (lambda b: b.supports_sink(), {"has_sink": True}),
        "sliding window": (lambda b: b.supports_sliding_window(), {"has_sliding_window": True}),
        "ALiBi": (lambda b: b.supports_alibi(), {"use_alibi": True}),
        "logits soft cap": (
            lambda b: b.supports_logits_soft_cap(),
            {"has_logits_soft_cap": True},
        ),
        "non-causal batches": (lambda b: b.supports_non_causal(), {"use_non_causal": True}),
        "scales per head": (
            lambda b: b.supports_per_head_quant_scales(),
            {"use_per_head_quant_scales": True},
        ),
        "encoders": (
            lambda b: b.supports_attn_type(AttentionType.ENCODER_ONLY.value),
            {"attn_type": AttentionType.ENCODER_ONLY.value},
        ),
        "multimodal prefix": (lambda b: b.supports_mm_prefix(), {"use_mm_prefix": True}),
        "R-SWA": (lambda b: b.supports_rswa(), {"use_rswa": True}),
        "prefill context parallelism": (lambda b: b.supports_pcp(), {"use_pcp": True}),
        "decode context parallelism": (lambda b: b.supports_dcp(), {"use_dcp": True}),
    }
    return [Claim(name=name, made=made, request=ask) for name, (made, ask) in flags.items()]
