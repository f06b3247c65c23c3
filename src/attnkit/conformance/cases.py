"""The table of cases: every feature of dense attention, alone and together.

In: a `Basis`, the plain layer that a backend takes. Out: `all_cases()`, which says what layers and
batches look like and nothing about how to compute them.

Lengths are odd and cross page borders on purpose, and small: the whole table runs in minutes on
two cores, and in a kernel interpreter.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from attnkit.conformance.case import DTYPES, Basis, Case
from attnkit.contract import CACHE_DTYPES, AttentionType, KVCacheLayout, KVQuantMode
from attnkit.kvcache.formats import CACHE_FORMATS, cache_format

BATCHES: dict[str, dict[str, Any]] = {
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
    "mm_prefix": {"mm_prefix": True},
    "chunked": {"chunk_pages": 1, "freed_window": True},
    "rswa": {"rswa": True, "sliding_window": 5, "freed_window": True},
    "tree": {"tree": True},
    "encoder_only": {"attn_type": AttentionType.ENCODER_ONLY},
    "encoder": {"attn_type": AttentionType.ENCODER},
    "cross": {"attn_type": AttentionType.ENCODER_DECODER},
    "value_size": {"head_size_v": 0.5},
    "wide_values": {"head_size_v": 2},
    "peaked": {"query_gain": 100.0},
    "scale": {"scale": 0.5},
    "padding": {"padding_tokens": 6, "padding_reqs": 2},
    "shared_prefix": {"shared_blocks": 1},
    "mha": {"num_heads": 3, "num_kv_heads": 3},
    "mqa": {"num_heads": 5, "num_kv_heads": 1},
}
"""What a case asks beside plain causal attention: field values per feature; value head sizes in
multiples of the key's."""

_PAIRED = (
    "lse",
    "window",
    "window_freed",
    "softcap",
    "sinks",
    "alibi",
    "alibi_sqrt",
    "non_causal",
    "mm_prefix",
    "rswa",
    "chunked",
    "encoder_only",
    "cross",
    "value_size",
    "padding",
    "mqa",
)
"""Features whose code paths meet in a kernel."""


@functools.cache
def all_cases(basis: Basis | None = None) -> tuple[Case, ...]:
    """The whole table, names unique, in the order of the sections below.

    Args:
        basis: what cases are when they are about something else. None: the widest one.
    """
    basis = Basis() if basis is None else basis
    sections = (
        _alone,
        _pairs,
        _everything,
        _masks,
        _head_sizes,
        _groups,
        _pages,
        _lengths,
        _long_contexts,
        _cache_formats,
        _quantised_caches,
        _random_mixtures,
    )
    cases = tuple(case for section in sections for case in section(basis))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    return cases


def plain_case(name: str, basis: Basis, dtype: str | None = None, **fields: Any) -> Case:
    """A case of the basis; explicit fields win.

    Args:
        name: of the case.
        basis: of the table.
        dtype: name of a dtype; None: the first of the basis.
        fields: of `Case`.
    """
    values = {
        "dtype": DTYPES[dtype or basis.dtypes[0]],
        "head_size": basis.head_size,
        "block_size": basis.block_size,
        "layout": basis.layout,
        **fields,
    }
    return _fit(Case(name=name, **values))


def _case(
    name: str, basis: Basis, batch: str, *features: str, dtype: str | None = None, **fields: Any
) -> Case:
    """A case of the named batch and features; explicit fields win."""
    values: dict[str, Any] = dict(BATCHES[batch])
    for feature in features:
        values.update(FEATURES[feature])
    if "head_size_v" in values:
        values["head_size_v"] = int(values["head_size_v"] * basis.head_size)
    return plain_case(name, basis, dtype, **{**values, **fields})


