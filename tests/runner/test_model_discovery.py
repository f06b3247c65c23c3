"""Layer facts of transformers families, and the refusal of models that cannot be packed."""

import copy
from typing import Any

import pytest
import torch

from attnkit.errors import BackendError, ModelError
from attnkit.runner import hook
from attnkit.runner.discovery import discover_layers
from attnkit.runner.model import PackedModel
from attnkit.runner.takeover import probe
from attnkit.runner.temperature import QueryTemperature

transformers = pytest.importorskip("transformers")

MAX_LEN = 200
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = (4, 2, 16, 16, 0.25, None, None, False)
WINDOW = (4, 2, 16, 16, 0.25, 8, None, False)
MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def tiny_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    settings = {**BASE, **changes}
    if family == "falcon":  # where it is a property
        del settings["head_dim"]
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model


def discover(model: Any, max_model_len: int = MAX_LEN) -> list[tuple[Any, ...]]:
    return [
        (
            fact.num_heads,
            fact.num_kv_heads,
            fact.head_size,
            fact.head_size_v,
            round(fact.scale, 6),
            fact.sliding_window,
            fact.logits_soft_cap,
            fact.sinks is not None,
        )
        for fact in probe(model, max_model_len)
    ]


def test_token_types_that_change_no_mask_make_no_prefix_lm():
    """GPT-2 adds an embedding of them."""
    model = tiny_model("gpt2", n_embd=64, n_head=4)
    assert [fact.token_types for fact in probe(model, MAX_LEN)] == [None, None]


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, [PLAIN, PLAIN]),
        ("mistral", {"sliding_window": 8}, [WINDOW, WINDOW]),
        ("mistral", {"sliding_window": None}, [PLAIN, PLAIN]),
        ("qwen2", {}, [PLAIN, PLAIN]),
        ("qwen3", {}, [PLAIN, PLAIN]),
        ("phi3", {"sliding_window": 8}, [WINDOW, WINDOW]),
        ("olmo2", {}, [PLAIN, PLAIN]),
        ("smollm3", {}, [PLAIN, PLAIN]),
        ("granite", {"attention_multiplier": 0.5}, [(*PLAIN[:4], 0.5, None, None, False)] * 2),
        (
            "gemma2",
            {"sliding_window": 8, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 30.0},
            [(4, 2, 16, 16, 0.5, 8, 30.0, False), (4, 2, 16, 16, 0.5, None, 30.0, False)],
        ),
        (
            "gemma3_text",
            {
                "sliding_window": 8,
                "query_pre_attn_scalar": 16,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            [PLAIN, WINDOW],
        ),
        (
            "gpt_oss",
            {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
            [(*WINDOW[:7], True), (*PLAIN[:7], True)],
        ),
        ("mixtral", {"num_local_experts": 4}, [PLAIN, PLAIN]),
        ("nemotron", {}, [PLAIN, PLAIN]),  # hands no unknown arguments to its attention
        ("gpt2", {"n_positions": 256}, [(4, 4, 16, 16, 0.25, None, None, False)] * 2),
        ("falcon", {"multi_query": True}, [(4, 1, *PLAIN[2:])] * 2),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, [PLAIN, PLAIN]),
        ("falcon", {"multi_query": False}, [(4, 4, *PLAIN[2:])] * 2),
        ("deepseek_v2", MLA, [(4, 4, 24, 16, round(24**-0.5, 6), None, None, False)] * 2),
    ],
)
def test_facts_of_a_family(family, changes, expected):
    assert discover(tiny_model(family, **changes)) == expected


