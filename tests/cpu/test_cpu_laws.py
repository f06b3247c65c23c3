"""What the cpu backend promises beyond right numbers: bits, poison, extreme scores, bad input."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attnkit.batch import make_batch
from attnkit.conformance.case import Case
from attnkit.conformance.checks import bits, judge, run_and_judge
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.subject import Subject
from attnkit.contract import AttentionType, CommonAttentionMetadata, KVCacheLayout
from attnkit.errors import BatchError
from attnkit.layer import Attention

CASE = Case(
    name="cpu-law",
    query_lens=(1, 7, 1, 40),
    seq_lens=(600, 45, 33, 40),
    num_heads=6,
    num_kv_heads=2,
    head_size=32,
    return_lse=True,
)


def answer(layer: Attention, inputs: Inputs, rows: slice = slice(None)) -> list[torch.Tensor]:
    """Bits of output and LSE of some rows of a judged run."""
    plan = layer.build(inputs.batch)
    out, lse = layer(inputs.query, inputs.key, inputs.value, inputs.kv_cache, plan)
    return [bits(out[rows]), bits(lse[rows])]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(
    native_subject: Subject, dtype: torch.dtype
) -> None:
    """The last query of a chunk of 1 to 60 tokens, on the native path: of few rows, whose splits
    the threads share, and of many, where a thread does all of them. In bfloat16 many rows may go to a
    matrix unit or stand in lanes: same bits below 16 rows, from there to 128, and above."""
    length, most = 1100, 60
    case = replace(CASE, dtype=dtype, query_lens=(most,), seq_lens=(length,), sliding_window=990)
    layer = native_subject.layer(case)
    whole = native_subject.inputs(layer, case)
    run_and_judge(native_subject, layer, whole)
    table = whole.batch.block_table_tensor.tolist()

    def last(q_len: int) -> list[torch.Tensor]:
        part = replace(
            whole,
            batch=make_batch([q_len], [length], table, case.block_size),
            query=whole.query[most - q_len :],
            key=whole.key[most - q_len :],
            value=whole.value[most - q_len :],
        )
        return answer(layer, part, slice(q_len - 1, q_len))

    bands = [[1, 2, 3, 5], [6, 8, 17, 42], [43, 50, most]]  # times three heads of a group
    for q_lens in bands if dtype == torch.bfloat16 else [[q for band in bands for q in band]]:
        for q_len in q_lens[1:]:
            assert same(last(q_len), last(q_lens[0])), q_len


@pytest.mark.parametrize(
    ("dtype", "query_lens"), [(torch.float32, (1,) * 4), (torch.bfloat16, (7, 1, 400, 6))]
)
def test_threads_do_not_change_bits(
    native_subject: Subject, dtype: torch.dtype, query_lens: tuple[int, ...]
) -> None:
    case = replace(CASE, dtype=dtype, query_lens=query_lens, seq_lens=(2100, 1030, 515, 7))
    layer = native_subject.layer(case)
    inputs = native_subject.inputs(layer, case)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = answer(layer, inputs)
        torch.set_num_threads(2)
        for _ in range(5):
            assert same(answer(layer, inputs), alone)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("q_len", "dtype"), [(3, torch.float32), (40, torch.float32), (300, torch.bfloat16)]
)
@pytest.mark.parametrize("wild", [math.nan, math.inf])
def test_wild_values_reach_only_rows_that_see_them(
    subject: Subject, q_len: int, dtype: torch.dtype, wild: float
) -> None:
    """A NaN in the K and V of a later token of the same chunk, or left of a row's window."""
    lengths = {"query_lens": (q_len,), "seq_lens": (q_len + 20,)}
    case = replace(CASE, **lengths, dtype=dtype, sliding_window=10)
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    run_and_judge(subject, layer, inputs)
    clean = answer(layer, inputs)
    middle = q_len // 2
    inputs.key[middle] = inputs.value[middle] = wild
    hit = answer(layer, inputs)
    sees = torch.arange(q_len)
    sees = (sees >= middle) & (sees < middle + 10)
    for before, after in zip(clean, hit, strict=True):
        assert torch.equal(before[~sees], after[~sees])
        assert not torch.equal(before[sees], after[sees])
    out = layer(inputs.query, inputs.key, inputs.value, inputs.kv_cache, layer.build(inputs.batch))
    assert not bool(torch.isfinite(out[0][sees]).all(-1).any())


