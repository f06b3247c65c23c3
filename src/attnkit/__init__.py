"""attnkit: the attention layer of an LLM inference engine as a library.

Import it and get the layer, the paged cache, the batch and the choice of backends; it needs torch
and numpy and touches no GPU. `attnkit.LLM` (text from a model) and `attnkit.hf` (the bridge into
`model.generate`) bring transformers in when they are first asked for. What a backend author needs is in
`attnkit.contract`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attnkit.garbage as _garbage

with _garbage.collection_paused():
    from attnkit.batch import make_batch
    from attnkit.compiled import forward_context
    from attnkit.kvcache.pool import PagedKVCache
    from attnkit.layer import Attention
    from attnkit.mla_layer import MLAAttention
    from attnkit.registry import backend_names, register
    from attnkit.selection import AttentionRequest, Selection, select

if TYPE_CHECKING:
    from attnkit.integrations import hf
    from attnkit.runner.embed import Embedder
    from attnkit.runner.llm import LLM
    from attnkit.runner.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Attention",
    "AttentionRequest",
    "Embedder",
    "MLAAttention",
    "PagedKVCache",
    "SamplingParams",
    "Selection",
    "backend_names",
    "forward_context",
    "hf",
    "make_batch",
    "register",
    "select",
]


def __getattr__(name: str) -> Any:
    """Load the runner on first use, so that importing attnkit stays light."""
    if name == "LLM":
        from attnkit.runner.llm import LLM

        return LLM
    if name == "Embedder":
        from attnkit.runner.embed import Embedder

        return Embedder
    if name == "SamplingParams":
        from attnkit.runner.sampling_params import SamplingParams

        return SamplingParams
    if name == "hf":
        from attnkit.integrations import hf

        return hf
    raise AttributeError(f"module 'attnkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
