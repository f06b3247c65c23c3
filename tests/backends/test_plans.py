"""Plans of every backend: they say what they are of and whose blocks they speak of, and layers of others
refuse them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rival_doubles
from attnkit import Attention, MLAAttention, PagedKVCache, make_batch
from attnkit.backends import BACKENDS, MLA_BACKENDS
from attnkit.backends.wrappers import (
    chunked_local,
    compressed,
    cross_attention,
    encoder_only,
    fast_prefill,
)
from attnkit.contract import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    MLADimensions,
    VllmConfig,
)
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


@pytest.mark.parametrize("name", [*BACKENDS, *MLA_BACKENDS, "cpu,reference"])
def test_a_plan_says_what_wrappers_made_of_the_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", rival_doubles.flashinfer())
    backend, batch = resolve(name), make_batch([1, 5], [40, 5], [[1, 2], [3]], 32)
    facts: dict[str, Any] = {"block_size": 32, "dtype": torch.bfloat16}
    heads = {"num_kv_heads": 2, "head_size": 64, "head_size_v": 64}
    own: tuple[str, ...] = ("prefills by cpu and decodes by reference",) if "," in name else ()
    plain: Any = FullAttentionSpec(**facts, **heads)
    made: list[tuple[Any, Any, Any, tuple[str, ...]]] = []
    if name in MLA_BACKENDS:
        plain = MLAAttentionSpec(head_size=40, **facts)
        if not backend.is_sparse():
            states = replace(plain, tokens_per_state=8)
            made.append((compressed(backend), states, batch, ("states of 8 tokens",)))
    else:
        chunks = ChunkedLocalAttentionSpec(attention_chunk_size=64, **facts, **heads)
        made.append((chunked_local(backend), chunks, batch, ("chunks of 64 tokens", *own)))
        wanted = torch.tensor([0, 5], dtype=torch.int32)
        some = batch.replace(logits_indices_padded=wanted, num_logits_indices=2)
        reads, both = fast_prefill(backend), fast_prefill(chunked_local(backend))
        made += [(reads, plain, x, ("wanted tokens", *own)) for x in (batch, some)]
        made.append((both, chunks, some, ("wanted tokens", "chunks of 64 tokens", *own)))
        lens = torch.tensor([9, 3], dtype=torch.int32)
        sided = batch.replace(encoder_seq_lens=lens, encoder_seq_lens_cpu=lens.numpy())
        cross = CrossAttentionSpec(max_encoder_tokens=9, **facts, **heads)
        if backend.supports_attn_type("encoder_decoder"):
            made.append((backend, cross, sided, (*own, "encoder outputs")))
        if backend.supports_non_causal():
            views = ("encoder outputs, wrapped", *own)
            made.append((cross_attention(backend), cross, sided, views))
            made.append((encoder_only(backend), plain, batch, (f"encoders over {name}",)))
    for wrapped, spec, shown, views in [(backend, plain, batch, own), *made]:
        builder_cls = wrapped.get_builder_cls()
        plan = builder_cls(spec, ["a"], VllmConfig(), torch.device("cpu")).build(0, shown)
        assert plan.views == builder_cls.get_views(spec) == views


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


WRAPPED = resolve("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "the batch as it is": {},
    "chunks of 32 tokens": {"attention_chunk_size": 32},
    "chunks of 64 tokens": {"attention_chunk_size": 64},
    "encoder outputs": {"attn_type": "encoder_decoder"},
    "encoder outputs, wrapped": {
        "attn_type": "encoder_decoder",
        "backend": cross_attention(WRAPPED),
    },
    "wanted tokens": {
        "kv_sharing_target_layer_name": "owner",
        "backend": fast_prefill(WRAPPED),
    },
    "chunks of 32 tokens, then wanted tokens": {
        "kv_sharing_target_layer_name": "owner",
        "backend": fast_prefill(WRAPPED),
        "attention_chunk_size": 32,
    },
    "prefills by cpu and decodes by reference": {"backend": "cpu,reference"},
    "prefills by reference and decodes by cpu": {"backend": "reference,cpu"},
    "encoders over cpu": {"attn_type": "encoder_only", "backend": encoder_only(WRAPPED)},
    "encoders over reference": {
        "attn_type": "encoder_only",
        "backend": encoder_only(resolve("reference")),
    },
}


def _kind(kind: str) -> Attention:
    return Attention(2, 16, block_size=16, **{"backend": "cpu", **KINDS[kind]})


@pytest.mark.parametrize("wanted", KINDS)
def test_a_plan_of_something_else_is_refused(wanted: str) -> None:
    """Where classes of plans are equal, what they are of is not."""
    layer = _kind(wanted)
    lens = torch.tensor([5], dtype=torch.int32)
    batch = make_batch([5], [5], [[1]], 16).replace(
        encoder_seq_lens=lens, encoder_seq_lens_cpu=lens.numpy()
    )
    cache, tokens = torch.zeros(4, 2, 16, 32), torch.ones(5, 2, 16)
    for given in KINDS:
        plan, before = _kind(given).build(batch), cache.clone()
        if given == wanted:
            layer(tokens, tokens, tokens, cache, plan)
            continue
        with pytest.raises(BatchError) as refusal:
            layer(tokens, tokens, tokens, cache, plan)
        said = str(refusal.value)
        if "as its plan, and plans of backend" not in said:  # Of another class.
            assert f"got a plan of {given}, and its plans are of {wanted}; pass" in said
        assert torch.equal(cache, before)


def test_a_plan_of_tokens_is_none_of_states() -> None:
    plans = {every: _latent(16, every).build(make_batch([5], [5], [[1]], 16)) for every in (1, 8)}
    for every, given, own in (
        (1, "states of 8 tokens", "the batch as it is"),
        (8, "the batch as it is", "states of 8 tokens"),
    ):
        layer = _latent(16, every)
        cache = PagedKVCache({"a": layer.get_kv_cache_spec()}, 4)["a"]
        tokens = (torch.ones(5, *shape) for shape in [(2, 24), (32,), (8,)])
        with pytest.raises(BatchError, match=f"a plan of {given}, and its plans are of {own}"):
            layer(*tokens, cache, plans[9 - every])


def test_encoders_have_no_blocks_to_speak_of() -> None:
    layer, tokens = _dense(32, attn_type="encoder_only"), torch.ones(5, 2, 16)
    plan = _dense(16, attn_type="encoder_only").build(make_batch([5], [5], [[2]], 16))
    assert torch.equal(layer(tokens, tokens, tokens, None, plan), tokens)
