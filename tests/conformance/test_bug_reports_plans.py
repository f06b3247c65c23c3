"""Public bug reports, replayed: caches of two kinds, plans that outlive their batch, what they hold.

Each test is named by its report in the list of replays (BR-nnn); the oracle judges every run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnkit.backends import BACKENDS, MLA_BACKENDS
from attnkit.batch import make_batch
from attnkit.conformance.case import Case
from attnkit.conformance.checks import bits, judge, run_and_judge
from attnkit.conformance.subject import Subject
from attnkit.contract import (
    AttentionType,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from attnkit.kvcache.pool import PagedKVCache
from attnkit.selection import AttentionRequest, reasons_against, resolve

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_br103_self_and_cross_attention_over_one_buffer(layout: KVCacheLayout) -> None:
    specs = {
        "self": FullAttentionSpec(**SHAPE),
        "cross": CrossAttentionSpec(max_encoder_tokens=40, **SHAPE),
    }
    cache = PagedKVCache(specs, 4, layout=layout, overlays=[["self", "cross"]])
    assert cache["self"].untyped_storage().data_ptr() == cache["cross"].untyped_storage().data_ptr()
    rows = {name: torch.randn(16, 2, 16) for name in specs}
    before = {block: cache.read_blocks("self", [block]) for block in (0, 3)}
    cache.write_blocks("self", [1], rows["self"])
    cache.write_blocks("cross", [2], rows["cross"])
    assert torch.equal(cache.read_blocks("self", [1]), rows["self"])
    assert torch.equal(cache.read_blocks("cross", [2]), rows["cross"])
    for block, bytes_before in before.items():
        for name in specs:
            assert torch.equal(bits(cache.read_blocks(name, [block])), bits(bytes_before))


def test_br105_an_encoders_output_is_longer_than_the_decoders_context(subject: Subject) -> None:
    config = VllmConfig(model_config=ModelConfig(max_model_len=64))
    spec = CrossAttentionSpec(max_encoder_tokens=150, **SHAPE)
    assert spec.max_num_blocks(64, 64) == 10
    case = Case(
        name="br105",
        query_lens=(1, 4),
        seq_lens=(150, 150),
        attn_type=AttentionType.ENCODER_DECODER,
    )
    layer = subject.layer(case, vllm_config=config)
    run_and_judge(subject, layer, subject.inputs(layer, case))


@pytest.mark.parametrize("name", [*BACKENDS, *MLA_BACKENDS])
def test_br084_br086_br088_context_parallelism_is_refused_rather_than_wrong(name: str) -> None:
    """Each query's own share of a context, who owns a token of a page that kernels split, and masks
    over shares: no backend spreads a request over ranks, and each says so."""
    backend = resolve(name)
    plain = AttentionRequest(
        head_size=64,
        dtype=torch.bfloat16,
        use_mla=backend.is_mla(),
        use_sparse=backend.is_sparse(),
        has_sliding_window=not backend.is_mla(),
    )
    for asked, named in (("use_dcp", "(DCP)"), ("use_pcp", "(PCP)")):
        assert not any(named in reason for reason in reasons_against(backend, plain, here=False))
        reasons = reasons_against(backend, replace(plain, **{asked: True}), here=False)
        assert any(named in reason for reason in reasons)


WINDOW = Case(
    name="br121", query_lens=(256,), seq_lens=(256,), num_heads=2, head_size=16, sliding_window=64
)


def test_br121_a_mask_of_another_length_is_not_used_again() -> None:
    """One layer and its builder for 256, 96 and 300 tokens; then two plans at a time."""
    subject = Subject.of("flex")
    layer = subject.layer(WINDOW)
    cases = [replace(WINDOW, query_lens=(n,), seq_lens=(n,)) for n in (256, 96, 300)]
    inputs = [subject.inputs(layer, case) for case in cases]
    for each in inputs:
        run_and_judge(subject, layer, each)
    plans = [layer.build(each.batch) for each in inputs]
    for each, plan in reversed(list(zip(inputs, plans, strict=True))):
        judge(each.sequences, subject.run(layer, each, plan=plan))


def test_br128_lengths_are_not_compiled_one_by_one() -> None:
    """Every length after the first few runs in what was traced for these."""
    torch.compiler.reset()
    subject = Subject.of("flex")
    case = Case(name="br128", query_lens=(1,), seq_lens=(3,), num_heads=2, head_size=16)
    layer = subject.layer(case)
    counters = torch._dynamo.utils.counters["stats"]

    def traced(lens: range) -> int:
        before = counters["unique_graphs"]
        for n in lens:
            step = replace(case, query_lens=(min(n, 1 + n % 40),), seq_lens=(n,))
            subject.run(layer, subject.inputs(layer, step))
        return counters["unique_graphs"] - before

    traced(range(3, 4))
    assert traced(range(3, 2000, 80)) <= 3
    assert traced(range(3, 2000, 80)) == 0


def held_bytes(make: Callable[[], object]) -> int:
    """Of the tensors that are there after `make`, and were not before."""

    def all_tensors() -> dict[int, int]:
        # Asked of the type: some objects answer `isinstance` by warnings.
        found = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
        return {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in found}

    gc.collect()
    before = all_tensors()
    kept = make()
    gc.collect()
    after = all_tensors()
    del kept
    return sum(size for storage, size in after.items() if storage not in before)


@pytest.mark.parametrize("name", ["cpu", "flex", "reference", "triton"])
def test_br132_a_builder_holds_no_mask_of_all_lengths(name: str) -> None:
    config = VllmConfig(
        model_config=ModelConfig(max_model_len=131_072),
        scheduler_config=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
    )
    builder_cls = resolve(name).get_builder_cls()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    batch = make_batch([4, 1], [20, 9], [[1, 2], [3]], 16)

    def build(times: int) -> object:
        builder = builder_cls(spec, ["a"], config, torch.device("cpu"))
        for _ in range(times):
            builder.build(0, batch)
        return builder

    assert held_bytes(lambda: build(0)) < 64 << 20
    assert held_bytes(lambda: build(1000)) <= held_bytes(lambda: build(1)) + 4096
