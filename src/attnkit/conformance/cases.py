"""The cases: every feature of dense attention, alone and together, as a table of data.

In: nothing. Out: `all_cases()`, frozen `Case`s that say what a layer and a batch look like and
nothing about how to compute them. `inputs` makes tensors from one, `checks` runs it on a backend.

Lengths are odd and cross page borders on purpose, and small: the whole table runs in minutes on
two cores, and in a kernel interpreter.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnkit.contract import AttentionType, KVCacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer, one batch.

    Attributes:
        name: unique; the seed of all random numbers of the case is derived from it.
        query_lens: new tokens per request; 0 is a padding row.
        seq_lens: all tokens per request. May be below the query length: the first queries then
            stand before the first key. For cross attention: tokens of the encoder.
        num_heads, num_kv_heads, head_size: of the layer.
        head_size_v: of values; None: as keys.
        dtype: of q, k, v and the output.
        kv_cache_dtype: cache format.
        block_size: tokens per page.
        layout: order in memory of the cache.
        causal: of the batch; a tuple says it per request.
        sliding_window: keys a query sees, itself included.
        freed_window: pages left of every query's window are freed: the table has the null block.
        logits_soft_cap: c in c * tanh(score / c).
        alibi, alibi_sqrt: slopes are added, in the square-root form.
        sinks: each head has a sink logit.
        attn_type: an `AttentionType`.
        return_lse: the layer also returns its LSE.
        shared_blocks: leading pages that all requests share.
        first_block: smallest block id in use is above this one.
        padding_tokens: rows behind the last real token.
        padding_reqs: rows of the batch behind the last real request.
        query_gain: factor on random queries: larger gives peaked softmaxes.
        scale: factor on q.k; None: head_size ** -0.5.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    causal: bool | tuple[bool, ...] = True
    sliding_window: int | None = None
    freed_window: bool = False
    logits_soft_cap: float | None = None
    alibi: bool = False
    alibi_sqrt: bool = False
    sinks: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    return_lse: bool = False
    shared_blocks: int = 0
    first_block: int = 0
    padding_tokens: int = 0
    padding_reqs: int = 0
    query_gain: float = 1.0
    scale: float | None = None

    @property
    def seed(self) -> int:
        """Of the case's random numbers."""
        return zlib.crc32(self.name.encode())

    @property
    def value_size(self) -> int:
        """head_size_v, or head_size where it is None."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def softmax_scale(self) -> float:
        """The scale in use."""
        return self.head_size**-0.5 if self.scale is None else self.scale

    @property
    def num_reqs(self) -> int:
        """Requests, without padding rows behind them."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the step."""
        return sum(self.query_lens)

    @property
    def is_cacheless(self) -> bool:
        """Keys are this step's, there are no pages."""
        return self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

    def is_causal(self, request: int) -> bool:
        """Whether queries of this request are blind to later keys; only a decoder's can be."""
        if self.attn_type is not AttentionType.DECODER:
            return False
        return self.causal[request] if isinstance(self.causal, tuple) else self.causal


