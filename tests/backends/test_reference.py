"""What the reference promises beyond the kit: it defines the law, so it keeps it to the letter."""

from __future__ import annotations

import math

import pytest
import torch

from attnkit.backends.reference import ReferenceBackend
from attnkit.batch import make_batch
from attnkit.contract import AttentionType
from attnkit.errors import ConfigurationError, UnsupportedConfiguration
from attnkit.layer import Attention
from attnkit.selection import AttentionRequest, select


def prefill(layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One prompt in blocks 2, 1 of 16 tokens."""
    cache = torch.full((3, 2, 16, 16), math.nan)
    batch = make_batch([q.shape[0]], [q.shape[0]], [[2, 1]], 16)
    out = layer(q, k, v, cache, layer.build(batch))
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_masked_key_never_shows_even_where_others_see_it(poison: float) -> None:
    layer = Attention(4, 8, num_kv_heads=2, backend="reference")
    q, k, v = (torch.randn(20, h, 8, generator=torch.Generator().manual_seed(1)) for h in (4, 2, 2))
    clean = prefill(layer, q, k, v)
    k[7], v[7] = poison, poison
    spoilt = prefill(layer, q, k, v)
    assert torch.equal(spoilt[:7], clean[:7])
    assert not torch.isfinite(spoilt[7:]).any()


def test_auto_takes_it_only_where_nothing_else_serves() -> None:
    request = AttentionRequest(head_size=64, dtype=torch.float32, num_heads=4, num_kv_heads=2)
    assert select(request, environ={}).name != "reference"


def test_it_refuses_caches_of_mla_latents_by_name() -> None:
    with pytest.raises(UnsupportedConfiguration, match="KV cache dtype fp8_ds_mla is not"):
        Attention(4, 8, backend="reference", kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(UnsupportedConfiguration, match="KV cache dtype fp8_ds_mla is not"):
        ReferenceBackend.get_impl_cls()(4, 8, 1.0, kv_cache_dtype="fp8_ds_mla")


def test_it_refuses_head_sizes_whose_codes_do_not_fill_blocks() -> None:
    with pytest.raises(UnsupportedConfiguration, match="nvfp4 needs head sizes that 16 divides"):
        Attention(4, 24, backend="reference", kv_cache_dtype="nvfp4")
    with pytest.raises(UnsupportedConfiguration, match=r"needs head sizes .*not 24"):
        Attention(4, 32, head_size_v=24, backend="reference", kv_cache_dtype="nvfp4")


@pytest.mark.parametrize(
    ("argument", "value", "named"),
    [
        ("sliding_window", 0, "sliding_window 0"),
        ("logits_soft_cap", -1.0, "logits_soft_cap -1.0"),
        ("alibi_slopes", [1.0], "alibi_slopes"),
        ("sinks", torch.tensor([math.nan] * 4), "sinks contains nan"),
        ("scale", math.inf, "scale inf"),
    ],
)
def test_values_that_mean_nothing_are_named(argument: str, value: object, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Attention(4, 8, backend="reference", **{argument: value})  # type: ignore[arg-type]


def test_cross_attention_sees_the_encoder_not_the_decoder() -> None:
    layer = Attention(
        2, 8, num_kv_heads=1, backend="reference", attn_type=AttentionType.ENCODER_DECODER
    )
    cache = torch.full((3, 1, 16, 16), math.nan)
    cache[2, :, :5] = 0.0
    cache[2, :, :5, 8:] = torch.arange(5.0)[None, :, None]
    batch = make_batch([3], [16], [[2]], 16).replace(
        encoder_seq_lens=torch.tensor([5], dtype=torch.int32),
        slot_mapping=torch.full((3,), -1),
    )
    out = layer(
        torch.randn(3, 2, 8), torch.ones(3, 1, 8), torch.ones(3, 1, 8), cache, layer.build(batch)
    )
    assert isinstance(out, torch.Tensor)
    assert torch.allclose(out, torch.full_like(out, 2.0))
