"""Small random transformers models, made on the spot, with a byte-level tokenizer.

In: a family and changes to its configuration. Out: the model, or a directory that holds it. Sizes are
such that a step takes about a millisecond.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

BASE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
LEFT_OUT: Any = object()
"""For a setting of `BASE` that a family does not have."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt_oss": {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "mixtral": {"num_local_experts": 4},
    "llama4_text": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 8,
        "floor_scale": 5,  # queries of the fourth layer, which has no rotary positions, grow with theirs
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
    },
    "bloom": {"hidden_size": 64},
    "falcon": {"hidden_size": 64, "head_dim": LEFT_OUT, "parallel_attn": True},  # one KV head
    "mpt": {"num_attention_heads": 6, "max_seq_len": 512, "attn_config": {"clip_qkv": 2.0}},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "intermediate_size": LEFT_OUT,
        "moe_intermediate_size": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "sliding_window": 9,
        "layer_types": ["sliding_attention"] * 3,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "hc_mult": 2,
    },
}
FAMILIES = {name: sizes for name, sizes in FAMILIES.items() if name in transformers.CONFIG_MAPPING}
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(family: str = "llama", **changes: Any) -> Any:
    """A model with weights large enough that greedy choices are far from ties."""
    torch.manual_seed(1)
    settings = {**BASE, **FAMILIES.get(family, {}), **changes}
    settings = {name: value for name, value in settings.items() if value is not LEFT_OUT}
    config = transformers.AutoConfig.for_model(family, **settings)
    # Eager attention is the one that applies everything a family asks for: sdpa of transformers 5.19
    # leaves gemma2's soft cap out.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model


def make_tokenizer() -> Any:
    """One token a byte (ids 0-255), then special tokens from 256 on."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
    core.add_special_tokens(special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(
    folder: Path, family: str = "llama", *, tokenizer: bool = True, **changes: Any
) -> Path:
    """Write a model, and unless told otherwise a tokenizer, into `folder`."""
    make_model(family, **changes).save_pretrained(folder)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers generates, end tokens ignored."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),  # Or token 0 would count as padding.
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=[],
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
