"""DeepSeek-V3.2's layers in the runner: keys chosen as transformers chooses them, in pages of their own
beside those of the latents."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_graphs import generate

from attnkit import LLM, MLAAttention, SamplingParams, hf
from attnkit.backends.triton.mla import TritonMLASparseBackend, TritonMLASparseImpl
from attnkit.cli.explain import _requests_of_model
from attnkit.conformance.simulator import GraphSimulator
from attnkit.errors import ConfigurationError, ModelError, UnsupportedConfiguration
from attnkit.kvcache.codecs import Fp8PerTokenHeadCodec
from attnkit.kvcache.transfer import PrefixContents
from attnkit.runner import hook
from attnkit.runner.discovery import discover_layers
from attnkit.runner.model import PackedModel

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")
if "deepseek_v32" not in transformers.CONFIG_MAPPING:
    pytest.skip("this version of transformers has no deepseek_v32", allow_module_level=True)

SIZES = {
    **tiny_models.FAMILIES["deepseek_v3"],
    "index_n_heads": 16,  # So many that no key is a tie for want of any positive product.
    "index_head_dim": 16,
    "index_topk": 8,
}
RANK, ROPE, LAYERS = SIZES["kv_lora_rank"], SIZES["qk_rope_head_dim"], 3
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
RNG = random.Random(1)
# 0 is the padding token, which transformers' generate does not attend to.
LONG, SHORT = ([RNG.randrange(1, 256) for _ in range(n)] for n in (70, 9))


def make_model(**changes: Any) -> Any:
    return tiny_models.make_model("deepseek_v32", **{**SIZES, **changes})


def make_llm(folder: Path, **changes: Any) -> LLM:
    settings = {"dtype": "float32", "block_size": 8, "num_blocks": 60, "debug_poison": True}
    return LLM(folder, **{**settings, **changes})


@pytest.mark.parametrize("backend", ["auto", "reference_mla_sparse"])
def test_tokens_are_those_of_transformers(backend: str, tmp_path: Path) -> None:
    """Eight keys a query, prompts of up to 70 tokens in chunks of 13, two with a prefix of another. A
    token and layer takes 160 bytes of latent and 64 of key, where keys and values would take 640."""
    model = make_model()
    model.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, backend=backend, max_num_batched_tokens=13)
    prompts = [LONG, SHORT, LONG[:50] + SHORT, LONG[:33]]
    outputs = llm.generate(prompts[:1], GREEDY) + llm.generate(prompts[1:], GREEDY)
    tokens = [o.outputs[0].token_ids for o in outputs]
    assert tokens == [tiny_models.greedy(model, prompt, 10) for prompt in prompts]
    assert tokens[0] != tiny_models.greedy(make_model(index_topk=100), LONG, 10)
    assert llm.stats.num_cached_tokens == 48 + 32

    packed = llm.engine.model
    assert all(isinstance(layer, MLAAttention) for layer in packed.layers.values())
    (group,) = packed.kv_plan.groups
    assert len(group.layer_names) == len(group.companions) == LAYERS
    pages = {name: spec.page_size_bytes for name, spec in packed.kv_plan.specs.items()}
    assert {pages[name] for name in packed.layers} == {8 * (RANK + ROPE) * 4}
    assert {pages[f"{name}.indexer"] for name in packed.layers} == {8 * 16 * 4}
    assert packed.kv_plan.block_bytes == LAYERS * 8 * (RANK + ROPE + 16) * 4
    assert llm.engine.cache.num_bytes == 60 * packed.kv_plan.block_bytes
    assert len({x.topk_indices_buffer.data_ptr() for x in packed.indexers.values()}) == 1


def in_float8(x: torch.Tensor) -> torch.Tensor:
    """As numbers read back that were stored as codes with a scale per vector."""
    codec, one = Fp8PerTokenHeadCodec(), torch.ones(1)
    return codec.decode(codec.encode(x, one), x.shape[-1], one)


def test_float8_keys_choose_what_transformers_chooses_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token and layer takes 16 + 4 bytes beside its latent. The model is given the same keys where it
    appends them to its cache, so its tokens must be ours; those of its own keys are others."""
    model = make_model()
    model.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, index_cache_dtype="fp8", max_num_batched_tokens=13)
    prompts = [LONG, SHORT, LONG[:50] + SHORT]
    tokens = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    plain = [tiny_models.greedy(model, prompt, 10) for prompt in prompts]
    append = transformers.Cache.update_indexer
    monkeypatch.setattr(
        transformers.Cache, "update_indexer", lambda self, k, i: append(self, in_float8(k), i)
    )
    assert tokens == [tiny_models.greedy(model, prompt, 10) for prompt in prompts]
    assert tokens != plain

    packed = llm.engine.model
    pages = {name: spec.page_size_bytes for name, spec in packed.kv_plan.specs.items()}
    assert {pages[f"{name}.indexer"] for name in packed.layers} == {8 * (16 + 4)}
    assert packed.kv_plan.block_bytes == LAYERS * 8 * ((RANK + ROPE) * 4 + 16 + 4)
    assert llm.engine.cache.num_bytes == 60 * packed.kv_plan.block_bytes


