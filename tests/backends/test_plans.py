"""Plans of every backend: they say whose blocks they speak of, and layers of others refuse them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import rival_doubles
from attnkit import Attention, MLAAttention, PagedKVCache, make_batch
from attnkit.backends import BACKENDS, MLA_BACKENDS
from attnkit.contract import FullAttentionSpec, MLAAttentionSpec, MLADimensions, VllmConfig
from attnkit.errors import BatchError
from attnkit.registry import resolve

LATENT = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)


@pytest.mark.parametrize("name", [*BACKENDS, *MLA_BACKENDS, "cpu,reference"])
def test_a_plan_says_whose_blocks_it_speaks_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", rival_doubles.flashinfer())
    if name in MLA_BACKENDS:
        spec: Any = MLAAttentionSpec(block_size=32, head_size=40, dtype=torch.bfloat16)
    else:
        spec = FullAttentionSpec(
            block_size=32, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16
        )
    builder_cls = resolve(name).get_builder_cls()
    builder = builder_cls(spec, ["a"], VllmConfig(), torch.device("cpu"))
    plan = builder.build(0, make_batch([1, 5], [40, 5], [[1, 2], [3]], 32))
    assert plan.block_size == 32


def _dense(block_size: int, backend: str = "cpu", attn_type: str = "decoder") -> Attention:
    return Attention(2, 16, backend=backend, block_size=block_size, attn_type=attn_type)


def _latent(block_size: int, tokens_per_state: int) -> MLAAttention:
    projection = nn.Linear(32, 2 * (16 + 24), bias=False)
    return MLAAttention(
        2, LATENT, projection, block_size=block_size, tokens_per_state=tokens_per_state
    )


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        *((_dense, name) for name in ("reference", "cpu", "flex", "cpu,reference")),
        *((_latent, tokens_per_state) for tokens_per_state in (1, 8)),
    ],
)
@pytest.mark.parametrize("is_told", [True, False])
def test_a_plan_for_blocks_of_another_size_is_refused(make: Any, kind: Any, is_told: bool) -> None:
    """The batch may be an engine's, which does not say: then the layer that plans it does."""
    layer, batch = make(32, kind), make_batch([5], [5], [[2]], 16)
    plan = make(16, kind).build(batch if is_told else batch.replace(block_size=None))
    cache = PagedKVCache({"a": layer.get_kv_cache_spec()}, 4)["a"]
    shapes = [(2, 16)] * 3 if make is _dense else [(2, 24), (32,), (8,)]
    with pytest.raises(BatchError, match=r"a plan for blocks of 16 tokens, and has blocks of 32"):
        layer(*(torch.ones(5, *shape) for shape in shapes), cache, plan)
    assert not cache.any()


def test_encoders_have_no_blocks_to_speak_of() -> None:
    layer, tokens = _dense(32, attn_type="encoder_only"), torch.ones(5, 2, 16)
    plan = _dense(16, attn_type="encoder_only").build(make_batch([5], [5], [[2]], 16))
    assert torch.equal(layer(tokens, tokens, tokens, None, plan), tokens)
