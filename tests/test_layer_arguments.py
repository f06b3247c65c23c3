"""Layers and impls: an argument of another type is refused when they are made, by its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnkit import Attention, MLAAttention, PagedKVCache, make_batch
from attnkit.backends.cpu.backend import CpuImpl
from attnkit.backends.cpu.mla import CpuMLAImpl
from attnkit.backends.flash_attn import FlashAttnImpl
from attnkit.backends.flex.backend import FlexImpl
from attnkit.backends.hopper.impl import HopperImpl
from attnkit.backends.hopper.mla import HopperMLAImpl
from attnkit.backends.reference import ReferenceImpl
from attnkit.backends.reference_mla import ReferenceMLAImpl
from attnkit.backends.triton.impl import TritonImpl
from attnkit.backends.triton.mla import TritonMLAImpl
from attnkit.contract import MLADimensions
from attnkit.errors import AttnkitError, UnknownBackend
from attnkit.indexer import LightningIndexer

WRONG: tuple[Any, ...] = (3.5, {}, [1], object(), torch.zeros(2, 2), np.zeros(3))
"""What no argument below takes; texts and whole numbers are added where they are wrong."""

SIZES = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
PROJECTION = torch.nn.Linear(32, 4 * 40, bias=False)

TOLD = SimpleNamespace(topk_indices_buffer=torch.zeros(4, 8, dtype=torch.int32))

NUMBERS = ("num_heads", "head_size", "num_kv_heads", "sliding_window")
TEXTS = ("kv_cache_dtype", "attn_type", "kv_sharing_target_layer_name")


def refuses(make: Any, name: str, value: Any) -> None:
    with pytest.raises(AttnkitError) as caught:
        make(**{name: value})
    assert name in str(caught.value) or isinstance(caught.value, UnknownBackend), caught.value


@pytest.mark.parametrize(
    "impl", [ReferenceImpl, CpuImpl, FlexImpl, TritonImpl, HopperImpl, FlashAttnImpl]
)
def test_dense_impls(impl: Any) -> None:
    def make(**changes: Any) -> Any:
        facts: dict[str, Any] = {"num_heads": 4, "head_size": 64, "scale": 1.0, "num_kv_heads": 2}
        return impl(**{**facts, **changes})

    for name in NUMBERS:
        for value in (*WRONG, "4", True):
            refuses(make, name, value)
    for value in (*WRONG[1:], "1", True):
        refuses(make, "scale", value)
        refuses(make, "logits_soft_cap", value)
    for name in ("kv_cache_dtype", "kv_sharing_target_layer_name"):
        for value in (*WRONG, 3):
            refuses(make, name, value)
    for value in ([0.0] * 4, 3, {}, "x", torch.zeros(4, dtype=torch.int64)):
        refuses(make, "sinks", value)


@pytest.mark.parametrize("impl", [ReferenceMLAImpl, CpuMLAImpl, TritonMLAImpl, HopperMLAImpl])
def test_latent_impls(impl: Any) -> None:
    def make(**changes: Any) -> Any:
        facts: dict[str, Any] = {"num_heads": 4, "head_size": 576, "scale": 1.0, "num_kv_heads": 1}
        facts |= dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap"))
        facts |= {"kv_cache_dtype": "auto", "attn_type": "decoder", "qk_head_dim": 192}
        facts |= {"kv_sharing_target_layer_name": None, "q_lora_rank": None, "v_head_dim": 128}
        facts |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        return impl(**{**facts, "kv_b_proj": projection, **changes})

    projection = torch.nn.Linear(512, 4 * 256, bias=False)

    make()
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for name in ("num_heads", *sizes, "kv_cache_dtype", "kv_b_proj", "indexer"):
        for value in (*WRONG, True):
            refuses(make, name, value)
    # What other layers have, and this one would leave out in silence.
    for name, value in {
        **{"head_size": 577, "qk_head_dim": 128, "num_kv_heads": 2, "q_pad_num_heads": 64},
        **{"alibi_slopes": [0.5] * 4, "sliding_window": 7, "logits_soft_cap": 30.0},
        **{"attn_type": "encoder", "kv_sharing_target_layer_name": "a", "indexer": TOLD},
    }.items():
        refuses(make, name, value)
    make(logits_soft_cap=0.0)


def test_layers() -> None:
    def dense(**changes: Any) -> Any:
        return Attention(**{"num_heads": 4, "head_size": 64, "backend": "reference", **changes})

    def latent(**changes: Any) -> Any:
        facts = {"num_heads": 4, "dimensions": SIZES, "kv_b_proj": PROJECTION}
        return MLAAttention(**{**facts, "backend": "reference_mla", **changes})

    shared = ("device", "dtype", "backend", "layer_name", "block_size", "vllm_config", "choose")
    for make in (dense, latent):
        for name in (*shared, "kv_cache_dtype", "return_lse", "use_kv_connector"):
            for value in WRONG:
                refuses(make, name, value)
    for name in (*NUMBERS, *TEXTS, "head_size_v", "attention_chunk_size", "use_alibi_sqrt"):
        for value in WRONG:
            refuses(dense, name, value)
    for value in (3, "x"):
        for make in (dense, latent):
            refuses(make, "vllm_config", value)
            refuses(make, "choose", value)
    for make in (dense, latent):
        refuses(make, "device", 2**70)
        for value in (*WRONG, "16", True):
            refuses(make().get_kv_cache_spec, "block_size", value)
    refuses(dense, "kv_sharing_target_layer_name", 3)
    for value in ([0.0] * 4, 3, "x", torch.zeros(4, dtype=torch.int64)):
        refuses(dense, "sinks", value)
    for name in ("dimensions", "kv_b_proj", "prefill_backend", "indexer"):
        for value in WRONG:
            refuses(latent, name, value)


def test_indexers() -> None:
    def make(**changes: Any) -> Any:
        return LightningIndexer(**{"num_heads": 4, "head_size": 64, "topk_tokens": 8, **changes})

    for name in ("num_heads", "head_size", "topk_tokens", "max_num_batched_tokens", "block_size"):
        for value in (*WRONG, "4", True):
            refuses(make, name, value)
    for name in ("kv_cache_dtype", "dtype", "device", "layer_name", "backend"):
        for value in WRONG:
            refuses(make, name, value)
    for value in WRONG:
        refuses(make, "topk_indices_buffer", value)
    indexer = make()
    cache = PagedKVCache({"indexer": indexer.get_kv_cache_spec()}, 2)["indexer"]
    step = {"q": torch.randn(3, 4, 64), "k": torch.randn(3, 64), "weights": torch.randn(3, 4)}
    step |= {"kv_cache": cache, "batch": make_batch([3], [3], [[1]], 16)}
    assert indexer.choose(**step).shape == (3, 8)
    for name in step:
        for value in (*WRONG, None):
            refuses(lambda **changes: indexer.choose(**{**step, **changes}), name, value)