def test_sinks_are_the_models_own_values():
    model = tiny_model("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    hook.register()
    model.set_attn_implementation(hook.PROBE)
    for fact, layer in zip(discover_layers(model, MAX_LEN), model.model.layers, strict=True):
        assert fact.module is layer.self_attn
        assert fact.sinks is not None
        assert torch.equal(fact.sinks, layer.self_attn.sinks)


def test_a_window_as_long_as_the_model_is_no_window():
    assert discover(tiny_model("mistral", sliding_window=MAX_LEN)) == [PLAIN, PLAIN]
    window = (*PLAIN[:5], MAX_LEN - 1, None, False)
    assert discover(tiny_model("mistral", sliding_window=MAX_LEN - 1)) == [window, window]


def test_bloom_has_a_slope_per_head_and_is_itself_again_afterwards():
    model = tiny_model("bloom")
    ids = torch.arange(20, 30)[None]
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    packed = PackedModel(model, backend="reference")
    assert [f.alibi_slopes for f in probe(model, MAX_LEN)] == [(2**-2, 2**-4, 2**-6, 2**-8)] * 2
    packed.release()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before)
        assert torch.equal(twin(ids, use_cache=False).logits, before)
    assert "forward" not in vars(model.transformer.h[0].self_attention)


LLAMA4 = {"num_local_experts": 4, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0]}


@pytest.mark.parametrize("size", [2, 5, 100, MAX_LEN - 1])
def test_chunks_and_temperatures_are_those_of_the_configuration(size):
    model = tiny_model("llama4_text", attention_chunk_size=size, floor_scale=3, **LLAMA4)
    hook.register()
    model.set_attn_implementation(hook.PROBE)
    chunked, full = discover_layers(model, MAX_LEN)
    assert (chunked.attention_chunk_size, full.attention_chunk_size) == (size, None)
    assert chunked.sliding_window is None
    assert chunked.temperature is None
    assert full.temperature == QueryTemperature(scale=0.1, floor_scale=3)
    assert full.module.attn_temperature_tuning is True  # as it was


def test_chunks_as_long_as_the_model_are_none():
    model = tiny_model("llama4_text", attention_chunk_size=MAX_LEN, **LLAMA4)
    assert discover(model) == [PLAIN, PLAIN]


@pytest.mark.parametrize(
    "sees",
    [
        lambda q, k: (k <= q) | (k < 3),  # a prefix
        lambda q, k: (k <= q) & ((q - k < 8) | (k < 2)),  # a window and the first tokens
        lambda q, k: (k <= q) & (q - k < 8 + (q > 150)),  # a window that grows
        lambda q, k: (k <= q) & (k // 8 >= q // 8 - 1),  # a chunk and the one before
        lambda q, k: k < q,  # not itself
    ],
)
def test_a_mask_of_another_kind_is_refused(sees):
    mask = hook.tagged_mask(q_length=6, kv_length=6, mask_function=lambda b, h, q, k: sees(q, k))
    model = tiny_model("llama")
    model.model.layers[1].self_attn = Doctored(model.model.layers[1].self_attn, attention_mask=mask)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn.*neither causal nor"):
        discover(model)


def test_probing_leaves_no_trace_in_the_model():
    model = tiny_model("llama")
    ids = torch.arange(20, 30)[None]
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    implementation = model.config._attn_implementation
    discover(model)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, before)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mamba", {}, "MambaForCausalLM does not call"),
        ("falcon", {"alibi": True}, "FalconAttention has ALiBi, which .* adds twice"),
        ("diffllama", {}, r"DiffLlamaForCausalLM: .* more than once"),
        ("qwen3_next", {"num_hidden_layers": 4}, "Qwen3NextForCausalLM.*leak"),
        ("minimax", {}, "MiniMaxForCausalLM.*leak"),
    ],
)
def test_a_model_that_cannot_be_packed_is_refused_by_name(family, changes, message):
    with pytest.raises(ModelError, match=message):
        discover(tiny_model(family, **changes))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("heavily_compressed_attention", "to states of 128 tokens each that its compressor pools"),
        (
            "compressed_sparse_attention",
            "states of 4 tokens each, of which an indexer chooses some,",
        ),
    ],
)
def test_states_that_no_probe_is_long_enough_for_are_refused_by_name(kind, message):
    """A state is pooled from more tokens than a probe has, which looks like a window alone."""
    tiny_models = pytest.importorskip("tiny_models")
    if "deepseek_v4" not in tiny_models.FAMILIES:
        pytest.skip("this version of transformers has no deepseek_v4")
    model = tiny_models.make_model("deepseek_v4", layer_types=["sliding_attention", kind, kind])
    with pytest.raises(ModelError, match=rf"layers\.1\.self_attn .* {message}"):
        discover(model)


