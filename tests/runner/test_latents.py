"""DeepSeek's layers in the runner: latents in the pages and nowhere else, the tokens of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_graphs import generate
from torch import nn

from attnkit import LLM, MLAAttention, SamplingParams
from attnkit.conformance.simulator import GraphSimulator
from attnkit.contract import MLADimensions
from attnkit.errors import BackendError, ModelError
from attnkit.mla.projection import KvBProjection
from attnkit.runner import hook
from attnkit.runner.discovery import discover_layers
from attnkit.runner.latents import keep_latents
from attnkit.runner.linear import PackedLinear, is_packable

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

SIZES = tiny_models.FAMILIES["deepseek_v3"]
RANK, ROPE, LAYERS = SIZES["kv_lora_rank"], SIZES["qk_rope_head_dim"], 3


def make_model(family: str, **changes: Any) -> Any:
    model = tiny_models.make_model(family, **{**SIZES, **changes})
    if not any(hasattr(type(module), "expand_kv") for module in model.modules()):
        pytest.skip("this version of transformers expands latents elsewhere")
    return model


def make_llm(model: Any, folder: Any, **changes: Any) -> LLM:
    model.save_pretrained(folder)
    settings = {"dtype": "float32", "block_size": 8, "num_blocks": 60, "debug_poison": True}
    return LLM(folder, **{**settings, **changes})


@pytest.mark.parametrize(
    ("family", "backend"),
    [("deepseek_v2", "auto"), ("deepseek_v3", "cpu_mla"), ("minicpm3", "reference_mla")],
)
def test_tokens_are_those_of_transformers_over_pages_of_latents(family, backend, tmp_path) -> None:
    """Chunks of 13 tokens, two prompts with a prefix of another; 160 bytes a token and layer where
    keys and values would take 640."""
    model = make_model(family)
    rng = random.Random(1)
    # 0 is the padding token, which transformers' generate does not attend to.
    long, short = ([rng.randrange(1, 256) for _ in range(n)] for n in (70, 9))
    prompts = [long, short, long[:50] + short, long[:33]]
    llm = make_llm(model, tmp_path, backend=backend, max_num_batched_tokens=13)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    outputs = [llm.generate([p], params)[0] for p in prompts[:1]] + llm.generate(
        prompts[1:], params
    )
    assert [o.outputs[0].token_ids for o in outputs] == [
        tiny_models.greedy(model, prompt, 10) for prompt in prompts
    ]
    assert llm.stats.num_cached_tokens == 48 + 32
    packed = llm.engine.model
    assert all(isinstance(layer, MLAAttention) for layer in packed.layers.values())
    assert len(packed.layers) == LAYERS
    assert packed.kv_plan.block_bytes == LAYERS * 8 * (RANK + ROPE) * 4
    assert llm.engine.cache.num_bytes == 60 * packed.kv_plan.block_bytes


def test_a_named_backend_for_keys_and_values_gets_them(tmp_path) -> None:
    model = make_model("deepseek_v3")
    llm = make_llm(model, tmp_path, backend="cpu")
    assert set(llm.backends) == {"cpu"}
    heads = SIZES["num_key_value_heads"] * (16 + ROPE + 16)
    assert llm.engine.model.kv_plan.block_bytes == LAYERS * 8 * heads * 4


def test_a_backend_for_latents_refuses_a_model_without(tmp_path) -> None:
    with pytest.raises(BackendError, match="cpu_mla"):
        make_llm(tiny_models.make_model("llama"), tmp_path, backend="cpu_mla")


def test_release_lets_the_model_expand_again(tmp_path) -> None:
    model = make_model("deepseek_v3")
    llm = make_llm(model, tmp_path)
    packed = llm.engine.model
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        with pytest.raises(ModelError, match="outside of a step"):
            packed.model(ids, use_cache=False)
        packed.release()
        packed.model.set_attn_implementation("eager")
        assert torch.equal(packed.model(ids).logits, model(ids).logits)


def facts_of(model: Any) -> list[Any]:
    hook.register()
    model.set_attn_implementation(hook.PROBE)
    return [fact.latent for fact in discover_layers(model, 64)]


def test_only_what_kv_b_proj_says_is_taken_for_a_latent() -> None:
    model = make_model("deepseek_v3")
    sizes = MLADimensions(
        kv_lora_rank=RANK, qk_nope_head_dim=16, qk_rope_head_dim=ROPE, v_head_dim=16
    )
    assert [latent.dimensions for latent in facts_of(model)] == [sizes] * LAYERS
    first, second, third = (layer.self_attn for layer in model.model.layers)
    kind = type(first)
    scaled = {"expand_kv": lambda self, c, r: [x * 1.01 for x in kind.expand_kv(self, c, r)]}
    first.__class__ = type("Scaled", (kind,), scaled)
    second.kv_b_proj.bias = nn.Parameter(torch.zeros(second.kv_b_proj.out_features))
    latents = facts_of(model)
    assert latents[:2] == [None, None]
    assert latents[2].kv_b_proj is third.kv_b_proj
    keep_latents(third)
    assert third.expand_kv(1, 2) == (1, 2)


@pytest.mark.skipif(
    not is_packable(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no packed bfloat16 here"
)
def test_a_packed_projection_is_read_through_the_identity() -> None:
    sizes = MLADimensions(kv_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
    linear = nn.Linear(48, 2 * 40, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    read = KvBProjection(PackedLinear(linear), 2, sizes, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(read.weight, linear.weight)


def test_captured_decode_steps_over_latents_give_the_tokens_of_eager_ones() -> None:
    pytest.importorskip("triton")
    model = make_model("deepseek_v3", num_hidden_layers=1)
    _, expected = generate(model, backend="cpu_mla")
    recorder = GraphSimulator()
    engine, tokens = generate(model, backend="triton_mla", recorder=recorder, graphs_required=True)
    assert tokens == expected
    assert engine.graphs is not None
    assert set(engine.graphs.sizes) >= {1, 2, 4}
