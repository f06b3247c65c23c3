"""Wrappers over several backends: what they answer is judged by the kit, what they refuse is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from attnkit import Attention, make_batch
from attnkit.backends.wrappers import cross as cross_file
from attnkit.backends.wrappers import cross_attention, encoder_only, fast_prefill, hybrid
from attnkit.backends.wrappers.encoder_only import EncoderOnlyBuilder
from attnkit.backends.wrappers.hybrid import HybridBuilder, HybridMetadata
from attnkit.conformance import verify
from attnkit.conformance.case import Case
from attnkit.conformance.checks import check_case, judge, run_and_judge
from attnkit.conformance.oracle import Meaning
from attnkit.conformance.sequences import WholeSequence
from attnkit.conformance.subject import LawBroken, Result, Subject
from attnkit.conformance.twin import TwinBackend
from attnkit.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
    KVCacheLayout,
    KVCacheSpec,
    MultipleOf,
)
from attnkit.errors import BatchError, ConfigurationError, UnsupportedConfiguration
from attnkit.selection import resolve

REFERENCE, CPU = resolve("reference"), resolve("cpu")


class DecoderOnly(TwinBackend):
    """A backend with decoder layers alone, as kernels of a device often are."""

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


INNER = pytest.mark.parametrize("inner", [REFERENCE, CPU, DecoderOnly], ids=lambda b: b.__name__)


@pytest.mark.parametrize(
    ("backend", "filter"),
    [
        (hybrid(CPU, REFERENCE), "law:"),
        (hybrid(CPU, REFERENCE), "-mixed-fp32"),
        (hybrid(REFERENCE, CPU), "-mixed-bf16"),
        (hybrid(DecoderOnly, CPU), "decode-fp32"),
        (hybrid(DecoderOnly, CPU), "claim:"),
        (cross_attention(REFERENCE), "claim:attention type"),
        (encoder_only(CPU), "claim:attention type"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_wrapped_backend_passes_the_kit(backend: type[AttentionBackend], filter: str) -> None:
    report = verify(backend, filter=filter)
    assert report.ok, str(report)


@INNER
def test_a_decoder_serves_cross_attention(inner: type[AttentionBackend]) -> None:
    report = verify(cross_attention(inner), filter="cross")
    assert report.ok, str(report)
    assert report.num_cases >= 20


@INNER
def test_a_decoder_serves_encoders(inner: type[AttentionBackend]) -> None:
    report = verify(encoder_only(inner), filter="encoder")
    assert report.ok, str(report)
    assert report.num_cases >= 40


# The judge sees a mistake in each.


def test_a_cut_at_another_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(name="cut", query_lens=(1, 1, 7, 1), seq_lens=(20, 33, 40, 5))
    subject = Subject.of(hybrid(CPU, REFERENCE))
    check_case(subject, case)
    build = HybridBuilder.build

    def shifted(self: HybridBuilder, *arguments: Any) -> HybridMetadata:
        plan = build(self, *arguments)
        assert plan.decode is not None
        return replace(plan, decode=replace(plan.decode, tokens=slice(1, 3)))

    monkeypatch.setattr(HybridBuilder, "build", shifted)
    with pytest.raises(LawBroken):
        check_case(subject, case)


def test_a_decoders_causality_in_cross_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        name="cross",
        query_lens=(3, 1),
        seq_lens=(20, 33),
        attn_type=AttentionType.ENCODER_DECODER,
    )
    subject = Subject.of(cross_attention(CPU))
    check_case(subject, case)
    side = cross_file.encoder_side

    def causal(batch: CommonAttentionMetadata, block_size: int) -> CommonAttentionMetadata:
        return side(batch, block_size).replace(causal=True)

    monkeypatch.setattr(cross_file, "encoder_side", causal)
    with pytest.raises(LawBroken):
        check_case(subject, case)


def test_scratch_pages_of_a_neighbour_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        name="scratch",
        query_lens=(20, 17),
        seq_lens=(20, 17),
        attn_type=AttentionType.ENCODER_ONLY,
    )
    subject = Subject.of(encoder_only(CPU))
    check_case(subject, case)
    build = EncoderOnlyBuilder.build

    def overlapping(self: EncoderOnlyBuilder, *arguments: Any) -> Any:
        plan = build(self, *arguments)
        return replace(plan, slot_mapping=plan.slot_mapping.roll(1))

    monkeypatch.setattr(EncoderOnlyBuilder, "build", overlapping)
    with pytest.raises(LawBroken):
        check_case(subject, case)


# Cross attention: the first step writes.


@INNER
def test_the_encoders_output_is_written_in_a_requests_first_step(
    inner: type[AttentionBackend],
) -> None:
    """Three requests, of which the second has been decoding for long; then one more step of all."""
    layer = Attention(
        4,
        16,
        num_kv_heads=2,
        attn_type="encoder_decoder",
        backend=cross_attention(inner),
        block_size=4,
    )
    draw = torch.Generator().manual_seed(0)
    lens = (6, 9, 3)
    keys, values = ([torch.randn(n, 2, 16, generator=draw) for n in lens] for _ in "kv")
    table = torch.tensor([[7, 2, 0], [4, 1, 9], [3, 0, 0]], dtype=torch.int32)
    cache = torch.full((10, 2, 4, 32), torch.nan)
    for position in range(lens[1]):
        cell = cache[table[1, position // 4], :, position % 4]
        cell[:, :16], cell[:, 16:] = keys[1][position], values[1][position]

    def step(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
        batch = make_batch(query_lens, seq_lens, [[20 + r, 30 + r] for r in range(3)], 4)
        return batch.replace(
            block_table_tensor=table, encoder_seq_lens=torch.tensor(lens, dtype=torch.int32)
        )

    def judge_step(query: torch.Tensor, query_lens: list[int], out: torch.Tensor) -> None:
        sequences = tuple(
            WholeSequence(q=q, k=k, v=v, meaning=Meaning(scale=layer.scale, causal=False))
            for q, k, v in zip(query.split(query_lens), keys, values, strict=True)
        )
        judge(sequences, Result(out=out, lse=None))

    first = torch.randn(6, 4, 16, generator=draw)
    new_k, new_v = (torch.cat([x[0], x[2]]) for x in (keys, values))
    plan = layer.build(step([4, 1, 1], [4, 6, 1]))
    with pytest.raises(BatchError, match="got 8 encoder tokens for a plan that writes 9"):
        layer(first, new_k[1:], new_v[1:], cache, plan)
    with pytest.raises(BatchError, match="got 0 encoder tokens"):
        layer(first, None, None, cache, plan)
    assert torch.isnan(cache[[7, 2, 3]]).all()
    judge_step(first, [4, 1, 1], layer(first, new_k, new_v, cache, plan))
    later = torch.randn(3, 4, 16, generator=draw)
    plan = layer.build(step([1, 1, 1], [5, 7, 2]))
    judge_step(later, [1, 1, 1], layer(later, None, None, cache, plan))
    assert int(torch.isfinite(cache).all(-1).all(1).sum()) == sum(lens)


def test_cross_attention_needs_lengths_and_knows_no_distances() -> None:
    layer = Attention(4, 16, attn_type="encoder_decoder", backend=cross_attention(CPU))
    with pytest.raises(BatchError, match="needs encoder_seq_lens"):
        layer.build(make_batch([1], [1], [[1]], 16))
    with pytest.raises(UnsupportedConfiguration, match="sliding window is asked for"):
        Attention(
            4, 16, attn_type="encoder_decoder", backend=cross_attention(CPU), sliding_window=4
        )
    impl_cls: Any = cross_attention(CPU).get_impl_cls()
    with pytest.raises(UnsupportedConfiguration, match="alibi_slopes is about distances"):
        impl_cls(4, 16, 1.0, alibi_slopes=[1.0] * 4)


# Fast prefill


@pytest.mark.parametrize("inner", [REFERENCE, CPU], ids=lambda b: b.__name__)
@pytest.mark.parametrize("features", [{}, {"sliding_window": 7}, {"sinks": True}], ids=str)
def test_wanted_tokens_answer_as_in_the_whole_batch(
    inner: type[AttentionBackend], features: dict[str, Any]
) -> None:
    case = Case(
        name="fast",
        query_lens=(15, 5, 0, 8, 1),
        seq_lens=(40, 5, 0, 30, 19),
        return_lse=True,
        **features,
    )
    subject, wrapped = Subject.of(inner), Subject.of(fast_prefill(inner))
    owner = subject.layer(case)
    inputs = subject.inputs(owner, case)
    whole, _ = run_and_judge(subject, owner, inputs)
    # The last token of the first, two of the second, none of a chunk, the decode's own.
    wanted = torch.tensor([14, 18, 19, 28, 28, 28])
    armed = inputs.batch.replace(
        logits_indices_padded=wanted.to(torch.int32), num_logits_indices=4, max_logits_per_req=2
    )
    reader = wrapped.layer(case, kv_sharing_target_layer_name=owner.layer_name)
    part = replace(inputs, query=inputs.query[wanted], key=inputs.key[wanted] * 0, batch=armed)
    part = replace(part, value=inputs.value[wanted] * 0)
    before = inputs.kv_cache.clone()
    result = wrapped.run(reader, part)
    assert torch.equal(inputs.kv_cache.nan_to_num(7.0), before.nan_to_num(7.0))
    assert whole.lse is not None
    assert result.lse is not None
    torch.testing.assert_close(result.out[:4], whole.out[wanted[:4]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.lse[:4], whole.lse[wanted[:4]], rtol=1e-5, atol=1e-6)
    assert torch.isnan(result.out[4:]).all()
    # Not armed, it computes all.
    everything = wrapped.run(reader, inputs)
    assert torch.equal(everything.out, whole.out)


@pytest.mark.parametrize(
    ("wanted", "num_wanted", "named"),
    [
        ([3, 9], 2, r"begins with \[3, 9\], which are not the last tokens"),
        ([9, 4], 2, r"begins with \[9, 4\]"),
        ([4, 10], 2, r"begins with \[4, 10\]"),
        ([4, 9], None, "num_logits_indices is None beside 2"),
        ([4, 9], 3, "num_logits_indices is 3 beside 2"),
        ([3, 4, 9], 3, "max_logits_per_req is 1, and logits_indices_padded has 2 tokens of one"),
    ],
)
def test_tokens_that_contradict_the_batch_are_refused(
    wanted: list[int], num_wanted: int | None, named: str
) -> None:
    layer = Attention(4, 16, backend=fast_prefill(CPU), kv_sharing_target_layer_name="owner")
    batch = make_batch([5, 5], [5, 5], [[1], [2]], 16).replace(
        logits_indices_padded=torch.tensor(wanted, dtype=torch.int32),
        num_logits_indices=num_wanted,
        max_logits_per_req=1,
    )
    with pytest.raises(BatchError, match=named):
        layer.build(batch)


def test_a_layer_with_a_cache_of_its_own_needs_every_token() -> None:
    with pytest.raises(UnsupportedConfiguration, match="give kv_sharing_target_layer_name"):
        Attention(4, 16, backend=fast_prefill(CPU))


# Hybrid


def test_a_hybrid_runs_both_and_names_both() -> None:
    layer = Attention(4, 16, backend="reference,cpu", return_lse=True)
    assert layer.backend is hybrid(REFERENCE, CPU)
    assert layer.selection.name == "reference,cpu"
    variants = layer.impl.get_impl_variants()
    assert [type(v) for v in variants] == [REFERENCE.get_impl_cls(), CPU.get_impl_cls()]
    builder = layer.make_builder()
    assert builder.reorder_batch_threshold == 1
    plan = layer.build(make_batch([1, 1, 5, 1], [9, 3, 5, 2], [[1], [2], [3], [4]], 16))
    assert plan.num_decodes == 2
    assert (plan.decode.tokens, plan.prefill.tokens) == (slice(0, 2), slice(2, None))
    assert plan.prefill.plan.seq_lens.tolist() == [5, 2]
    decodes = layer.build(make_batch([1, 1], [9, 3], [[1], [2]], 16))
    assert decodes.prefill is None
    spec = layer.get_kv_cache_spec()
    level = hybrid(REFERENCE, CPU).get_builder_cls().get_cudagraph_support(None, spec)
    assert level is AttentionCGSupport.NEVER


class Pages64(DecoderOnly):
    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [64, MultipleOf(48)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)


class Pages16(Pages64):
    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(32), 17]


class OneLayout(DecoderOnly):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)


def test_a_hybrid_takes_what_both_take() -> None:
    both = hybrid(Pages64, Pages16)
    sizes = both.get_supported_kernel_block_sizes()
    assert [s.base if isinstance(s, MultipleOf) else s for s in sizes] == [64, 96]
    assert isinstance(sizes[1], MultipleOf)
    assert both.supported_kv_cache_layouts() == (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)
    assert not hybrid(DecoderOnly, CPU).supports_batch_invariance()
    assert not hybrid(OneLayout, REFERENCE).supports_dtype(torch.float32)
    with pytest.raises(ConfigurationError, match="no KV cache layout in common"):
        hybrid(Pages64, OneLayout)
    with pytest.raises(ConfigurationError, match="no block size in common"):
        hybrid(Pages64, type("Pages7", (DecoderOnly,), _only_pages_of_7))


_only_pages_of_7: dict[str, Any] = {
    "get_supported_kernel_block_sizes": staticmethod(lambda kv_cache_spec=None: [7])
}


class Returning(DecoderOnly):
    """Of the older generation."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class CausalOnly(DecoderOnly):
    @classmethod
    def supports_non_causal(cls) -> bool:
        return False


def test_what_cannot_be_wrapped_is_named() -> None:
    for wrap in (cross_attention, encoder_only, fast_prefill, lambda b: hybrid(b, CPU)):
        with pytest.raises(ConfigurationError, match="its cache has a shape of its own"):
            wrap(Returning)
        with pytest.raises(ConfigurationError, match="does not attend to all keys and values"):
            wrap(resolve("reference_mla"))
    for wrap in (cross_attention, encoder_only):
        with pytest.raises(ConfigurationError, match="twin does not do non-causal batches"):
            wrap(CausalOnly)
