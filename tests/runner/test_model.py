"""PackedModel: one packed stream equals one run per sequence; pages, layouts and plans that fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import LLM, SamplingParams, make_batch
from attnkit.backends.reference import ReferenceBackend
from attnkit.contract import KVCacheLayout, MultipleOf
from attnkit.errors import ConfigurationError, UnsupportedConfiguration
from attnkit.runner.model import PackedModel
from attnkit.runner.planner import StepPlanner

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [list(range(40, 61)), [7], list(range(100, 105))]


def make_backend(**attributes: Any) -> type[ReferenceBackend]:
    """The reference under limits of another kind."""
    return type("Limited", (ReferenceBackend,), attributes)


def generated(folder, **settings: Any) -> tuple[LLM, list[list[int]]]:
    llm = LLM(folder, num_blocks=60, debug_poison=True, **settings)
    return llm, [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tiny_models.save_model(tmp_path_factory.mktemp("llama"), tokenizer=False)
    return folder, generated(folder, backend="reference", block_size=16)[1]


def test_all_positions_of_a_packed_stream_are_those_of_each_sequence_alone():
    """BR-076: three prompts in mixed chunks over shuffled pages; logits of every token compared."""
    model = tiny_models.make_model("gemma2")
    sequences = [torch.randint(0, 256, (n,)) for n in (37, 5, 61)]
    with torch.inference_mode():
        expected = [model(s[None], use_cache=False).logits[0] for s in sequences]
    packed = PackedModel(model, backend="reference", block_size=4)
    groups = range(len(packed.kv_plan.groups))
    assert len(groups) == 3  # windowed, full, windowed, over one memory: each has pages of its own
    planner, cache = StepPlanner(packed), packed.allocate(100, poison=True)
    order = torch.randperm(99).add(1).tolist()
    tables = [[[order.pop() for _ in range(-(-len(s) // 4))] for s in sequences] for _ in groups]
    done, got = [0, 0, 0], [[], [], []]
    for chunks in ([20, 3, 30], [10, 1, 20], [1, 1, 8], [6, 0, 1], [0, 0, 2]):
        rows = [r for r in range(3) if chunks[r]]
        ids = torch.cat([sequences[r][done[r] : done[r] + chunks[r]] for r in rows])
        for r in rows:
            done[r] += chunks[r]
        lengths = [chunks[r] for r in rows], [done[r] for r in rows]
        batches = [make_batch(*lengths, [tables[g][r] for r in rows], 4) for g in groups]
        assert batches[0].positions is not None
        wanted = torch.arange(len(ids))
        logits = packed.forward(ids, batches[0].positions, wanted, planner.plan(batches), cache)
        for r, part in zip(rows, logits.split([chunks[r] for r in rows]), strict=True):
            got[r].append(part)
    assert done == [37, 5, 61]
    for parts, rows in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), rows, atol=2e-5, rtol=2e-5)


def test_only_wanted_rows_get_logits():
    packed = PackedModel(tiny_models.make_model(), backend="reference", block_size=4)
    planner, cache = StepPlanner(packed), packed.allocate(20)
    ids = torch.arange(50, 62)
    seen: list[int] = []
    packed.model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))

    def logits(wanted: list[int]) -> torch.Tensor:
        batch = make_batch([5, 7], [5, 7], [[3, 9], [1, 2]], 4)
        assert batch.positions is not None
        rows = torch.tensor(wanted, dtype=torch.long)
        return packed.forward(ids, batch.positions, rows, planner.plan([batch]), cache)

    every = logits(list(range(12)))
    assert torch.equal(logits([11, 4]).argmax(-1), every[[11, 4]].argmax(-1))
    assert logits([]).shape == (0, 320)
    assert seen == [12, 2, 0]


@pytest.mark.parametrize("sizes", [[16], [MultipleOf(16)], [4, 8], [1]])
def test_a_page_is_split_into_blocks_the_kernels_read(llama, sizes):
    folder, expected = llama
    backend = make_backend(get_supported_kernel_block_sizes=staticmethod(lambda: sizes))
    llm, tokens = generated(folder, backend=backend, block_size=48)
    packed = llm.engine.model
    kernel = {layer.block_size for layer in packed.layers.values()}
    assert packed.block_size == 48
    assert kernel == ({48} if sizes == [MultipleOf(16)] else {max(s for s in sizes)})
    assert packed.blocks_per_block == 48 // kernel.pop()
    assert tokens == expected


def test_a_page_no_kernel_block_divides_is_refused_by_size(llama):
    folder, _ = llama
    backend = make_backend(get_supported_kernel_block_sizes=staticmethod(lambda: [16]))
    with pytest.raises((ConfigurationError, UnsupportedConfiguration), match="24"):
        LLM(folder, backend=backend, block_size=24)


def test_a_backend_gets_the_page_it_prefers(llama):
    folder, expected = llama
    backend = make_backend(
        get_preferred_block_size=classmethod(lambda cls, default: 32),
    )
    llm, tokens = generated(folder, backend=backend)
    assert llm.engine.model.block_size == 32
    assert tokens == expected


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.LHBNC])
def test_a_backend_gets_a_layout_it_reads(llama, layout):
    folder, expected = llama
    backend = make_backend(
        supported_kv_cache_layouts=classmethod(lambda cls: (KVCacheLayout.BLHNC, layout))
    )
    llm, tokens = generated(folder, backend=backend, block_size=16)
    assert llm.engine.cache.layout is layout
    assert tokens == expected


def test_layers_whose_tokens_take_fewer_bytes_get_longer_pages(tmp_path):
    """gemma4: sliding layers with 2 heads of 16, full ones with 2 of 64."""
    changes = {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "global_head_dim": 64,
    }
    model = tiny_models.make_model("gemma4_text", **changes)
    model.save_pretrained(tmp_path)
    llm, tokens = generated(tmp_path, backend="reference", block_size=4)
    packed = llm.engine.model
    assert [layer.block_size for layer in packed.layers.values()] == [16, 4, 16, 4]
    assert tokens == [tiny_models.greedy(model, prompt, 10) for prompt in PROMPTS]
    assert llm.stats.num_used_blocks == 0


def test_equal_layers_are_planned_once_a_step(tmp_path):
    """Three windowed layers and three full ones: two groups, each planned once."""
    tiny_models.save_model(tmp_path, "gemma3_text", tokenizer=False, num_hidden_layers=6,
                           layer_types=["sliding_attention"] * 3 + ["full_attention"] * 3)  # fmt: skip
    llm = LLM(tmp_path, backend="reference", block_size=4, num_blocks=60)
    built: list[Any] = []
    builder = ReferenceBackend.get_builder_cls()
    original = builder.build

    def counted(self: Any, *args: Any) -> Any:
        built.append(self)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "build", counted)
        llm.generate([1, 2, 3], SamplingParams(max_tokens=1))
    assert len(built) == len(llm.engine.model.kv_plan.groups) == 2


def test_layers_know_the_models_length_and_the_engines_bounds(llama):
    folder, _ = llama
    llm = LLM(folder, backend="reference", num_blocks=9, max_num_seqs=5, max_num_batched_tokens=70)
    for layer in llm.engine.model.layers.values():
        config = layer.vllm_config
        assert config.model_config.max_model_len == 512
        assert config.model_config.dtype is torch.float32
        assert config.scheduler_config.max_num_seqs == 5
        assert config.scheduler_config.max_num_batched_tokens == 70
        assert config.cache_config.block_size == llm.engine.model.block_size
