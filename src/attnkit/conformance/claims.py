"""Claims: what a backend's class says of itself, held against what it then does.

In: a `Subject`. Out: one check per flag. A yes must be shown by at least one case that runs; a no
must be refused with a reason when a layer asks for it, both by selection and by the layer. A yes
that this kit has no cases for is listed as unjudged, never as passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnkit.conformance.case import Basis, Case
from attnkit.conformance.cases import BATCHES
from attnkit.conformance.subject import LawBroken, NotClaimed, Subject
from attnkit.contract import (
    CACHE_DTYPES,
    AttentionBackend,
    AttentionType,
)
from attnkit.errors import UnsupportedConfiguration
from attnkit.kvcache.formats import CACHE_FORMATS
from attnkit.selection import AttentionRequest, reasons_against, select


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One thing a backend says yes or no to.

    Attributes:
        name: of the claim.
        made: asks the class.
        request: fields of an `AttentionRequest` that need it.
        layer: fields of a `Case` whose layer needs it; None: no layer of the kit can ask for it.
        shown_by: whether a case shows it; None: no case does, so a yes stays unjudged.
        shown_by_law: name of a law that shows it instead.
    """

    name: str
    made: Callable[[type[AttentionBackend]], bool]
    request: dict[str, Any] = field(default_factory=dict)
    layer: dict[str, Any] | None = None
    shown_by: Callable[[Case], bool] | None = None
    shown_by_law: str | None = None


def check_claim(subject: Subject, claim: Claim, cases: Sequence[Case]) -> None:
    """Hold a claim against what the backend does.

    Args:
        subject: the backend.
        claim: what it says.
        cases: that may show it.

    Raises:
        LawBroken: a yes that no case can use, or a no that is not refused with a reason.
        NotClaimed: a yes that the kit cannot judge.
    """
    if not claim.made(subject.backend):
        _expect_refusal(subject, claim)
        return
    if claim.shown_by_law is not None:
        return
    if claim.shown_by is None:
        raise NotClaimed(f"{subject.name} says yes to {claim.name}, which this kit has no case for")
    refusals: list[str] = []
    for case in cases:
        if claim.shown_by(case):
            try:
                subject.layer(case)
            except NotClaimed as refusal:
                refusals.append(str(refusal))
            else:
                return
    raise LawBroken(
        f"{subject.name} says yes to {claim.name} and refuses each of the {len(refusals)} cases that "
        f"use it; the first because: {refusals[0]}"
    )


def _expect_refusal(subject: Subject, claim: Claim) -> None:
    """Selection and layer both say no, with a reason."""
    backend = subject.backend
    request = AttentionRequest(**{**subject.plain_request(), **claim.request})
    reasons = reasons_against(backend, request)
    if not reasons:
        raise LawBroken(
            f"{subject.name} says no to {claim.name}, but selection accepts a layer that needs it"
        )
    if not all(reason.strip() for reason in reasons):
        raise LawBroken(f"{subject.name} refuses {claim.name} without saying why")
    try:
        select(request, backend)
    except UnsupportedConfiguration as refusal:
        missing = [reason for reason in reasons if reason not in str(refusal)]
        if missing:
            raise LawBroken(f"the refusal of {claim.name} does not say: {missing[0]}") from refusal
    else:
        raise LawBroken(f"selection by name took {claim.name}, which {subject.name} says no to")
    if claim.layer is not None:
        plain = subject.plain_case(f"refused-{claim.name}", **BATCHES["decode"])
        case = replace(plain, **claim.layer)
        try:
            subject.layer(case)
        except NotClaimed:
            return
        raise LawBroken(f"a layer with {claim.name} was built, which {subject.name} says no to")


def all_claims(basis: Basis) -> tuple[Claim, ...]:
    """Every flag of the contract that concerns dense attention.

    Args:
        basis: of the cases that show them.
    """
    return (
        *common_claims(),
        *_features(basis),
        *_types(),
        *_formats(),
        *_sizes(),
        *_kinds(),
    )


def common_claims() -> list[Claim]:
    """Of layers that keep keys and values and of layers that keep latents alike."""
    claims = [
        Claim(
            name="LSE output",
            made=lambda b: b.supports_lse(),
            request={"return_lse": True},
            layer={"return_lse": True},
            shown_by=lambda c: c.return_lse,
        ),
        Claim(
            name="batch invariance",
            made=lambda b: b.supports_batch_invariance(),
            request={"use_batch_invariant": True},
            shown_by_law="batch_mates_do_not_matter",
        ),
        Claim(
            name="query lengths decided on the device",
            made=lambda b: b.supports_device_cpu_query_lens_mismatch(),
            request={"use_adaptive_verification": True},
            shown_by_law="the_device_has_the_last_word_on_lengths",
        ),
        Claim(
            name="KV connector",
            made=lambda b: b.supports_kv_connector(),
            request={"use_kv_connector": True},
            # A connector puts the bytes of a page into another one.
            shown_by_law="pages_do_not_matter",
        ),
    ]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        judged = dtype is not torch.float64
        claims.append(
            Claim(
                name=f"dtype {str(dtype).removeprefix('torch.')}",
                made=lambda b, dtype=dtype: b.supports_dtype(dtype),
                request={"dtype": dtype},
                layer={"dtype": dtype},
                shown_by=(lambda c, dtype=dtype: c.dtype is dtype) if judged else None,
            )
        )
    claims += [
        Claim(
            name=f"block size {size}",
            made=lambda b, size=size: b.supports_block_size(size),
            request={"block_size": size},
            layer={"block_size": size},
            # Pages that an engine would split show a larger block.
            shown_by=lambda c, size=size: size % c.block_size == 0,
        )
        for size in (1, 2, 3, 5, 8, 16, 24, 32, 48, 64, 100, 128, 160, 256)
    ]
    return claims


