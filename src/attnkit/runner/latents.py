"""Where a transformers model expands latents (MLA), and the proof that we know what it does there.

In: the modules of a probing run. Out: `LatentFacts` of layers whose keys and values are their latents
through `kv_b_proj` and nothing else; these can keep the latents instead. The seam is the method
`expand_kv` of an attention module, which gets the normed latent and the rotated part of every token as
heads of their own; a layer that keeps latents hands both on as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnkit.contract import MLADimensions
from attnkit.mla.projection import KvBProjection

_SEAM = "expand_kv"
_PROJECTION = "kv_b_proj"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentFacts:
    """What `attnkit.MLAAttention` asks beside what every layer has.

    Attributes:
        dimensions: of latents and heads.
        kv_b_proj: the model's module.
    """

    dimensions: MLADimensions
    kv_b_proj: nn.Module


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """One call of the seam: latent [1, 1, T, kv_lora_rank], rotated part [1, 1, T, qk_rope_head_dim]
    and what became of them, [1, num_heads, T, size] each."""

    latent: torch.Tensor
    rotated: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@contextmanager
def recording_expansions(model: nn.Module) -> Iterator[dict[nn.Module, Expansion]]:
    """Calls of the seam in the body, by module."""
    found: dict[nn.Module, Expansion] = {}
    watched = [m for m in model.modules() if _has_seam(m)]

    def watch(module: nn.Module) -> None:
        expand: Any = getattr(module, _SEAM)

        def watched_expand(
            latent: torch.Tensor, rotated: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = expand(latent, rotated)
            found[module] = Expansion(latent, rotated, key, value)
            return key, value

        object.__setattr__(module, _SEAM, watched_expand)

    try:
        for module in watched:
            watch(module)
        yield found
    finally:
        for module in watched:
            expand_again(module)


def latent_facts(
    module: nn.Module, expansion: Expansion | None, key: torch.Tensor, value: torch.Tensor
) -> LatentFacts | None:
    """Of a layer; None where it has no latents, or does more with them than `kv_b_proj` says.

    Args:
        module: the attention module.
        expansion: its call of the seam in the probing run; None: there was none.
        key, value: what it then gave to attention.
    """
    if expansion is None or key is not expansion.key or value is not expansion.value:
        return None
    kv_b_proj: nn.Module = getattr(module, _PROJECTION)
    if getattr(kv_b_proj, "bias", None) is not None:
        return None
    rope = expansion.rotated.shape[-1]
    dimensions = MLADimensions(
        kv_lora_rank=expansion.latent.shape[-1],
        qk_nope_head_dim=key.shape[-1] - rope,
        qk_rope_head_dim=rope,
        v_head_dim=value.shape[-1],
    )
    projection = KvBProjection(kv_b_proj, key.shape[1], dimensions, key.dtype, key.device)
    ours = projection.expand(expansion.latent[0, 0], expansion.rotated[0, 0])
    for mine, theirs in zip(ours, (key, value), strict=True):
        # A few roundings of the dtype: the products are the same, their order may not be.
        limit = max(1e-4, 4 * torch.finfo(key.dtype).eps) * theirs.abs().max()
        if not bool(((mine.transpose(0, 1) - theirs[0]).abs() <= limit).all()):
            return None
    return LatentFacts(dimensions=dimensions, kv_b_proj=kv_b_proj)


def keep_latents(module: nn.Module) -> None:
    """Let the seam hand latents on, until `expand_again`."""
    object.__setattr__(module, _SEAM, _as_they_are)


def expand_again(module: nn.Module) -> None:
    """Undo `keep_latents`; nothing happens where it was not called."""
    module.__dict__.pop(_SEAM, None)


def _as_they_are(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rotated


def _has_seam(module: nn.Module) -> bool:
    return hasattr(type(module), _SEAM) and isinstance(
        getattr(module, _PROJECTION, None), nn.Module
    )
