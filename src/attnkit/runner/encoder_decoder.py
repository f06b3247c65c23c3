"""An encoder-decoder of transformers, run as two packed streams through attnkit layers.

In: a loaded model (BART, mBART, Pegasus, Marian, Whisper). Out: `PackedEncoderDecoder`. A request's
encoder runs in its first step, in one stream with those of others that begin; cross attention writes
what comes out into pages of its own, which the request holds to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from attnkit.compiled import forward_context
from attnkit.contract import (
    AttentionSpec,
    AttentionType,
    CrossAttentionSpec,
    VllmConfig,
)
from attnkit.kvcache.pool import PagedKVCache
from attnkit.runner import hook, two_sides
from attnkit.runner.discovery import LayerFacts
from attnkit.runner.model import PackedModel
from attnkit.runner.planner import builders_of
from attnkit.runner.sound import encode, num_encoder_tokens, reads_sound
from attnkit.runner.step import StepInputs
from attnkit.runner.takeover import probe


class PackedEncoderDecoder(PackedModel):
    """The model and its attention layers; `layers` are the decoder's, which keep something.

    Attributes:
        encoder_layers: layer name -> `attnkit.Attention` of the encoder.
        max_model_len: longest sequence of the decoder.
        max_encoder_len: and of the encoder.
    """

    encoder_layers: dict[str, hook.ModelLayer | hook.ModelLatentLayer]

    @property
    def capture_refusal(self) -> str | None:
        return "the steps of an encoder-decoder differ in the encoder's tokens"

    def attach(self) -> None:
        super().attach()
        for fact in self._encoder_facts:
            hook.attach(fact.module, self.encoder_layers[fact.name])

    def release(self) -> None:
        for fact in self._encoder_facts:
            hook.detach(fact.module)
        super().release()

    def _probe(self) -> tuple[LayerFacts, ...]:
        config = self.model.config
        self.max_encoder_len = (
            num_encoder_tokens(config) if reads_sound(config) else self.max_model_len
        )
        facts = probe(self.model, self.max_model_len)
        self._encoder_facts = [f for f in facts if f.attn_type is AttentionType.ENCODER]
        return tuple(f for f in facts if f.attn_type is not AttentionType.ENCODER)

    def _build(
        self,
        facts: Sequence[LayerFacts],
        block_size: int | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        super()._build(facts, block_size, max_num_seqs, max_num_batched_tokens)
        config: VllmConfig = next(iter(self.layers.values())).vllm_config
        longest = replace(config.model_config, max_model_len=self.max_encoder_len)
        config = replace(config, model_config=longest)
        self.encoder_layers = {
            fact.name: self._maker.make(fact, self.block_size, config)
            for fact in self._encoder_facts
        }
        self._encoder_builders = builders_of(self.encoder_layers)

    def _cache_spec(
        self, layer: hook.ModelLayer | hook.ModelLatentLayer, block_size: int
    ) -> AttentionSpec:
        if layer.attn_type is not AttentionType.ENCODER_DECODER:
            return super()._cache_spec(layer, block_size)
        like = layer._spec(block_size)
        facts = {f.name: getattr(like, f.name) for f in fields(AttentionSpec)}
        return CrossAttentionSpec(max_encoder_tokens=self.max_encoder_len, **facts)

    def run(
        self, inputs: StepInputs, plans: Mapping[str, Any], cache: PagedKVCache
    ) -> torch.Tensor:
        encoder = inputs.encoder
        ids = positions = output = None
        if encoder is not None:
            ids, positions = encoder.input_ids, encoder.batch.positions
            made = [(names, b.build(0, encoder.batch)) for names, b in self._encoder_builders]
            plans = {**plans, **{name: plan for names, plan in made for name in names}}
        with torch.inference_mode(), forward_context(plans, cache.by_layer, inputs.positions):
            if encoder is not None and encoder.features is not None:
                output = encode(self.model, encoder.features)
            logits = two_sides.call(
                self.model, ids, positions, inputs.input_ids, inputs.positions, output
            )
        return logits[inputs.logits_indices]