def _fit(case: Case) -> Case:
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
    if both & {"mm_prefix", "rswa", "chunked"} and both & {"encoder_only", "cross"}:
        return False
    if "chunked" in both and both & {"non_causal", "mm_prefix", "rswa", "window", "window_freed"}:
        return False
    if "rswa" in both and both & {"non_causal", "window", "window_freed"}:
        return False  # Its pages are freed as a causal window's are.
    if "cross" in both and both & {"window", "window_freed", "alibi", "alibi_sqrt", "encoder_only"}:
        # Decoder and encoder positions are not on one axis.
        return False
    if "encoder_only" in both and "window_freed" in both:
        return False
    return not any(both <= same for same in ({"window", "window_freed"}, {"alibi", "alibi_sqrt"}))


def _alone(basis: Basis) -> Iterator[Case]:
    """Every feature by itself, in every kind of batch and dtype."""
    for feature, dtype, batch in itertools.product(FEATURES, basis.dtypes, BATCHES):
        yield _case(f"{feature}-{batch}-{dtype}", basis, batch, feature, dtype=dtype)


def _pairs(basis: Basis) -> Iterator[Case]:
    """Every two features that meet in a kernel."""
    for a, b in itertools.combinations(_PAIRED, 2):
        if _compatible(a, b):
            for batch in ("mixed", "decode"):
                yield _case(f"{a}+{b}-{batch}-{basis.dtypes[0]}", basis, batch, a, b)


def _everything(basis: Basis) -> Iterator[Case]:
    """Many features at once, as real models have them."""
    models: Mapping[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "gemma2": (("window", "softcap"), {}),
        "gemma3": (("window", "mm_prefix"), {"sliding_window": 4}),
        "llama4": (("chunked",), {"chunk_pages": 2}),
        "gpt_oss": (("window", "sinks"), {"num_heads": 8, "num_kv_heads": 1}),
        "bloom": (("alibi", "mha"), {}),
        "all": (("window", "softcap", "sinks", "alibi", "padding"), {}),
        "mixed_causal": (("window",), {}),
        "saturated_cap": (("softcap",), {"query_gain": 400.0}),
    }
    for (name, (features, fields)), batch, dtype in itertools.product(
        models.items(), BATCHES, basis.dtypes
    ):
        if name == "mixed_causal":
            num_reqs = len(BATCHES[batch]["query_lens"])
            fields = {"causal": tuple(r % 2 == 0 for r in range(num_reqs))}
        yield _case(
            f"{name}-{batch}-{dtype}",
            basis,
            batch,
            *features,
            dtype=dtype,
            return_lse=basis.lse,
            **fields,
        )


def _masks(basis: Basis) -> Iterator[Case]:
    """Ranges, prefixes and chunks as no feature by itself has them."""
    lens: dict[str, Any] = {"query_lens": (4, 5, 1), "seq_lens": (2, 3, 1)}
    yield plain_case("chunked-more_queries_than_keys", basis, chunk_pages=1, **lens)
    prompt: dict[str, Any] = {"query_lens": (50, 20, 1), "seq_lens": (100, 20, 33)}
    yield plain_case("chunks_of_two_pages", basis, chunk_pages=2, return_lse=basis.lse, **prompt)
    yield plain_case(
        "chunked-non_causal", basis, chunk_pages=1, causal=(False, True, False), **prompt
    )
    yield plain_case(
        "rswa-non_causal", basis, rswa=True, sliding_window=7, causal=(False, True, False), **prompt
    )
    yield plain_case(
        "rswa+mm_prefix+window_of_1", basis, rswa=True, mm_prefix=True, sliding_window=1, **prompt
    )
    tree: dict[str, Any] = {"tree": True, "return_lse": basis.lse}
    for other in ("softcap", "sinks", "value_size", "padding", "mqa"):
        yield _case(f"{other}+tree-mixed-{basis.dtypes[0]}", basis, "mixed", other, "tree", **tree)
    for name in ("fp8", "int8_per_token_head"):
        yield _case(f"tree+{name}-mixed", basis, "mixed", "tree", kv_cache_dtype=name)
    yield plain_case("tree-of_64", basis, query_lens=(64, 65), seq_lens=(77, 65), **tree)
    yield plain_case("tree-more_queries_than_keys", basis, **lens, **tree)
    yield plain_case("tree-non_causal", basis, causal=(False, True, False), **prompt, **tree)
    yield plain_case(
        "tree-many", basis, query_lens=(8, 5, 1, 4) * 3, seq_lens=(90, 5, 33, 40) * 3, **tree
    )
    yield plain_case(
        "ranges_of_one_token",
        basis,
        mm_prefix=True,
        mm_ranges=(((0, 0), (50, 50), (51, 98), (99, 99)), ((0, 19),), ()),
        sliding_window=3,
        **prompt,
    )