class Doctored(torch.nn.Module):
    """Wraps a llama's attention module and changes what it hands to the attention function."""

    def __init__(self, inner: torch.nn.Module, **extra: Any) -> None:
        super().__init__()
        self.inner, self.extra = inner, extra

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **{**kwargs, **self.extra})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias"),
        ({"head_mask": torch.ones(4)}, "passes head_mask"),
        ({"is_causal": False}, "bidirectional"),
        ({"sliding_window": 4}, "sliding_window=4 but its mask shows None"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "does not get its mask"),
    ],
)
def test_an_argument_that_would_change_the_result_is_refused_by_name(extra, message):
    model = tiny_model("llama")
    model.model.layers[1].self_attn = Doctored(model.model.layers[1].self_attn, **extra)
    with pytest.raises(ModelError, match=message) as caught:
        discover(model)
    assert "layers.1.self_attn" in str(caught.value)


def test_an_argument_that_is_none_is_no_reason():
    model = tiny_model("llama")
    model.model.layers[1].self_attn = Doctored(model.model.layers[1].self_attn, position_bias=None)
    assert discover(model) == [PLAIN, PLAIN]


class Leaky(torch.nn.Module):
    """A layer norm that lets a token feel a fraction of the one before it."""

    def __init__(self, inner: torch.nn.Module, amount: float) -> None:
        super().__init__()
        self.inner, self.amount = inner, amount

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.amount * x.roll(1, dims=1))


def test_tokens_that_mix_outside_of_attention_are_found():
    model = tiny_model("llama")
    norm = model.model.layers[1].input_layernorm
    model.model.layers[1].input_layernorm = Leaky(norm, 0.0)
    assert discover(model) == [PLAIN, PLAIN]
    model.model.layers[1].input_layernorm = Leaky(norm, 0.01)
    with pytest.raises(ModelError, match=r"attention layer 1.*leak"):
        discover(model)
    model.model.layers[1].input_layernorm = norm
    model.model.norm = Leaky(model.model.norm, 0.01)
    with pytest.raises(ModelError, match=r"the output.*leak"):
        discover(model)


def test_position_ids_that_are_ignored_are_found():
    model = tiny_model("llama")
    inner = model.model.rotary_emb

    class OwnPositions(torch.nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return inner(x, torch.arange(x.shape[1])[None])

    model.model.rotary_emb = OwnPositions()
    with pytest.raises(ModelError, match="position_ids"):
        discover(model)


def test_the_running_name_outside_of_a_step_is_refused():
    model = tiny_model("llama")
    hook.register()
    model.set_attn_implementation(hook.RUN)
    with pytest.raises(ModelError, match=r"LlamaAttention .*attnkit\.LLM"):
        model(torch.arange(5)[None])
    packed = PackedModel(model, backend="reference")
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn .*gradients"):
        packed.model(torch.arange(5)[None], use_cache=False)
    with torch.no_grad(), pytest.raises(ModelError, match=r"self_attn .*outside of a step"):
        packed.model(torch.arange(5)[None], use_cache=False)
    packed.release()
    with pytest.raises(ModelError, match="LlamaAttention"):
        packed.model(torch.arange(5)[None])


def test_a_refused_model_is_left_as_it_was():
    model = tiny_model("qwen3_next", num_hidden_layers=4)
    names = {name: module.config._attn_implementation for name, module in model.named_modules()
             if hasattr(module, "config")}  # fmt: skip
    ids = torch.arange(20, 30)[None]
    with torch.no_grad():
        before = model(ids).logits
    with pytest.raises(ModelError, match="Qwen3NextForCausalLM"):
        PackedModel(model)
    with pytest.raises(BackendError, match="none such"):
        PackedModel(tiny_model("llama"), backend="none such")
    assert names == {name: module.config._attn_implementation
                     for name, module in model.named_modules() if hasattr(module, "config")}  # fmt: skip
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