@pytest.mark.parametrize("wild", [math.nan, math.inf])
def test_wild_values_reach_only_the_branches_that_hold_them(subject: Subject, wild: float) -> None:
    case = replace(CASE, query_lens=(40,), seq_lens=(77,), sliding_window=None, tree=True)
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    run_and_judge(subject, layer, inputs)
    clean = answer(layer, inputs)
    inputs.key[4] = inputs.value[4] = wild
    hit = answer(layer, inputs)
    words = inputs.batch.tree_mask
    assert words is not None
    sees = (words >> 4 & 1).bool()
    assert 1 < int(sees.sum()) < 20
    for before, after in zip(clean, hit, strict=True):
        assert torch.equal(before[~sees], after[~sees])
        assert not torch.equal(before[sees], after[sees])


def test_a_tree_without_branches_has_the_bits_of_a_chunk(subject: Subject) -> None:
    case = replace(CASE, query_lens=(9, 40), seq_lens=(30, 77), sliding_window=None)
    plain, layer = subject.layer(case), subject.layer(case, use_tree_mask=True)
    inputs = subject.inputs(plain, case)
    chunk = answer(plain, inputs)
    words = torch.tensor([(2 << i) - 1 for n in case.query_lens for i in range(n)])
    chain = replace(inputs, batch=inputs.batch.replace(tree_mask=words))
    for got, want in zip(answer(layer, chain), chunk, strict=True):
        assert torch.equal(got, want)


def test_very_negative_scores_are_not_masked(subject: Subject) -> None:
    """All scores equal, however low: the mean of the values."""
    case = replace(CASE, query_lens=(1, 40), seq_lens=(50, 40), head_size=8)
    layer = subject.layer(case, scale=1.0)
    inputs = subject.inputs(layer, case)
    inputs.query.fill_(1e15)
    inputs.key.fill_(-1.25e14)
    inputs.kv_cache[..., :8] = -1.25e14
    out, lse = layer(
        inputs.query, inputs.key, inputs.value, inputs.kv_cache, layer.build(inputs.batch)
    )
    assert torch.allclose(lse[0], torch.full_like(lse[0], -1e30))
    mean = inputs.sequences[0].v.mean(0).repeat_interleave(3, 0)
    torch.testing.assert_close(out[0], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", [3e37, -3e37, 1e-6])
def test_soft_cap_holds_for_any_score(subject: Subject, score: float) -> None:
    """tanh neither overflows nor cancels."""
    case = replace(CASE, query_lens=(1,), seq_lens=(1,), head_size=1, logits_soft_cap=50.0)
    layer = subject.layer(case, scale=1.0)
    inputs = subject.inputs(layer, case)
    inputs.query.fill_(score)
    inputs.key.fill_(1.0)
    plan = layer.build(inputs.batch)
    out, lse = layer(inputs.query, inputs.key, inputs.value, inputs.kv_cache, plan)
    right = 50.0 * math.tanh(score / 50.0)
    assert torch.allclose(lse, torch.full_like(lse, right), rtol=3e-7, atol=0.0)
    assert torch.equal(out[0], inputs.value[0].repeat_interleave(3, 0))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_before_the_first_key_see_nothing(
    subject: Subject, sinks: bool, causal: bool
) -> None:
    case = replace(CASE, query_lens=(5, 50), seq_lens=(2, 0), sinks=sinks, causal=causal)
    layer = subject.layer(case)
    run_and_judge(subject, layer, subject.inputs(layer, case))


@pytest.mark.parametrize("query_lens", [(), (0,), (0, 0, 0)])
def test_a_batch_without_tokens_writes_nothing(
    subject: Subject, query_lens: tuple[int, ...]
) -> None:
    case = replace(CASE, query_lens=query_lens, seq_lens=query_lens, padding_tokens=2)
    layer = subject.layer(case)
    result, _ = run_and_judge(subject, layer, subject.inputs(layer, case))
    assert bool(torch.isnan(result.out).all())


@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_strided_rows_are_read_and_written_rightly(
    subject: Subject, attn_type: AttentionType
) -> None:
    """q, k, v and output whose last dimension is every second number of a buffer."""
    case = replace(CASE, seq_lens=(1, 7, 1, 40), attn_type=attn_type)
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    q, k, v = (
        torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)[..., ::2].copy_(x)
        for x in (inputs.query, inputs.key, inputs.value)
    )
    strided = replace(inputs, query=q, key=k, value=v)
    run_and_judge(subject, layer, strided)
    buffer = torch.full((case.num_tokens, 6, 64), math.nan)
    plan = layer.build(inputs.batch)
    layer.impl.forward(layer, q, k, v, inputs.kv_cache, plan, buffer[..., ::2])
    dense, _ = layer(q, k, v, inputs.kv_cache, plan)
    assert torch.equal(buffer[..., ::2], dense)
    assert bool(torch.isnan(buffer[..., 1::2]).all())


