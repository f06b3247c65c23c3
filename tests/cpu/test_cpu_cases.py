"""Random layers and batches on both paths against the kit's float64 oracle, and long contexts.

The kit's own table is judged elsewhere, on the path this machine has; here shapes are drawn that no
table would list, and contexts long enough to be split over threads.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnkit.backends.cpu.native import native_kernels
from attnkit.backends.cpu.operands import NativeBatch, NativeLayer
from attnkit.conformance.case import Case
from attnkit.conformance.checks import check_case
from attnkit.conformance.laws import LAWS
from attnkit.conformance.subject import Subject
from attnkit.contract import AttentionType, AttentionVariant, KVCacheLayout
from attnkit.kvcache.formats import CACHE_FORMATS, cache_format

FORMATS = list(CACHE_FORMATS)


def random_case(seed: int) -> Case:
    """Any layer and batch the backend says yes to, small."""
    draw = random.Random(seed)
    attn_type = draw.choice([AttentionType.DECODER] * 4 + [AttentionType.ENCODER_ONLY])
    cacheless = attn_type is AttentionType.ENCODER_ONLY
    num_reqs = draw.randint(1, 5)
    query_lens = [draw.choice([0, 1, 1, 1, 2, 5, 37]) for _ in range(num_reqs)]
    context = [0 if cacheless else draw.choice([0, 1, 30, 31, 32, 33, 64, 90]) for _ in query_lens]
    seq_lens = [q + c if q else 0 for q, c in zip(query_lens, context, strict=True)]
    num_kv_heads = draw.choice([1, 2, 3])
    head_size = draw.choice([1, 3, 8, 16, 20, 32, 33, 64, 80, 96, 128])
    head_size_v = draw.choice([head_size, head_size, 1, 24, 64])
    fitting = [name for name in FORMATS if not cache_format(name).refusal(head_size, head_size_v)]
    return Case(
        name=f"random-{seed}",
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_heads=num_kv_heads * draw.choice([1, 2, 3, 4, 5, 9]),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size_v,
        dtype=draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        kv_cache_dtype="auto" if cacheless else draw.choice(fitting),
        block_size=draw.choice([1, 3, 7, 16, 64]),
        layout=draw.choice(list(KVCacheLayout)),
        causal=draw.choice([True, True, False]),
        sliding_window=draw.choice([None, None, 1, 5, 33]),
        logits_soft_cap=draw.choice([None, None, 3.0]),
        alibi=(alibi := draw.choice([False, False, True])),
        alibi_sqrt=alibi and draw.choice([False, True]),
        sinks=draw.choice([False, True]),
        attn_type=attn_type,
        return_lse=draw.choice([False, True]),
        padding_tokens=draw.choice([0, 3]),
        padding_reqs=draw.choice([0, 2]),
        query_gain=draw.choice([0.0, 1.0, 30.0]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_random_layers_match_float64(subject: Subject, seed: int) -> None:
    check_case(subject, random_case(seed))


@pytest.mark.parametrize("seed", range(8))
def test_random_prompts_match_float64(native_subject: Subject, seed: int) -> None:
    """Enough rows in bfloat16 for what serves many, beside requests that it does not."""
    case, draw = random_case(seed), random.Random(seed)
    query_lens = [draw.choice([1, 45]), 150]
    cacheless = case.attn_type is AttentionType.ENCODER_ONLY
    context = [0 if cacheless else draw.choice([0, 1, 100, 250]) for _ in query_lens]
    seq_lens = [q + c for q, c in zip(query_lens, context, strict=True)]
    lengths = {"query_lens": tuple(query_lens), "seq_lens": tuple(seq_lens)}
    check_case(native_subject, replace(case, dtype=torch.bfloat16, **lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"sliding_window": 600},
        {"sliding_window": 600, "freed_window": True, "sinks": True},
        {
            "sliding_window": 90,
            "freed_window": True,
            "rswa": True,
            "prefix_lens": (50, 0, 513, 512, 100, 200, 30),
        },
        {"sliding_window": 90, "mm_prefix": True},
        {"logits_soft_cap": 5.0, "alibi": True},
        {"causal": False},
        {"causal": False, "sliding_window": 400},
    ],
    ids=lambda f: "+".join(f) or "plain",
)
def test_long_contexts_match_float64(
    subject: Subject, features: dict[str, object], dtype: torch.dtype
) -> None:
    """Contexts around and past the length at which keys are cut for the threads, and queries of
    more rows than one unit has."""
    case = Case(
        name="long",
        query_lens=(1, 5, 1, 1, 20, 1, 70),
        seq_lens=(511, 512, 513, 1025, 1100, 1536, 1060),
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        head_size_v=64,
        block_size=16,
        dtype=dtype,
        return_lse=True,
        **features,  # type: ignore[arg-type]
    )
    check_case(subject, case)


@pytest.mark.parametrize("num_heads", [4, 32])
def test_an_infinite_value_reaches_its_channel_and_those_who_see_it(
    native_subject: Subject, num_heads: int
) -> None:
    """The matrix unit multiplies neighbours of an infinity by zero, with few rows and with many."""
    num_tokens, seq_len, size = 3, 600, 64
    kernels = native_kernels()
    assert kernels is not None
    generator = torch.Generator().manual_seed(0)
    query, kv = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((num_tokens, num_heads, size), (seq_len, 2 * size))
    )
    kv[10, size + 7] = kv[599, size + 32] = torch.inf  # Seen by all; by the last token.
    pages = torch.zeros(608, 2 * size, dtype=torch.bfloat16)
    pages[:seq_len] = kv
    batch = NativeBatch.pack(
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
        torch.tensor([True]),
        torch.arange(38, dtype=torch.int32)[None],
    )
    layer = NativeLayer.pack(AttentionVariant(scale=size**-0.5), num_heads, 1, size, size)
    output = torch.empty_like(query)
    kernels.attend_paged(batch, layer, query, pages.view(38, 1, 16, -1), None, output, None)

    key, value = kv.double().split(size, dim=-1)
    score = torch.einsum("thd,kd->htk", query.double(), key) * size**-0.5
    seen = torch.arange(seq_len) <= torch.arange(seq_len - num_tokens, seq_len)[:, None]
    weights = score.masked_fill(~seen, -torch.inf).softmax(-1)
    want = (weights @ value.where(value.isfinite(), 0)).transpose(0, 1)
    want[..., 7] = want[-1, :, 32] = torch.inf
    torch.testing.assert_close(output.double(), want, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", [name for name in LAWS if name != "captured_steps_replay"])
def test_laws_hold_in_torch(torch_subject: Subject, name: str) -> None:
    """The kit judges the native path where there is a compiler; the other one must obey as well."""
    LAWS[name](torch_subject)
