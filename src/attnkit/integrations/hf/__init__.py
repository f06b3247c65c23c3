"""attnkit inside transformers: `model.generate` over our pages.

    import attnkit
    attnkit.hf.enable(model)          # or enable(model, backend="cpu")
    model.generate(**inputs)          # as ever

In: a causal language model of transformers. Out: the same object, whose attention runs on the chosen
backend with keys and values in pages; the rest of it is untouched. docs/transformers.md has the limits.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from attnkit.arguments import check_count
from attnkit.contract import AttentionBackend
from attnkit.errors import ModelError
from attnkit.integrations.hf import whole
from attnkit.integrations.hf.bridge import Bridge
from attnkit.integrations.hf.versions import check_version
from attnkit.runner.model import PackedModel

__all__ = ["Bridge", "enable"]

whole.register()

_BRIDGE = "attnkit_bridge"


def enable(
    model: Any,
    backend: str | type[AttentionBackend] = "auto",
    *,
    block_size: int | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
) -> Bridge:
    """Let attnkit run a model's attention, until `disable` of what is returned; that is called first
    where the model was enabled before.

    Args:
        model: a causal language model in eval mode, where it shall run.
        backend: as in `attnkit.Attention`.
        block_size: tokens in a page; None: what the backend prefers.
        max_model_len: longest row in tokens; None: what the model's configuration says.
        max_num_seqs: most rows in a batch; backends size buffers by it.

    Returns:
        The bridge; print it to see which backend runs which layers, and why.

    Raises:
        ModelError: it is no model, or in training mode, or has an attention attnkit does not know; that
            is named, and the model is left as it was.
        BackendError: no such backend, or it cannot serve a layer.
        ConfigurationError: a length, count or block size that is not allowed.
    """
    check_version(transformers.__version__)
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"enable got {type(model).__name__}; give a model, from "
            "AutoModelForCausalLM.from_pretrained(...) say"
        )
    if model.training:
        raise ModelError(
            f"{type(model).__name__} is in training mode, and attnkit runs inference alone; call "
            "model.eval() first"
        )
    check_count("max_num_seqs", max_num_seqs)
    former = model.__dict__.get(_BRIDGE)
    if former is not None:
        former.disable()
    packed = PackedModel(
        model,
        backend=backend,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
    bridge = Bridge(packed)
    object.__setattr__(model, _BRIDGE, bridge)
    return bridge