def test_a_cache_with_strided_rows_is_refused(subject: Subject) -> None:
    layer = subject.layer(CASE)
    inputs = subject.inputs(layer, CASE)
    cache = torch.zeros(*inputs.kv_cache.shape[:3], 128)[..., ::2]
    out = torch.full((CASE.num_tokens, 6, 32), math.nan)
    with pytest.raises(BatchError, match="last dimension has stride 2"):
        layer._run(
            inputs.query, inputs.key, inputs.value, out, None, cache, layer.build(inputs.batch)
        )
    assert bool(torch.isnan(out).all())
    assert not bool(cache.any())


def test_a_dtype_that_is_not_claimed_is_refused(subject: Subject) -> None:
    layer = subject.layer(CASE)
    inputs = subject.inputs(layer, CASE)
    plan = layer.build(inputs.batch)
    query = inputs.query.double()
    with pytest.raises(BatchError, match="float64"):
        layer.impl.forward(
            layer, query, inputs.key, inputs.value, inputs.kv_cache, plan, torch.empty_like(query)
        )


@pytest.mark.parametrize("block", [-1, 10_000])
def test_a_block_outside_the_cache_is_an_error(native_subject: Subject, block: int) -> None:
    """Nothing is written, and a table entry that nobody needs may be anything."""
    layer = native_subject.layer(CASE)
    inputs = native_subject.inputs(layer, CASE)
    table = inputs.batch.block_table_tensor.clone()
    table[1, -1] = block
    ok = layer.build(inputs.batch.replace(block_table_tensor=table))
    result = native_subject.run(layer, inputs, plan=ok)
    judge(inputs.sequences, result)
    table[1, 1] = block
    plan = layer.build(inputs.batch.replace(block_table_tensor=table))
    out = torch.full_like(result.out, math.nan)
    with pytest.raises(BatchError, match="block ids are 0 to"):
        layer.impl.forward(
            layer, inputs.query, inputs.key, inputs.value, inputs.kv_cache, plan, out
        )
    assert bool(torch.isnan(out).all())


def test_a_block_table_that_is_too_narrow_is_an_error(native_subject: Subject) -> None:
    layer = native_subject.layer(CASE)
    inputs = native_subject.inputs(layer, CASE)
    # As engines build it; `layer.build` would have looked.
    plan = layer.make_builder().build(
        0, inputs.batch.replace(block_table_tensor=inputs.batch.block_table_tensor[:, :5])
    )
    with pytest.raises(BatchError, match="ceil"):
        native_subject.run(layer, inputs, plan=plan)


@pytest.mark.parametrize("layout", KVCacheLayout)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "nvfp4"])
def test_each_token_is_written_to_its_slot_alone(
    subject: Subject, layout: KVCacheLayout, kv_cache_dtype: str
) -> None:
    case = replace(CASE, layout=layout, kv_cache_dtype=kv_cache_dtype, padding_tokens=3)
    layer = subject.layer(case)
    run_and_judge(subject, layer, subject.inputs(layer, case))


def test_a_large_write_is_the_same_on_every_thread(native_subject: Subject) -> None:
    """More bytes than one thread is given."""
    case = replace(CASE, query_lens=(3000,), seq_lens=(3000,), head_size=64)
    layer = native_subject.layer(case)
    inputs = native_subject.inputs(layer, case)
    slots = inputs.batch.slot_mapping
    slots[::7] = -1
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        layer.impl.do_kv_cache_update(layer, inputs.key, inputs.value, inputs.kv_cache, slots)
    finally:
        torch.set_num_threads(before)
    tokens = inputs.kv_cache.transpose(1, 2).flatten(0, 1)
    written = slots >= 0
    assert torch.equal(tokens[slots[written]][..., :64], inputs.key[written])
    assert torch.equal(tokens[slots[written]][..., 64:], inputs.value[written])
    assert int(torch.isfinite(tokens).all(-1).all(-1).sum()) == int(written.sum())


@pytest.mark.parametrize("slot", [10**6, -2])
def test_a_slot_outside_the_cache_is_an_error(subject: Subject, slot: int) -> None:
    layer = subject.layer(CASE)
    inputs = subject.inputs(layer, CASE)
    before = bits(inputs.kv_cache)
    slots = inputs.batch.slot_mapping.clone()
    slots[-1] = slot
    with pytest.raises(BatchError, match="slot"):
        layer.impl.do_kv_cache_update(layer, inputs.key, inputs.value, inputs.kv_cache, slots)
    assert torch.equal(bits(inputs.kv_cache), before)


def test_cross_attention_needs_encoder_lengths(subject: Subject) -> None:
    case = replace(CASE, attn_type=AttentionType.ENCODER_DECODER)
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    batch: CommonAttentionMetadata = inputs.batch.replace(encoder_seq_lens=None)
    with pytest.raises(BatchError, match="encoder_seq_lens"):
        subject.run(layer, inputs, batch=batch)