def _head_sizes(basis: Basis) -> Iterator[Case]:
    """8 to 512 in steps of 8; dtypes take turns, the first of the basis every second time."""
    rotation = [d for other in basis.dtypes[1:] or basis.dtypes for d in (basis.dtypes[0], other)]
    for i, head_size in enumerate(range(8, 513, 8)):
        dtype = rotation[i % len(rotation)]
        yield plain_case(
            f"head_size_{head_size}-{dtype}",
            basis,
            dtype,
            query_lens=(1, 5),
            seq_lens=(18, 21),
            num_heads=2,
            num_kv_heads=1,
            head_size=head_size,
            return_lse=basis.lse and i % 2 == 0,
        )


def _groups(basis: Basis) -> Iterator[Case]:
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
                basis,
                batch,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=basis.small_head_size,
                return_lse=basis.lse,
            )


def _pages(basis: Basis) -> Iterator[Case]:
    """Page sizes, layouts and block ids."""
    second = basis.dtypes[-1]
    for block_size in (1, 2, 3, 5, 8, 16, 24, 32, 48, 64, 100, 128, 160, 256):
        batch = "mixed" if block_size % 2 else "extend"
        yield _case(f"block_size_{block_size}-{batch}", basis, batch, block_size=block_size)
        yield _case(
            f"block_size_{block_size}-decode-{second}",
            basis,
            "decode",
            dtype=second,
            block_size=block_size,
        )
        yield _case(
            f"block_size_{block_size}-window", basis, batch, "window", block_size=block_size
        )
    for layout in KVCacheLayout:
        for batch in ("mixed", "decode"):
            yield _case(
                f"layout_{layout.name}-{batch}", basis, batch, layout=layout, return_lse=basis.lse
            )
    for first_block in (32_768, 65_536, 70_000):
        # 16-bit block ids wrap; pages are small enough for a laptop.
        yield _case(
            f"block_ids_above_{first_block}",
            basis,
            "mixed",
            first_block=first_block,
            num_heads=1,
            num_kv_heads=1,
            head_size=basis.small_head_size,
            dtype=second,
        )


def _lengths(basis: Basis) -> Iterator[Case]:
    """Lengths at and around page borders, more queries than keys, nothing at all."""
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129):
        yield plain_case(
            f"decode_length_{length}",
            basis,
            query_lens=(1, 1),
            seq_lens=(length, 7),
            return_lse=basis.lse and length % 2 == 1,
        )
        if length < 66:
            yield plain_case(
                f"prompt_length_{length}", basis, query_lens=(length,), seq_lens=(length,)
            )
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
        lens: dict[str, Any] = {"query_lens": query_lens, "seq_lens": seq_lens}
        yield plain_case(name, basis, return_lse=basis.lse, **lens)
        yield plain_case(f"{name}-sinks", basis, return_lse=basis.lse, sinks=True, **lens)
        second = basis.dtypes[-1]
        yield plain_case(f"{name}-window-{second}", basis, second, sliding_window=3, **lens)


def _long_contexts(basis: Basis) -> Iterator[Case]:
    """Enough keys for rounding to add up where sums are not kept in float32."""
    for dtype in basis.dtypes:
        yield plain_case(
            f"long_context-{dtype}",
            basis,
            dtype,
            query_lens=(1, 9),
            seq_lens=(1500, 700),
            return_lse=basis.lse,
        )


