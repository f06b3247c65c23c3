"""The table of cases for latents: decodes and prefills, alone and together, in every size and format.

In: an `MLABasis`, what the backend takes. Out: `all_mla_cases()`. Lengths are odd and cross page
borders, sizes are small, as in the table of dense cases.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

from attnkit.conformance.case import DTYPES
from attnkit.conformance.cases import BATCHES
from attnkit.conformance.mla.case import MLABasis, MLACase
from attnkit.contract import KVCacheLayout, MLADimensions

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "peaked": {"query_gain": 60.0},
    "scale": {"scale": 0.7},
    "padding": {"padding_tokens": 6, "padding_reqs": 2},
    "shared_prefix": {"shared_blocks": 1},
    "drafts": {"num_drafts": 16},
    "expanded": {"decode_query_len": 1},
    "small_workspace": {"decode_query_len": 1, "workspace_pages": 1},
    "one_head": {"num_heads": 1},
    "told": {"told": 5, "return_lse": True},
    "told_one": {"told": 1},
}
"""What a case asks beside plain attention over latents."""

SIZES = (
    MLADimensions(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    MLADimensions(kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
    MLADimensions(kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128),
    MLADimensions(kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
    MLADimensions(kv_lora_rank=448, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64),
    MLADimensions(kv_lora_rank=128, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32),
    MLADimensions(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=16),
    MLADimensions(kv_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=40),
    MLADimensions(kv_lora_rank=20, qk_nope_head_dim=7, qk_rope_head_dim=6, v_head_dim=5),
)
"""DeepSeek-V2/V3's, GLM-5's, Mistral 4's, MiniCPM3's, others a kernel might be made for, odd ones."""


@functools.cache
def all_mla_cases(basis: MLABasis) -> tuple[MLACase, ...]:
    """The whole table, names unique."""
    sections = (_alone, _heads, _sizes, _pages, _lengths, _formats, _random_mixtures)
    cases = tuple(case for section in sections for case in section(basis))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    return cases


def plain_mla_case(name: str, basis: MLABasis, dtype: str | None = None, **fields: Any) -> MLACase:
    """A case of the basis; explicit fields win. `dimensions` stands for its four sizes."""
    d: MLADimensions = fields.pop("dimensions", basis.dimensions)
    values: dict[str, Any] = {
        "dtype": DTYPES[dtype or basis.dtypes[0]],
        "head_size": d.kv_lora_rank,
        "head_size_v": d.qk_rope_head_dim,
        "qk_nope_head_dim": d.qk_nope_head_dim,
        "v_head_dim": d.v_head_dim,
        "block_size": basis.block_size,
        "layout": basis.layout,
        **fields,
    }
    if values.get("shared_blocks"):
        # Shared pages are part of everyone's context, so each request has at least one token more.
        shared = values["shared_blocks"] * values["block_size"]
        pairs = zip(values["query_lens"], values["seq_lens"], strict=True)
        values["seq_lens"] = tuple(s + shared if q else s for q, s in pairs)
    return MLACase(name=name, **values)


def _case(
    name: str, basis: MLABasis, batch: str, dtype: str | None = None, **fields: Any
) -> MLACase:
    return plain_mla_case(name, basis, dtype, **{**BATCHES[batch], **fields})


def _alone(basis: MLABasis) -> Iterator[MLACase]:
    """Every feature in every kind of batch and dtype."""
    for (feature, fields), dtype, batch in itertools.product(
        FEATURES.items(), basis.dtypes, BATCHES
    ):
        yield _case(f"{feature}-{batch}-{dtype}", basis, batch, dtype, **fields)


def _heads(basis: MLABasis) -> Iterator[MLACase]:
    """Heads that fill no tile, one, and several."""
    for num_heads in (2, 3, 5, 8, 16, 17, 20, 32, 64, 128):
        for batch in ("decode", "mixed"):
            yield _case(
                f"heads_{num_heads}-{batch}",
                basis,
                batch,
                basis.dtypes[num_heads % len(basis.dtypes)],
                num_heads=num_heads,
                return_lse=basis.lse,
            )


def _sizes(basis: MLABasis) -> Iterator[MLACase]:
    """Latents and heads of models and of none."""
    for i, d in enumerate(SIZES):
        dtype = basis.dtypes[i % len(basis.dtypes)]
        yield plain_mla_case(
            f"latent_{d.kv_lora_rank}_{d.qk_rope_head_dim}_{d.v_head_dim}-{dtype}",
            basis,
            dtype,
            query_lens=(1, 5),
            seq_lens=(18, 21),
            num_heads=2,
            dimensions=d,
            return_lse=basis.lse,
        )


def _pages(basis: MLABasis) -> Iterator[MLACase]:
    """Page sizes, layouts and block ids."""
    for i, block_size in enumerate((1, 2, 3, 5, 8, 16, 24, 32, 48, 64, 100, 128, 160, 256)):
        dtype = basis.dtypes[i % len(basis.dtypes)]
        for batch in ("mixed", "decode"):
            yield _case(
                f"block_size_{block_size}-{batch}", basis, batch, dtype, block_size=block_size
            )
    for layout in KVCacheLayout:
        yield _case(f"layout_{layout.name}", basis, "mixed", layout=layout, return_lse=basis.lse)
    # 16-bit block ids wrap.
    yield _case(
        "block_ids_above_65536",
        basis,
        "mixed",
        basis.dtypes[-1],
        first_block=65_536,
        num_heads=1,
    )


def _lengths(basis: MLABasis) -> Iterator[MLACase]:
    """Lengths at and around page borders, more queries than keys, nothing at all."""
    page = basis.block_size
    for length in (1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129):
        yield plain_mla_case(
            f"decode_length_{length}",
            basis,
            query_lens=(1, 1),
            seq_lens=(length, 7),
            return_lse=basis.lse and length % 2 == 1,
        )
        if length < 66:
            yield plain_mla_case(
                f"prompt_length_{length}", basis, query_lens=(length,), seq_lens=(length,)
            )
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "more_queries_than_keys": ((1, 4, 5), (1, 2, 3)),
        "no_key_at_all": ((1, 3, 2), (5, 0, 2)),
        "one_token": ((1,), (1,)),
        "no_request": ((), ()),
        "only_empty_requests": ((0, 0), (0, 0)),
        "empty_first": ((0, 1, 6), (0, 9, 6)),
        "empty_last": ((1, 6, 0), (9, 6, 0)),
        "empty_with_context": ((0, 1, 9, 0, 5), (40, 9, 9, 4 * page, 5 + page)),
        "decode_behind_prompts": ((12, 1, 20, 1), (12, 17, 50, 33)),
        "contexts_of_whole_pages": ((3, 4, 5), (3 + page, 4 + 2 * page, 5 + 3 * page)),
        "contexts_here_and_there": ((9, 3, 7, 2), (9, 43, 7, 22)),
        "verify_three_drafts": ((4, 4, 4), (44, 4, 19)),
        "long_decode": ((1, 1), (700, 300)),
        "long_extend": ((33,), (290,)),
        "many_requests": ((1,) * 24, tuple(range(3, 75, 3))),
    }
    for name, (query_lens, seq_lens) in shapes.items():
        lens: dict[str, Any] = {"query_lens": query_lens, "seq_lens": seq_lens}
        yield plain_mla_case(name, basis, return_lse=basis.lse, **lens)
        yield plain_mla_case(
            f"{name}-drafts", basis, basis.dtypes[-1], num_drafts=3, return_lse=basis.lse, **lens
        )
        yield plain_mla_case(
            f"{name}-two_pages", basis, decode_query_len=1, workspace_pages=2, **lens
        )
    for dtype in basis.dtypes:
        yield plain_mla_case(
            f"long_context-{dtype}",
            basis,
            dtype,
            query_lens=(1, 9),
            seq_lens=(1500, 700),
            decode_query_len=1,
            workspace_pages=13,
            return_lse=basis.lse,
        )
        yield plain_mla_case(
            f"long_context-told-{dtype}",
            basis,
            dtype,
            query_lens=(1, 2),
            seq_lens=(1500, 7),
            told=130,
        )


def _formats(basis: MLABasis) -> Iterator[MLACase]:
    """Every cache format the backend takes: alone, in pieces, saturated."""
    for name in basis.formats:
        if name == "auto":
            continue
        how: dict[str, Any] = {
            "kv_cache_dtype": name,
            "dimensions": basis.tiled,
            "return_lse": basis.lse,
        }
        for batch, dtype in itertools.product(BATCHES, basis.dtypes):
            yield _case(f"{name}-{batch}-{dtype}", basis, batch, dtype, **how)
        dtype = basis.dtypes[-1]
        yield _case(f"{name}-absorbed", basis, "extend", dtype, decode_query_len=17, **how)
        yield _case(
            f"{name}-in_pieces", basis, "extend", decode_query_len=1, workspace_pages=1, **how
        )
        yield _case(f"{name}-told", basis, "mixed", dtype, told=7, **how)
        yield _case(f"{name}-saturated", basis, "mixed", value_gain=1000.0, **how)
        yield _case(f"{name}-padding", basis, "mixed", padding_tokens=3, padding_reqs=1, **how)


def _random_mixtures(basis: MLABasis) -> Iterator[MLACase]:
    """Batches, sizes of workspaces and thresholds that nobody thought of; the same every time."""
    for i in range(40):
        rng = random.Random(i)
        lens = [(1, rng.randrange(1, 90)) for _ in range(rng.randrange(4))]
        lens += [(0, 0)] * rng.randrange(2)
        lens += [(q, q + rng.randrange(60)) for q in rng.choices((2, 3, 5, 18, 31), k=3)]
        dtype = rng.choice(basis.dtypes)
        yield plain_mla_case(
            f"random_{i}-{dtype}",
            basis,
            dtype,
            query_lens=tuple(q for q, _ in lens),
            seq_lens=tuple(s for _, s in lens),
            num_heads=rng.choice((1, 3, 4, 6)),
            block_size=basis.block_size * rng.choice((1, 1, 2, 4)),
            num_drafts=rng.choice((None, 2)),
            decode_query_len=rng.choice((None, 1, 1, 20)),
            workspace_pages=rng.choice((None, 1, 2, 5)),
            padding_tokens=rng.choice((0, 3)),
            return_lse=basis.lse,
        )