BATCHES: dict[str, dict[str, tuple[int, ...]]] = {
    "decode": {"query_lens": (1, 1, 1, 1), "seq_lens": (33, 1, 64, 17)},
    "prefill": {"query_lens": (5, 33, 16), "seq_lens": (5, 33, 16)},
    "extend": {"query_lens": (7, 3, 17), "seq_lens": (40, 19, 50)},
    "mixed": {"query_lens": (1, 1, 0, 9, 21), "seq_lens": (49, 16, 0, 25, 21)},
}
"""Kinds of batches: all decodes, whole prompts, chunks on top of a context, and all of them with an
empty request in between."""

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "window": {"sliding_window": 11},
    "window_freed": {"sliding_window": 5, "freed_window": True},
    "softcap": {"logits_soft_cap": 2.0, "query_gain": 4.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "alibi_sqrt": {"alibi": True, "alibi_sqrt": True},
    "non_causal": {"causal": False},
    "encoder_only": {"attn_type": AttentionType.ENCODER_ONLY},
    "encoder": {"attn_type": AttentionType.ENCODER},
    "cross": {"attn_type": AttentionType.ENCODER_DECODER},
    "value_size": {"head_size_v": 16},
    "wide_values": {"head_size_v": 64},
    "peaked": {"query_gain": 100.0},
    "scale": {"scale": 0.5},
    "padding": {"padding_tokens": 6, "padding_reqs": 2},
    "shared_prefix": {"shared_blocks": 1},
    "mha": {"num_heads": 3, "num_kv_heads": 3},
    "mqa": {"num_heads": 5, "num_kv_heads": 1},
}
"""What a case asks beside plain causal attention: field values per feature."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PAIRED = (
    "lse",
    "window",
    "window_freed",
    "softcap",
    "sinks",
    "alibi",
    "alibi_sqrt",
    "non_causal",
    "encoder_only",
    "cross",
    "value_size",
    "padding",
    "mqa",
)
"""Features whose code paths meet in a kernel."""


def all_cases() -> tuple[Case, ...]:
    """The whole table, names unique, in the order of the sections below."""
    cases = tuple(
        itertools.chain(
            _alone(),
            _pairs(),
            _everything(),
            _head_sizes(),
            _groups(),
            _pages(),
            _lengths(),
            _long_contexts(),
            _cache_formats(),
        )
    )
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    return cases


def _case(name: str, batch: str, *features: str, **fields: Any) -> Case:
    """A case of the named batch and features; explicit fields win."""
    values: dict[str, Any] = dict(BATCHES[batch])
    for feature in features:
        values.update(FEATURES[feature])
    values.update(fields)
    return fit(Case(name=name, **values))


def fit(case: Case) -> Case:
    """Make a case that names an attention type describe a batch that such a type can have."""
    if case.is_cacheless:
        # An encoder attends to the tokens of this step and keeps nothing.
        lens = tuple(
            max(q, min(s, 21)) for q, s in zip(case.query_lens, case.seq_lens, strict=True)
        )
        return replace(case, query_lens=lens, seq_lens=lens, shared_blocks=0, freed_window=False)
    if case.shared_blocks:
        # Shared pages are part of everyone's context, so each request has at least one token more.
        shared = case.shared_blocks * case.block_size
        seqs = tuple(
            s + shared if q else s for q, s in zip(case.query_lens, case.seq_lens, strict=True)
        )
        return replace(case, seq_lens=seqs)
    return case


def _compatible(a: str, b: str) -> bool:
    """Whether two features say different things and both mean something together."""
    both = {a, b}
    if "non_causal" in both and both & {"encoder_only", "cross", "window_freed"}:
        return False
    if "cross" in both and both & {"window", "window_freed", "alibi", "alibi_sqrt", "encoder_only"}:
        # Decoder and encoder positions are not on one axis.
        return False
    if "encoder_only" in both and "window_freed" in both:
        return False
    return not any(both <= same for same in ({"window", "window_freed"}, {"alibi", "alibi_sqrt"}))


def _alone() -> Iterator[Case]:
    """Every feature by itself, in every kind of batch and dtype."""
    for feature, (dtype_name, dtype), batch in itertools.product(FEATURES, DTYPES.items(), BATCHES):
        yield _case(f"{feature}-{batch}-{dtype_name}", batch, feature, dtype=dtype)


def _pairs() -> Iterator[Case]:
    """Every two features that meet in a kernel; with LSE where the pair does not ask for it."""
    for a, b in itertools.combinations(_PAIRED, 2):
        if _compatible(a, b):
            for batch in ("mixed", "decode"):
                yield _case(f"{a}+{b}-{batch}-fp32", batch, a, b)


def _everything() -> Iterator[Case]:
    """Many features at once, as real models have them."""
    models: Mapping[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "gemma2": (("window", "softcap", "lse"), {}),
        "gpt_oss": (("window", "sinks", "lse"), {"num_heads": 8, "num_kv_heads": 1}),
        "bloom": (("alibi", "lse", "mha"), {}),
        "all": (("window", "softcap", "sinks", "alibi", "lse", "padding"), {}),
        "mixed_causal": (("window", "sinks", "lse"), {}),
        "saturated_cap": (("softcap", "lse"), {"query_gain": 400.0}),
    }
    for (name, (features, fields)), batch, (dtype_name, dtype) in itertools.product(
        models.items(), BATCHES, DTYPES.items()
    ):
        if name == "mixed_causal":
            num_reqs = len(BATCHES[batch]["query_lens"])
            fields = {"causal": tuple(r % 2 == 0 for r in range(num_reqs))}
        yield _case(f"{name}-{batch}-{dtype_name}", batch, *features, dtype=dtype, **fields)


def _head_sizes() -> Iterator[Case]:
    """8 to 512 in steps of 8; dtype and batch rotate."""
    for i, head_size in enumerate(range(8, 513, 8)):
        dtype_name = ("fp32", "bf16", "fp32", "fp16")[i % 4]
        yield Case(
            name=f"head_size_{head_size}-{dtype_name}",
            query_lens=(1, 5),
            seq_lens=(18, 21),
            num_heads=2,
            num_kv_heads=1,
            head_size=head_size,
            dtype=DTYPES[dtype_name],
            return_lse=i % 2 == 0,
        )


def _groups() -> Iterator[Case]:
    """Grouped heads, also in groups that are no power of two and larger than a tile."""
    for num_heads, num_kv_heads in (
        (7, 1),
        (71, 1),
        (12, 12),
        (6, 2),
        (28, 4),
        (40, 2),
        (48, 2),
        (9, 3),
        (15, 5),
        (64, 8),
    ):
        for batch in ("decode", "mixed"):
            yield _case(
                f"heads_{num_heads}_{num_kv_heads}-{batch}",
                batch,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=16,
                return_lse=True,
            )


def _pages() -> Iterator[Case]:
    """Page sizes, layouts and block ids."""
    for block_size in (1, 2, 3, 5, 8, 16, 24, 32, 48, 64, 100, 128, 160, 256):
        batch = "mixed" if block_size % 2 else "extend"
        yield _case(f"block_size_{block_size}-{batch}", batch, block_size=block_size)
        yield _case(
            f"block_size_{block_size}-decode-bf16",
            "decode",
            block_size=block_size,
            dtype=torch.bfloat16,
            sliding_window=None if block_size % 3 else 9,
        )
    for layout in KVCacheLayout:
        for batch in ("mixed", "decode"):
            yield _case(f"layout_{layout.name}-{batch}", batch, "lse", layout=layout)
    for first_block in (32_768, 65_536, 70_000):
        # 16-bit block ids wrap; pages are small enough for a laptop.
        yield _case(
            f"block_ids_above_{first_block}",
            "mixed",
            first_block=first_block,
            num_heads=1,
            num_kv_heads=1,
            head_size=16,
            dtype=torch.bfloat16,
        )


def _lengths() -> Iterator[Case]:
    """Lengths at and around page borders, more queries than keys, nothing at all."""
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129):
        yield Case(
            name=f"decode_length_{length}",
            query_lens=(1, 1),
            seq_lens=(length, 7),
            return_lse=length % 2 == 1,
        )
        if length < 66:
            yield Case(name=f"prompt_length_{length}", query_lens=(length,), seq_lens=(length,))
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "more_queries_than_keys": ((4, 5, 1), (2, 3, 1)),
        "no_key_at_all": ((3, 1, 2), (0, 5, 2)),
        "one_token": ((1,), (1,)),
        "no_request": ((), ()),
        "only_empty_requests": ((0, 0), (0, 0)),
        "empty_first": ((0, 1, 6), (0, 9, 6)),
        "empty_last": ((1, 6, 0), (9, 6, 0)),
        "two_prompts_then_decodes": ((5, 9, 1, 1), (5, 9, 30, 2)),
        "decode_between_prompts": ((12, 1, 20), (12, 17, 50)),
        "verify_three_drafts": ((4, 4, 4), (44, 4, 19)),
        "long_decode": ((1, 1), (700, 300)),
        "long_extend": ((33,), (290,)),
        "many_requests": ((1,) * 24, tuple(range(3, 75, 3))),
    }
    for name, (query_lens, seq_lens) in shapes.items():
        yield Case(name=name, query_lens=query_lens, seq_lens=seq_lens, return_lse=True)
        yield Case(
            name=f"{name}-sinks",
            query_lens=query_lens,
            seq_lens=seq_lens,
            return_lse=True,
            sinks=True,
        )
        yield Case(
            name=f"{name}-window-bf16",
            query_lens=query_lens,
            seq_lens=seq_lens,
            sliding_window=3,
            dtype=torch.bfloat16,
        )


def _long_contexts() -> Iterator[Case]:
    """Enough keys for rounding to add up where sums are not kept in float32."""
    for name, dtype in DTYPES.items():
        yield Case(
            name=f"long_context-{name}",
            query_lens=(1, 9),
            seq_lens=(1500, 700),
            dtype=dtype,
            return_lse=True,
        )


def _cache_formats() -> Iterator[Case]:
    """Plain cache dtypes that differ from the layer's."""
    for name, dtype in DTYPES.items():
        for kv_cache_dtype in ("float32", "float16", "bfloat16"):
            yield _case(
                f"cache_{kv_cache_dtype}-{name}",
                "mixed",
                "lse",
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
            )
