"""EncoderModel: a transformers encoder, run as one packed stream without a cache.

In: a loaded encoder. Out: hidden states of many texts that lie one after the other; attention of
both directions keeps them apart. Its model code is transformers', unmodified.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from attnkit.batch import make_batch
from attnkit.compiled import forward_context
from attnkit.contract import AttentionBackend, AttentionType, ModelConfig, VllmConfig
from attnkit.errors import ModelError
from attnkit.runner import hook
from attnkit.runner.model import max_model_len_of
from attnkit.runner.planner import builders_of
from attnkit.runner.takeover import explain_layers, left_alone_on_error, probe, set_attention
from attnkit.selection import select

_NUM_CHECKED_POSITIONS = 5


class EncoderModel:
    """The model and its attention layers.

    Attributes:
        model: transformers' module, in eval mode.
        device: where it runs.
        max_model_len: longest text, in tokens.
        vocab_size: rows of its embedding.
        layers: layer name -> `attnkit.Attention`, in the order of the forward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        backend: str | type[AttentionBackend] = "auto",
        max_model_len: int | None = None,
    ) -> None:
        """Probe `model` and attach a layer to each of its attention modules.

        Args:
            model: a transformers encoder with its weights where it shall run.
            backend: as in `attnkit.Attention`.
            max_model_len: None: what the model's configuration says.

        Raises:
            ModelError: the model cannot be driven; it is left as it was.
            ConfigurationError: a length that is not allowed.
            BackendError: no backend for one of its layers.
        """
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.max_model_len = max_model_len_of(model.config, max_model_len)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        _check_positions(model, min(_NUM_CHECKED_POSITIONS, self.max_model_len))
        with left_alone_on_error(model):
            facts = probe(model, self.max_model_len, encoder=True)
            config = VllmConfig(
                model_config=ModelConfig(dtype=facts[0].dtype, max_model_len=self.max_model_len)
            )
            choose = functools.cache(select)
            self.layers = {
                fact.name: hook.ModelLayer(
                    fact.num_heads,
                    fact.head_size,
                    fact.scale,
                    fact.num_kv_heads,
                    sliding_window=fact.sliding_window,
                    logits_soft_cap=fact.logits_soft_cap,
                    sinks=fact.sinks,
                    alibi_slopes=fact.alibi_slopes,
                    head_size_v=fact.head_size_v,
                    attn_type=AttentionType.ENCODER_ONLY,
                    dtype=fact.dtype,
                    device=self.device,
                    backend=backend,
                    layer_name=fact.name,
                    vllm_config=config,
                    choose=choose,
                )
                for fact in facts
            }
            set_attention(model, hook.RUN)
        for fact in facts:
            hook.attach(fact.module, self.layers[fact.name])
        self._builders = builders_of(self.layers)

    def explain(self) -> str:
        """Which backend runs which layers, and why not the others."""
        return explain_layers(self.layers)

    def forward(self, token_ids: Sequence[int], lens: Sequence[int]) -> torch.Tensor:
        """Run texts.

        Args:
            token_ids: of all texts, one after the other.
            lens: of each text, at least 1 and at most `max_model_len`.

        Returns:
            Last hidden states (num_tokens, hidden_size) in the model's dtype.
        """
        # Encoders keep nothing, so their batch has no pages: one block of a text's length stands for it.
        batch = make_batch(
            lens,
            lens,
            [[i + 1] for i in range(len(lens))],
            self.max_model_len,
            device=self.device,
            causal=False,
        )
        plans: dict[str, Any] = {}
        for names, builder in self._builders:
            plans.update(dict.fromkeys(names, builder.build(0, batch)))
        ids = torch.tensor(token_ids, device=self.device)
        assert batch.positions is not None
        with torch.inference_mode(), forward_context(plans, {}):
            return self.model(input_ids=ids[None], position_ids=batch.positions[None])[0][0]


def _check_positions(model: Any, num_tokens: int) -> None:
    """Refuse a model that would number a text's tokens otherwise than from 0 on (RoBERTa does)."""
    ids = torch.arange(3, 3 + num_tokens, device=next(model.parameters()).device)
    ids = ids % model.get_input_embeddings().weight.shape[0]
    with torch.inference_mode():
        own = model(input_ids=ids[None])[0]
        ours = model(input_ids=ids[None], position_ids=torch.arange(num_tokens).to(ids)[None])[0]
    if not torch.allclose(own.float(), ours.float(), rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"{type(model).__name__} does not number a text's positions from 0 on, which attnkit does; "
            "use another model"
        )