def test_formats_of_keys_are_known_and_have_a_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"index_cache_dtype 'int8'.*use one of fp8, auto"):
        LLM("nowhere", index_cache_dtype="int8")
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has none; leave it out"):
        make_llm(tiny_models.save_model(tmp_path), index_cache_dtype="fp8")


def test_captured_decode_steps_give_the_tokens_of_eager_ones() -> None:
    pytest.importorskip("triton")
    model = make_model(num_hidden_layers=1)
    _, expected = generate(model, backend="cpu_mla_sparse")
    recorder = GraphSimulator()
    engine, tokens = generate(
        model, backend="triton_mla_sparse", recorder=recorder, graphs_required=True
    )
    assert tokens == expected
    assert engine.graphs is not None
    assert set(engine.graphs.sizes) >= {1, 2, 4}
    assert engine.model.capture_refusal is None

    class HostImpl(TritonMLASparseImpl):
        index_backend = "torch"

    class Host(TritonMLASparseBackend):
        get_impl_cls = staticmethod(lambda: HostImpl)

    packed = PackedModel(model, backend=Host)
    assert packed.capture_refusal == "the keys of model.layers.0.self_attn are chosen on the host"


def test_inside_transformers_and_back() -> None:
    model = make_model()
    ids = torch.tensor([[0] * 61 + SHORT, LONG])
    mask = torch.ones_like(ids)
    mask[0, :61] = 0
    given = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6, "eos_token_id": []}
    expected = model.generate(ids, pad_token_id=0, **given)
    bridge = hf.enable(model)
    assert torch.equal(model.generate(ids, pad_token_id=0, **given), expected)
    indexer, rotation = model.model.layers[0].self_attn.indexer, [torch.zeros(1, 1, ROPE)] * 2
    with pytest.raises(ModelError, match="outside of a step"):
        indexer(torch.zeros(1, 1, 48), torch.zeros(1, 1, 24), rotation)
    bridge.disable()
    assert torch.equal(model.generate(ids, pad_token_id=0, **given), expected)


def test_a_prefix_moves_with_its_keys(tmp_path: Path) -> None:
    """Out of pages of 8 tokens and into pages of 16."""
    make_model(num_hidden_layers=2).save_pretrained(tmp_path)
    kept: list[PrefixContents] = []

    class InMemory:
        save = staticmethod(kept.append)

        def load(self, wanted: PrefixContents) -> PrefixContents:
            assert set(wanted.layers) == set(kept[0].layers)
            return kept[0]

    first, second = (make_llm(tmp_path, block_size=n, kv_connector=True) for n in (8, 16))
    tokens = first.generate(LONG, GREEDY)[0].outputs[0].token_ids
    assert first.save_kv(InMemory(), LONG + tokens) == 72
    assert second.load_kv(InMemory()) == 64
    (output,) = second.generate(LONG, GREEDY)
    assert output.outputs[0].token_ids == tokens
    assert output.num_cached_tokens == 64


def facts_of(model: Any) -> Any:
    hook.register()
    model.set_attn_implementation(hook.PROBE)
    return discover_layers(model, 64)


def test_only_what_ranks_as_ours_does_is_taken_for_an_indexer() -> None:
    model = make_model(num_hidden_layers=1)
    (fact,) = facts_of(model)
    attention = model.model.layers[0].self_attn
    indexer = attention.indexer
    assert fact.indexer.module is indexer
    assert (fact.indexer.num_heads, fact.indexer.head_size, fact.indexer.topk_tokens) == (16, 16, 8)
    assert "forward" not in vars(indexer)
    kind = type(indexer)
    others = {
        "Worst": lambda self, *a, **k: kind.forward(self, *a, **k).flip(-1),
        "Few": lambda self, *a, **k: kind.forward(self, *a, **k)[..., :3],
        "Unrotated": lambda self, h, q, rotation, *a, **k: kind.forward(
            self, h, q, [torch.ones_like(rotation[0]), torch.zeros_like(rotation[1])], *a, **k
        ),
    }
    for name, forward in others.items():
        indexer.__class__ = type(name, (kind,), {"forward": forward})
        with pytest.raises(
            ModelError, match=r"DeepseekV32ForCausalLM: .* indexer .* DeepSeek-V3\.2"
        ):
            facts_of(model)
    indexer.__class__ = kind
    attention.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(attention.kv_b_proj.out_features))
    with pytest.raises(ModelError, match="not over latents"):
        facts_of(model)


def test_backends_that_attend_to_all_keys_are_refused(tmp_path: Path) -> None:
    make_model(num_hidden_layers=1).save_pretrained(tmp_path)
    for backend, reason in (("cpu_mla", "attends to all keys"), ("cpu", "the layer is MLA")):
        with pytest.raises(UnsupportedConfiguration, match=reason):
            make_llm(tmp_path, backend=backend)
    (asked,) = _requests_of_model(str(tmp_path), torch.float32, "auto").values()
    assert asked.use_sparse
