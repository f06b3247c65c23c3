"""DeepSeek-V4's layers made of ours: a window with sinks, states that a compressor pools, keys of an
indexer that are pooled alike, and one softmax over both by their LSE. What the model does between is
transformers' own; whatever the steps, the layer answers as theirs does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from attnkit import Attention, MLAAttention, PagedKVCache, make_batch
from attnkit.backends.wrappers.compressed import batch_of_states
from attnkit.contract import MLADimensions
from attnkit.indexer import LightningIndexer

transformers = pytest.importorskip("transformers")
if "deepseek_v4" not in transformers.CONFIG_MAPPING:
    pytest.skip("transformers has no DeepSeek-V4", allow_module_level=True)

HIDDEN, HEADS, SIZE, WINDOW, EVERY, TOKENS = 32, 3, 16, 8, 4, 43
KINDS = ("heavily_compressed_attention", "compressed_sparse_attention")


def make_model(kind: str) -> Any:
    config = transformers.CONFIG_MAPPING["deepseek_v4"](
        vocab_size=64,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=[kind],
        mlp_layer_types=["moe"],
        compress_rates=dict.fromkeys(KINDS, EVERY),
        num_attention_heads=HEADS,
        head_dim=SIZE,
        partial_rotary_factor=0.5,
        sliding_window=WINDOW,
        q_lora_rank=16,
        o_groups=1,
        o_lora_rank=8,
        # With fewer heads scores are 0 here and there, and theirs breaks ties in its own way.
        index_n_heads=16,
        index_head_dim=16,
        index_topk=3,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hc_mult=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def rotated(
    owner: Any, x: torch.Tensor, positions: torch.Tensor, *, back: bool = False
) -> torch.Tensor:
    """(T, heads, size) with the last numbers of each head turned by its position, or turned back."""
    module = __import__(type(owner).__module__, fromlist=["apply_rotary_pos_emb"])
    cos, sin = owner.rotary_emb(x, position_ids=positions[None], layer_type="compress")
    x = x.transpose(0, 1)[None]
    return module.apply_rotary_pos_emb(x, cos, -sin if back else sin)[0].transpose(0, 1)


class Pool:
    """States of a compressor, from its projections of all tokens so far."""

    def __init__(self, compressor: Any) -> None:
        self.compressor, self.size = compressor, compressor.head_dim
        self.kept: list[torch.Tensor] = []

    def states(self, hidden: torch.Tensor, start: int) -> torch.Tensor:
        """Rows (T, size) of the tokens from `start` on: of the last token of a state that state, of
        others NaN."""
        c, size = self.compressor, self.size
        self.kept.append(torch.stack([c.kv_proj(hidden), c.gate_proj(hidden)]))
        kept = torch.cat(self.kept, dim=1)
        rows = torch.full((len(hidden), size), torch.nan)
        for t in range(start, start + len(hidden)):
            if (t + 1) % EVERY:
                continue
            first = t + 1 - EVERY
            values, gates = kept[:, first : t + 1]
            values, gates = values[:, -size:], (gates + c.position_bias)[:, -size:]
            if (
                kept.shape[2] > size and first
            ):  # The tokens of the state before, with other columns.
                more, more_gates = kept[:, first - EVERY : first]
                values = torch.cat([more[:, :size], values])
                gates = torch.cat([(more_gates + c.position_bias)[:, :size], gates])
            state = c.kv_norm((values * gates.softmax(0)).sum(0))
            rows[t - start] = rotated(c, state[None, None], torch.tensor([first]))[0, 0]
        return rows


class Ours:
    """The layer. Keys are values, so latents are projected by the identity, and have nothing rotated
    beside them."""

    def __init__(self, theirs: Any) -> None:
        self.theirs, scale = theirs, theirs.scaling
        compressor = theirs.compressor
        self.pool, self.indexer, self.index_pool = Pool(compressor), None, None
        if hasattr(compressor, "indexer"):
            own = compressor.indexer
            self.index_pool = Pool(own)
            self.indexer = LightningIndexer(
                own.num_heads,
                own.head_dim,
                own.index_topk,
                kv_cache_dtype="float32",
                block_size=2,
            )
        given = {"return_lse": True, "block_size": 2 * EVERY}
        self.window = Attention(
            HEADS, SIZE, scale, 1, sliding_window=WINDOW, sinks=theirs.sinks.detach(), **given
        )
        same = nn.Linear(SIZE, HEADS * 2 * SIZE, bias=False)
        same.weight.data = torch.eye(SIZE).repeat(2 * HEADS, 1)
        sizes = MLADimensions(
            kv_lora_rank=SIZE, qk_nope_head_dim=SIZE, qk_rope_head_dim=1, v_head_dim=SIZE
        )
        self.states = MLAAttention(
            HEADS, sizes, same, scale, tokens_per_state=EVERY, indexer=self.indexer, **given
        )
        self.caches = {"window": self.cache(self.window), "states": self.cache(self.states)}
        if self.indexer is not None:
            self.caches["keys"] = self.cache(self.indexer)

    @staticmethod
    def cache(layer: Any) -> torch.Tensor:
        spec = {layer.layer_name: layer.get_kv_cache_spec()}
        return PagedKVCache(spec, 9, poison=True)[layer.layer_name]

    def step(self, hidden: torch.Tensor, start: int) -> torch.Tensor:
        theirs, num = self.theirs, len(hidden)
        positions = torch.arange(start, start + num)
        compressed = theirs.q_a_norm(theirs.q_a_proj(hidden))
        q = theirs.q_b_norm(theirs.q_b_proj(compressed).view(num, HEADS, SIZE))
        kv = theirs.kv_norm(theirs.kv_proj(hidden))[:, None]
        rotary = theirs.compressor
        q, kv = rotated(rotary, q, positions), rotated(rotary, kv, positions)
        batch = make_batch([num], [start + num], [[7, 2, 5, 1, 8, 3]], 2 * EVERY)
        if self.indexer is not None:
            self.choose(compressed, hidden, positions, batch)
        rows = self.pool.states(hidden, start)
        nothing = q.new_zeros(num, HEADS, 1)
        parts = [
            self.window(q, kv, kv, self.caches["window"], self.window.build(batch)),
            self.states(
                torch.cat([q, nothing], -1),
                rows,
                nothing[:, 0],
                self.caches["states"],
                self.states.build(batch),
            ),
        ]
        total = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(x * (lse - total).exp()[..., None] for x, lse in parts)
        out = rotated(rotary, out, positions, back=True)  # type: ignore[arg-type]
        return theirs.o_b_proj(theirs.o_a_proj(out.reshape(1, num, 1, -1)).flatten(2))[0]

    def choose(
        self,
        compressed: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: Any,
    ) -> None:
        own = self.theirs.compressor.indexer
        assert self.index_pool is not None
        assert self.indexer is not None
        keys = self.index_pool.states(hidden, int(positions[0]))
        q = own.q_b_proj(compressed).view(len(hidden), own.num_heads, own.head_dim)
        weights = own.scorer.weights_proj(hidden) * own.scorer.weights_scaling
        weights = weights * own.scorer.softmax_scale
        q = rotated(own, q, positions)
        self.indexer.choose(q, keys, weights, self.caches["keys"], batch_of_states(batch, EVERY))


def answers_of_theirs(model: Any, hidden: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """With a cache, step after step."""
    attention, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    cache, outputs, start = transformers.DynamicCache(config=model.config), [], 0
    for num in lens:
        positions = torch.arange(start, start + num)
        x = hidden[None, start : start + num]
        turns = {
            kind: rotary(x, position_ids=positions[None], layer_type=kind)
            for kind in ("main", "compress")
        }
        keys = torch.arange(max(0, start - WINDOW + 1), start + num)
        far = positions[:, None] - keys
        mask = torch.where((far >= 0) & (far < WINDOW), 0.0, -torch.inf)[None, None]
        outputs.append(attention(x, turns, positions[None], mask, cache)[0][0])
        start += num
    return torch.cat(outputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lens", [[TOKENS], [11, 1, 1, 1, 5, 24], [1] * TOKENS])
@torch.no_grad()
def test_layers_of_v4(kind: str, lens: list[int]) -> None:
    """One prompt, chunks that end inside of states and decodes that complete them, and decodes alone."""
    model = make_model(kind)
    hidden = torch.randn(TOKENS, HIDDEN)
    want = answers_of_theirs(model, hidden, lens)
    ours, outputs, start = Ours(model.model.layers[0].self_attn), [], 0
    for num in lens:
        outputs.append(ours.step(hidden[start : start + num], start))
        start += num
    torch.testing.assert_close(torch.cat(outputs), want, atol=1e-5, rtol=1e-5)