def _cache_formats(basis: Basis) -> Iterator[Case]:
    """Plain cache dtypes, the layer's own and others."""
    for dtype in basis.dtypes:
        for kv_cache_dtype in ("float32", "float16", "bfloat16"):
            yield _case(
                f"cache_{kv_cache_dtype}-{dtype}",
                basis,
                "mixed",
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                return_lse=basis.lse,
            )


def _quantised_caches(basis: Basis) -> Iterator[Case]:
    """Formats with codes: alone, with masks and heads, with scales per head, saturated."""
    mixtures: Mapping[str, tuple[str, dict[str, Any]]] = {
        "window": ("mixed", {"sliding_window": 11, "freed_window": True}),
        "sinks_softcap": ("mixed", {"sinks": True, "logits_soft_cap": 2.0}),
        "mqa": ("extend", {"num_heads": 7, "num_kv_heads": 1}),
        "padding": ("mixed", {"padding_tokens": 3, "padding_reqs": 1}),
        "large_pages": ("decode", {"block_size": 4 * basis.block_size}),
        "saturated": ("mixed", {"value_gain": 1000.0}),
        "zeros": ("mixed", {"value_gain": 0.0}),
        # Around the smallest codes: of e4m3 under the kit's scale, then of e5m2.
        "denormals": ("decode", {"value_gain": 2.0**-9}),
        "tiny": ("decode", {"value_gain": 1e-5}),
        "wide_values": ("mixed", {"head_size_v": 2 * basis.head_size, "alibi": True}),
    }
    for name, (_, mode) in CACHE_DTYPES.items():
        if mode is KVQuantMode.NONE or name not in CACHE_FORMATS:
            continue
        how: dict[str, Any] = {"kv_cache_dtype": name, "return_lse": basis.lse}
        for batch, dtype in itertools.product(BATCHES, basis.dtypes):
            yield _case(f"{name}-{batch}-{dtype}", basis, batch, dtype=dtype, **how)
        for i, (mixture, (batch, fields)) in enumerate(mixtures.items()):
            dtype = basis.dtypes[i % len(basis.dtypes)]
            yield _case(f"{name}-{mixture}-{dtype}", basis, batch, dtype=dtype, **how, **fields)
        if cache_format(name).reads_layer_scales:
            for batch, dtype in (("mixed", basis.dtypes[0]), ("decode", basis.dtypes[-1])):
                yield _case(
                    f"{name}-per_head_scales-{batch}",
                    basis,
                    batch,
                    dtype=dtype,
                    per_head_scales=True,
                    **how,
                )


def _random_mixtures(basis: Basis) -> Iterator[Case]:
    """Batches and features that nobody thought of; the same ones every time."""
    for i in range(60):
        rng = random.Random(i)
        features: list[str] = []
        for feature in rng.sample(_PAIRED, len(_PAIRED)):
            if len(features) < 3 and all(_compatible(feature, other) for other in features):
                features.append(feature)
        lens = [rng.choice([(1, 1), (1, 40), (1, 65), (3, 3), (7, 30), (18, 18), (0, 0), (2, 51)])]
        lens += [(q, q + rng.randrange(40)) for q in (rng.choice((1, 1, 1, 4, 13)) for _ in "abc")]
        rng.shuffle(lens)
        num_kv_heads = rng.choice((1, 2, 3))
        fields: dict[str, Any] = {}
        for feature in features:
            fields.update(FEATURES[feature])
        if "head_size_v" in fields:
            fields["head_size_v"] = int(fields["head_size_v"] * basis.head_size)
        fields |= {
            "query_lens": tuple(q for q, _ in lens),
            "seq_lens": tuple(s for _, s in lens),
            "num_heads": num_kv_heads * rng.choice((1, 2, 4, 7)),
            "num_kv_heads": num_kv_heads,
            "block_size": basis.block_size * rng.choice((1, 1, 2, 4)),
        }
        dtype = rng.choice(basis.dtypes)
        yield plain_case(f"random_{i}-{'+'.join(sorted(features))}-{dtype}", basis, dtype, **fields)
