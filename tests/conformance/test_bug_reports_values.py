"""Public bug reports, replayed: numerics, rows without keys, soft cap, sinks, ALiBi, heads, LSE.

Each test is named by its report in the list of replays (BR-nnn) and by the law that was broken, and
runs on every backend that can run here. The oracle judges every run (`replay`); numbers in a test
are answers worked out by hand. A backend that refuses the feature by name has answered.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from replays import InputsOf, LayerOf, Replay, close, mean, probe, rand, seen_keys, tokens_of

from attnkit.conformance.case import Case
from attnkit.conformance.checks import judge, run_and_judge
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.oracle import merge
from attnkit.conformance.sequences import Tokens, WholeSequence, meaning_of
from attnkit.conformance.subject import Subject
from attnkit.contract import FullAttentionSpec
from attnkit.layer import Attention

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
both_dtypes = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)


# Numerics, NaN, strides.


@both_dtypes
def test_br001_unwritten_slots_never_show(
    replay: Replay, subject: Subject, inputs_of: InputsOf, dtype: torch.dtype
) -> None:
    case = Case(
        name="br001",
        query_lens=(1,) * 4,
        seq_lens=(33, 64, 97, 1),
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        dtype=dtype,
    )
    tokens = rand(case, 1)
    first = replay(case, tokens)
    for poison in (0.0, math.inf, 6e4):
        assert torch.equal(replay(case, tokens, poison=poison).out, first.out)
    # Only the value half of unwritten slots is NaN.
    layer, inputs = inputs_of(case, tokens)
    inputs.kv_cache[..., : case.head_size].nan_to_num_(0.0)
    assert torch.equal(subject.run(layer, inputs).out.cpu(), first.out)


@both_dtypes
def test_br003_huge_negative_logits_are_numbers(replay: Replay, dtype: torch.dtype) -> None:
    case = Case(
        name="br003",
        query_lens=(1,),
        seq_lens=(7,),
        num_heads=1,
        num_kv_heads=1,
        head_size=16,
        scale=1.0,
        dtype=dtype,
        return_lse=True,
    )

    def tokens(winner: int | None) -> list[Tokens]:
        def fill(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            q[..., 0], k[..., 0] = 1e15, -1e15
            if winner is not None:
                k[winner] = 0
            v.copy_(torch.arange(7.0)[:, None, None].expand_as(v))

        return tokens_of(case, fill)

    equal = replay(case, tokens(None))
    close(equal.out, 3.0)
    close(equal.lse / -1e30, 1.0, 1e-2)  # type: ignore[operator]
    one = replay(case, tokens(5))
    close(one.out, 5.0)
    close(one.lse, 0.0)  # type: ignore[arg-type]


def test_br137_the_innermost_stride_is_not_assumed(subject: Subject, inputs_of: InputsOf) -> None:
    case = Case(name="br137", query_lens=(1, 9), seq_lens=(30, 25), head_size=64)
    layer, inputs = inputs_of(case, rand(case, 23))
    strided = {}
    for name in ("query", "key", "value"):
        x = getattr(inputs, name)
        wide = torch.full(
            (*x.shape[:-1], 2 * x.shape[-1]), math.nan, device=x.device, dtype=x.dtype
        )
        strided[name] = wide[..., ::2].copy_(x)
    refusal = "named by its stride, had there been one"
    try:
        run_and_judge(subject, layer, replace(inputs, **strided))
    except (ValueError, RuntimeError) as error:
        refusal = str(error)
    assert "stride" in refusal


# Rows without keys.


def test_br006_rows_without_keys_have_lse_minus_infinity(replay: Replay) -> None:
    case = Case(
        name="br006",
        query_lens=(5,),
        seq_lens=(3,),
        num_heads=2,
        num_kv_heads=2,
        return_lse=True,
    )
    result = replay(case, probe(case))
    assert result.lse is not None
    assert (result.out[:2] == 0).all()
    assert torch.isneginf(result.lse[:2]).all()
    assert seen_keys(result.out[2:]) == [{0}, {0, 1}, {0, 1, 2}]
    for row, count in zip(result.lse[2:], (1, 2, 3), strict=True):
        close(row, math.log(count))
    part = (np.ones((5, 2, 32)), np.zeros((5, 2)))
    out, lse = merge([result.out.double().numpy(), part[0]], [result.lse.double().numpy(), part[1]])
    assert (out[:2] == 1).all()
    assert (lse[:2] == 0).all()


def test_br008_a_two_sided_window_is_aligned_at_the_end(replay: Replay) -> None:
    """The report's window is one-sidedly longer; the contract's is symmetric, the rule the same."""
    case = Case(
        name="br008",
        query_lens=(129,),
        seq_lens=(40,),
        head_size=16,
        causal=False,
        sliding_window=33,
        return_lse=True,
    )
    result = replay(case, mean(case))
    assert result.lse is not None
    for row in range(129):
        position = row - 89
        keys = [j for j in range(40) if abs(j - position) <= 32]
        if not keys:
            assert (result.out[row] == 0).all()
            assert torch.isneginf(result.lse[row]).all()
        else:
            close(result.out[row], sum(keys) / len(keys))
            close(result.lse[row], math.log(len(keys)))
    close(result.out[128], (7 + 39) / 2)


# Logit soft cap.


@both_dtypes
def test_br023_a_saturated_cap_does_not_overflow(replay: Replay, dtype: torch.dtype) -> None:
    case = Case(
        name="br023",
        query_lens=(1,),
        seq_lens=(6,),
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        scale=1.0,
        logits_soft_cap=50.0,
        dtype=dtype,
        return_lse=True,
    )

    def fill(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q[..., 0] = 100.0
        k[:, :, 0] = torch.tensor([10.0, 30, 50, 100, -100, 44])[:, None]
        for j in range(6):
            v[j, :, j] = 1.0

    result = replay(case, tokens_of(case, fill))
    tolerance = 2e-6 if dtype is torch.float32 else 1e-3
    for channel, want in enumerate((0.2, 0.2, 0.2, 0.2, 0.0, 0.2)):
        close(result.out[..., channel], want, tolerance)
    assert result.lse is not None
    close(result.lse, 50 + math.log(5))


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize(
    ("cap", "want"), [(None, 0.999665), (0.0, 0.999665), (5.0, 0.990130), (50.0, 0.999641)]
)
def test_br025_the_cap_is_applied_in_the_right_unit(
    replay: Replay, cap: float | None, want: float, query_len: int
) -> None:
    case = Case(
        name="br025",
        query_lens=(query_len,),
        seq_lens=(2,),
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        scale=1.0,
        logits_soft_cap=cap or None,
    )

    def fill(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q[..., 0] = 1.0
        k[1, :, 0], v[1] = 8.0, 1.0

    close(replay(case, tokens_of(case, fill)).out[-1], want)
    peaked = replace(case, name="br025-rand", query_gain=6.0, seq_lens=(21,))
    replay(peaked)


def test_br025_cap_zero_means_no_cap(layer_of: LayerOf) -> None:
    case = Case(name="br025", query_lens=(1,), seq_lens=(2,))
    assert layer_of(case, logits_soft_cap=0.0).selection.decisions[-1].chosen


# Attention sinks.


def sink_layer(layer_of: LayerOf, case: Case, sink: float) -> Attention:
    return layer_of(replace(case, sinks=True), sinks=torch.full((case.num_heads,), sink))


@pytest.mark.parametrize(
    ("kv_len", "logit", "sink", "out", "lse"),
    [(0, 0.0, 0.5, 0.0, 0.5), (1, 0.0, 100.0, 0.0, 100.0), (1, 100.0, 0.0, 1.0, 100.0)],
    ids=["no_key", "huge_sink", "huge_score"],
)
def test_br027_the_sink_is_in_the_maximum(
    subject: Subject,
    inputs_of: InputsOf,
    layer_of: LayerOf,
    kv_len: int,
    logit: float,
    sink: float,
    out: float,
    lse: float,
) -> None:
    case = Case(
        name="br027",
        query_lens=(1,),
        seq_lens=(kv_len,),
        num_heads=2,
        num_kv_heads=1,
        scale=1.0,
        return_lse=True,
    )

    def fill(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q[..., 0], k[..., 0] = 1.0, logit
        v.fill_(1.0)

    layer = sink_layer(layer_of, case, sink)
    _, inputs = inputs_of(case, tokens_of(case, fill))
    result = subject.run(layer, inputs)
    assert result.lse is not None
    close(result.out, out)
    close(result.lse, lse)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("query_len", [1, 3])
def test_br029_sinks_reach_the_kernel(
    subject: Subject,
    inputs_of: InputsOf,
    layer_of: LayerOf,
    query_len: int,
    window: int | None,
) -> None:
    case = Case(name="br029", query_lens=(query_len,), seq_lens=(query_len,), sliding_window=window)

    def fill(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        v.fill_(1.0)

    layer, inputs = inputs_of(case, tokens_of(case, fill))
    close(subject.run(layer, inputs).out, 1.0)
    result = subject.run(sink_layer(layer_of, case, 5.0), inputs)
    close(result.out[0], 1 / (1 + math.exp(5)))


def test_br031_a_sink_is_not_added_to_key_zero(
    subject: Subject, inputs_of: InputsOf, layer_of: LayerOf
) -> None:
    case = Case(name="br031", query_lens=(1,), seq_lens=(2,))

    def fill(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        v[0] = 1.0

    layer = sink_layer(layer_of, case, math.log(2))
    _, inputs = inputs_of(case, tokens_of(case, fill))
    close(subject.run(layer, inputs).out, 1 / 4)


# ALiBi.


def test_br032_alibi_parts_share_one_constant(subject: Subject, replay: Replay) -> None:
    """The distance is key minus query in every part, so an LSE is comparable across parts."""
    case = Case(
        name="br032",
        query_lens=(1,),
        seq_lens=(10,),
        num_heads=1,
        num_kv_heads=1,
        alibi=True,
        return_lse=True,
    )

    # The kit's slope of a single head is 2 ** -5; the report's numbers hold for slope 1.
    result = replay(case, mean(case))
    weights = np.exp(2.0**-5 * np.arange(-9.0, 1.0))
    assert result.lse is not None
    close(result.lse, math.log(weights.sum()))
    close(result.out, float(weights @ np.arange(10.0) / weights.sum()))


def alibi_inputs(inputs_of: InputsOf, case: Case, tokens: list[Tokens] | None = None) -> Inputs:
    return inputs_of(case, tokens)[1]


def test_br032_slope_one(subject: Subject, inputs_of: InputsOf, layer_of: LayerOf) -> None:
    case = Case(name="br032", query_lens=(1,), seq_lens=(10,), num_heads=1, num_kv_heads=1)
    layer = layer_of(case, alibi_slopes=[1.0])
    close(subject.run(layer, alibi_inputs(inputs_of, case, mean(case))).out, 8.418477)
    builder = layer.make_builder()
    assert not builder.use_cascade_attention(
        6,
        np.array([1]),
        1,
        1,
        use_alibi=True,
        use_sliding_window=False,
        use_local_attention=False,
        num_sms=132,
        dcp_world_size=1,
    )


@pytest.mark.parametrize("kv_len", [17, 24, 33, 40])
def test_br034_slopes_reach_the_kernel(
    subject: Subject, inputs_of: InputsOf, layer_of: LayerOf, kv_len: int
) -> None:
    case = Case(name="br034", query_lens=(1,), seq_lens=(kv_len,), head_size=64)
    layer = layer_of(case, alibi_slopes=[math.log(2)] * case.num_heads)
    out = subject.run(layer, alibi_inputs(inputs_of, case, probe(case))).out.cpu()
    want = 2.0 ** torch.arange(kv_len, dtype=torch.float64)
    want /= want.sum()
    assert torch.allclose(out[0, :, :kv_len].double(), want.expand(case.num_heads, -1), atol=1e-6)


@pytest.mark.parametrize("sqrt", [False, True], ids=["linear", "sqrt"])
@pytest.mark.parametrize("query_len", [1, 2, 3])
def test_br036_slopes_follow_their_heads(
    subject: Subject, inputs_of: InputsOf, layer_of: LayerOf, query_len: int, sqrt: bool
) -> None:
    slopes = [1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]
    case = Case(name="br036", query_lens=(query_len,), seq_lens=(12,), num_heads=6, num_kv_heads=2)
    layer = layer_of(case, alibi_slopes=slopes, use_alibi_sqrt=sqrt)
    inputs = alibi_inputs(inputs_of, case, rand(case, 4))
    meaning = replace(meaning_of(case, 0), alibi_slopes=slopes, alibi_sqrt=sqrt)
    (whole,) = inputs.sequences
    right = WholeSequence(q=whole.q, k=whole.k, v=whole.v, meaning=meaning)
    judge((right,), subject.run(layer, inputs))


# Grouped heads and head sizes.


@pytest.mark.parametrize("query_len", [1, 5])
@pytest.mark.parametrize(
    "heads", [(48, 2), (40, 2), (80, 4), (7, 1), (28, 4), (71, 1), (12, 12), (6, 2)]
)
def test_br038_a_head_reads_its_own_group(
    replay: Replay, heads: tuple[int, int], query_len: int
) -> None:
    case = Case(
        name="br038",
        query_lens=(query_len,),
        seq_lens=(21,),
        num_heads=heads[0],
        num_kv_heads=heads[1],
    )

    def fill(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        v.copy_(torch.arange(1.0, heads[1] + 1)[None, :, None].expand_as(v))

    out = replay(case, tokens_of(case, fill)).out
    group = heads[0] // heads[1]
    for head in range(heads[0]):
        close(out[:, head], head // group + 1)


def test_br040_lse_rows_and_heads_are_in_order(replay: Replay) -> None:
    case = Case(
        name="br040",
        query_lens=(1,) * 6,
        seq_lens=tuple(range(500, 506)),
        num_heads=12,
        num_kv_heads=3,
        scale=0.1,
        return_lse=True,
    )

    def fill(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q[..., 0] = torch.arange(12.0)
        k[..., 0] = 1.0

    lse = replay(case, tokens_of(case, fill)).lse
    assert lse is not None
    assert lse.shape == (6, 12)
    assert lse.dtype is torch.float32
    for r, length in enumerate(case.seq_lens):
        for h in range(12):
            close(lse[r, h], 0.1 * h + math.log(length))


@pytest.mark.parametrize("head_size", [8, 40, 72, 80, 88, 96, 112, 120, 160, 192])
def test_br042_columns_past_the_head_size_are_not_touched(
    subject: Subject, inputs_of: InputsOf, head_size: int
) -> None:
    """The cache is the left part of wider storage that holds 1e4."""
    case = Case(name="br042", query_lens=(1, 3), seq_lens=(5, 33), head_size=head_size)
    layer, inputs = inputs_of(case, rand(case, 6))
    content = inputs.kv_cache.shape[-1]
    wide = torch.full((*inputs.kv_cache.shape[:-1], content + 24), 1e4, device=subject.device)
    wide[..., :content] = inputs.kv_cache
    run_and_judge(subject, layer, replace(inputs, kv_cache=wide[..., :content]))
    assert (wide[..., content:] == 1e4).all()


def test_br044_sizes_come_from_the_groups_spec(subject: Subject, layer_of: LayerOf) -> None:
    for head_size in (512, 256, 512):
        case = Case(
            name="br044",
            query_lens=(1, 1),
            seq_lens=(2000, 3),
            num_kv_heads=1,
            head_size=head_size,
            return_lse=True,
        )
        layer = layer_of(case)
        builder = layer.make_builder(["a", "b"])
        assert isinstance(builder.kv_cache_spec, FullAttentionSpec)
        assert builder.kv_cache_spec.head_size == head_size
        run_and_judge(subject, layer, subject.inputs(layer, case))


# Shared prefix, LSE.


def test_br056_a_shared_prefix_keeps_the_window(subject: Subject, inputs_of: InputsOf) -> None:
    case = Case(
        name="br056",
        query_lens=(1,) * 4,
        seq_lens=(70, 71, 72, 73),
        sliding_window=32,
        shared_blocks=4,
    )
    layer, inputs = inputs_of(case, mean(case))
    builder = layer.make_builder()
    assert not builder.use_cascade_attention(
        64,
        np.ones(4, dtype=np.int32),
        4,
        2,
        use_alibi=False,
        use_sliding_window=True,
        use_local_attention=False,
        num_sms=132,
        dcp_world_size=1,
    )
    result = subject.run(layer, inputs, plan=builder.build(64, inputs.batch))
    for row, want in enumerate((53.5, 54.5, 55.5, 56.5)):
        close(result.out[row], want)


@pytest.mark.parametrize("sink", [None, 0.0])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_br058_the_lse_is_natural_and_counts_the_sink(
    subject: Subject,
    inputs_of: InputsOf,
    layer_of: LayerOf,
    cap: float | None,
    sink: float | None,
) -> None:
    case = Case(
        name="br058",
        query_lens=(1,),
        seq_lens=(3,),
        scale=1.0,
        logits_soft_cap=cap,
        return_lse=True,
    )

    def fill(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q[..., 0] = 1.0
        k[..., 0] = torch.log(torch.tensor([1.0, 2.0, 3.0]))[:, None]

    layer = layer_of(case) if sink is None else sink_layer(layer_of, case, sink)
    _, inputs = inputs_of(case, tokens_of(case, fill))
    result = subject.run(layer, inputs)
    assert result.lse is not None
    # The cap moves logits of this size by less than 1e-3.
    close(result.lse, math.log(6 if sink is None else 7), 2e-6 if cap is None else 1e-3)