def _features(basis: Basis) -> list[Claim]:
    size = basis.head_size
    small, large = size // 2, size * 2
    return [
        Claim(
            name="attention sinks",
            made=lambda b: b.supports_sink(),
            request={"has_sink": True},
            layer={"sinks": True},
            shown_by=lambda c: c.sinks,
        ),
        Claim(
            name="ALiBi",
            made=lambda b: b.supports_alibi(),
            request={"use_alibi": True},
            layer={"alibi": True},
            shown_by=lambda c: c.alibi and not c.alibi_sqrt,
        ),
        Claim(
            name="square-root ALiBi",
            made=lambda b: b.supports_alibi_sqrt(),
            request={"use_alibi": True, "use_alibi_sqrt": True},
            layer={"alibi": True, "alibi_sqrt": True},
            shown_by=lambda c: c.alibi_sqrt,
        ),
        Claim(
            name="logits soft cap",
            made=lambda b: b.supports_logits_soft_cap(),
            request={"has_logits_soft_cap": True},
            layer={"logits_soft_cap": 2.0},
            shown_by=lambda c: c.logits_soft_cap is not None,
        ),
        Claim(
            name="sliding window",
            made=lambda b: b.supports_sliding_window(),
            request={"has_sliding_window": True},
            layer={"sliding_window": 4},
            shown_by=lambda c: c.sliding_window is not None,
        ),
        Claim(
            name="non-causal batches",
            made=lambda b: b.supports_non_causal(),
            request={"use_non_causal": True},
            layer={"causal": False},
            shown_by=lambda c: c.attn_type is AttentionType.DECODER and c.causal is False,
        ),
        Claim(
            name="multimodal prefix",
            made=lambda b: b.supports_mm_prefix(),
            request={"use_mm_prefix": True},
            layer={"mm_prefix": True},
            shown_by=lambda c: c.mm_prefix,
        ),
        Claim(
            name="R-SWA",
            made=lambda b: b.supports_rswa(),
            request={"use_rswa": True, "has_sliding_window": True},
            layer={"rswa": True, "sliding_window": 4},
            shown_by=lambda c: c.rswa,
        ),
        Claim(
            name="tree mask",
            made=lambda b: b.supports_tree_mask(),
            request={"use_tree_mask": True},
            layer={"tree": True},
            shown_by=lambda c: c.tree,
        ),
        Claim(
            name="values smaller than keys",
            made=lambda b: b.supports_head_size_v(size, small),
            request={"head_size_v": small},
            layer={"head_size_v": small},
            shown_by=lambda c: (c.head_size, c.head_size_v) == (size, small),
        ),
        Claim(
            name="values larger than keys",
            made=lambda b: b.supports_head_size_v(size, large),
            request={"head_size_v": large},
            layer={"head_size_v": large},
            shown_by=lambda c: (c.head_size, c.head_size_v) == (size, large),
        ),
        Claim(
            name="scales per head",
            made=lambda b: b.supports_per_head_quant_scales(),
            request={"use_per_head_quant_scales": True},
            layer={"per_head_scales": True},
            shown_by=lambda c: c.per_head_scales,
        ),
    ]


def _types() -> list[Claim]:
    return [
        Claim(
            name=f"attention type {kind.value}",
            made=lambda b, kind=kind: b.supports_attn_type(kind.value),
            request={"attn_type": kind.value},
            # A layer's cache spec is not needed to be refused.
            layer={"attn_type": kind},
            shown_by=lambda c, kind=kind: c.attn_type is kind,
        )
        for kind in AttentionType
    ]


def _formats() -> list[Claim]:
    claims = []
    for name in CACHE_DTYPES:
        judged = name in CACHE_FORMATS  # The others are rows of latents.
        claims.append(
            Claim(
                name=f"cache format {name}",
                made=lambda b, name=name: b.supports_kv_cache_dtype(name),
                request={"kv_cache_dtype": name},
                layer={"kv_cache_dtype": name},
                shown_by=(lambda c, name=name: c.kv_cache_dtype == name) if judged else None,
            )
        )
    return claims


def _sizes() -> list[Claim]:
    return [
        Claim(
            name=f"head size {size}",
            made=lambda b, size=size: b.supports_head_size(size),
            request={"head_size": size},
            layer={"head_size": size},
            shown_by=lambda c, size=size: c.head_size == size,
        )
        for size in range(8, 513, 8)
    ]


def _kinds() -> list[Claim]:
    """What this kit has no cases for yet: a no is checked, a yes is left unjudged."""
    flags: dict[str, tuple[Callable[[type[AttentionBackend]], bool], dict[str, Any]]] = {
        "MLA latents": (lambda b: b.is_mla(), {"use_mla": True}),
        "sparse attention": (lambda b: b.is_sparse(), {"use_sparse": True}),
        "prefill context parallelism": (lambda b: b.supports_pcp(), {"use_pcp": True}),
        "decode context parallelism": (lambda b: b.supports_dcp(), {"use_dcp": True}),
    }
    return [Claim(name=name, made=made, request=ask) for name, (made, ask) in flags.items()]
