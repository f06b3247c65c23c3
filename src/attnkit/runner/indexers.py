"""Where a transformers model chooses keys (sparse attention), and the proof that we know how.

In: the modules of a probing run. Out: `IndexerFacts` of indexers that rank keys as ours does
(DeepSeek-V3.2); and `index_inputs`, the queries, keys and weights of such an indexer from the model's
own projections. The seam is the indexer's `forward`, whose result nothing but the attention function
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnkit.contract import AttentionBackend
from attnkit.indexer import LightningIndexer
from attnkit.mla.index_kernels import index_scores
from attnkit.mla.sparse import SparseLatentImpl
from attnkit.selection import find_named

_PARTS = ("wq_b", "wk", "k_norm", "weights_proj")
_SIZES = ("n_heads", "head_dim", "index_topk")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexerFacts:
    """What `attnkit.indexer.LightningIndexer` asks.

    Attributes:
        module: the model's indexer.
        num_heads, head_size: of its queries.
        topk_tokens: keys that a query attends to at most.
    """

    module: nn.Module
    num_heads: int
    head_size: int
    topk_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One call of the seam: hidden states [1, T, hidden_size], compressed queries [1, T, q_lora_rank],
    cosines and sines [1, T, rope], and the chosen positions [1, T, k], best first."""

    hidden_states: torch.Tensor
    q_resid: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]
    chosen: torch.Tensor


@contextmanager
def recording_choices(model: nn.Module) -> Iterator[dict[nn.Module, Choice]]:
    """Calls of the seam in the body, by attention module."""
    found: dict[nn.Module, Choice] = {}
    watched = [m for m in model.modules() if isinstance(getattr(m, "indexer", None), nn.Module)]

    def watch(module: Any) -> None:
        choose = module.indexer.forward

        def watched_choose(
            hidden_states: Any, q_resid: Any, rotation: Any, *rest: Any, **more: Any
        ) -> Any:
            chosen = choose(hidden_states, q_resid, rotation, *rest, **more)
            found[module] = Choice(hidden_states, q_resid, rotation, chosen)
            return chosen

        choose_instead(module.indexer, watched_choose)

    try:
        for module in watched:
            watch(module)
        yield found
    finally:
        for module in watched:
            choose_again(module.indexer)  # type: ignore[arg-type]


def indexer_facts(module: nn.Module, choice: Choice | None) -> IndexerFacts | None:
    """Of an attention module; None where it has no indexer, or one that ranks keys otherwise.

    Args:
        module: the attention module.
        choice: its call of the seam in the probing run, without a mask; None: there was none.
    """
    indexer: Any = getattr(module, "indexer", None)
    if choice is None or not all(hasattr(indexer, name) for name in (*_PARTS, *_SIZES)):
        return None
    q, k, weights = index_inputs(indexer, choice.hidden_states, choice.q_resid, choice.rotation)
    ours = index_scores(q, k, weights)
    theirs = ours.gather(1, choice.chosen[0].long())
    best = ours.sort(dim=1, descending=True)[0][:, : theirs.shape[1]]
    # Their order, in our scores, is ours: but for a few roundings of the dtype.
    limit = max(1e-4, 4 * torch.finfo(q.dtype).eps) * ours.abs().max()
    if theirs.shape[1] != min(indexer.index_topk, len(ours)) or bool(
        ((theirs - best).abs() > limit).any()
    ):
        return None
    return IndexerFacts(
        module=indexer,
        num_heads=indexer.n_heads,
        head_size=indexer.head_dim,
        topk_tokens=indexer.index_topk,
    )


def make_indexer(
    name: str,
    facts: IndexerFacts,
    lists: torch.Tensor,
    *,
    kv_cache_dtype: str,
    dtype: torch.dtype,
    block_size: int,
    backend: str | type[AttentionBackend],
) -> LightningIndexer:
    """Ours in the place of a model's.

    Args:
        name: key of its cache.
        facts: of the model's.
        lists: int32 (most tokens of a step, topk_tokens), where it runs.
        kv_cache_dtype: what keys are stored as.
        dtype: of keys that are stored plainly, as transformers' models compute them.
        block_size: tokens in a block of the layer that it serves.
        backend: of that layer, as the user named it; one of ours says which kernels go with it.

    Raises:
        BackendError: there is no such backend.
    """
    named = find_named(backend, here=False)
    impl = None if named is None else named.get_impl_cls()
    kernels = "auto"
    if impl is not None and issubclass(impl, SparseLatentImpl):
        kernels = impl.index_backend
    return LightningIndexer(
        facts.num_heads,
        facts.head_size,
        facts.topk_tokens,
        max_num_batched_tokens=lists.shape[0],
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        device=lists.device,
        layer_name=name,
        block_size=block_size,
        backend=kernels,
        topk_indices_buffer=lists,
    )


@torch.no_grad()
def index_inputs(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `LightningIndexer.choose` takes, from the model's projections.

    Args:
        indexer: of the model.
        hidden_states: [B, T, hidden_size].
        q_resid: [B, T, q_lora_rank], the compressed queries.
        rotation: cosines and sines, [B or 1, T, rope] each.

    Returns:
        Queries (B * T, num_heads, head_size) and keys (B * T, head_size), their first `rope` numbers
        rotated, and weights (B * T, num_heads), float32, with the scale of the scores.
    """
    num_heads, head_size = indexer.n_heads, indexer.head_dim
    q = indexer.wq_b(q_resid).unflatten(-1, (num_heads, head_size))
    k = indexer.k_norm(indexer.wk(hidden_states))
    cos, sin = rotation
    q, k = _rotated(q, cos[..., None, :], sin[..., None, :]), _rotated(k, cos, sin)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    scale = head_size**-0.5 * num_heads**-0.5
    return q.flatten(0, 1), k.flatten(0, 1), weights.flatten(0, 1) * scale


def choose_instead(indexer: nn.Module, forward: Callable[..., Any]) -> None:
    """Let `forward` choose in the model's place, until `choose_again`."""
    object.__setattr__(indexer, "forward", forward)


def choose_again(indexer: nn.Module) -> None:
    """Undo `choose_instead`; nothing happens where it was not called."""
    indexer.__dict__.pop("forward", None)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of the first numbers, whose halves are the pairs' parts."""
    pairs, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = pairs.chunk(2, dim=-1)
    return torch.cat([pairs * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)
