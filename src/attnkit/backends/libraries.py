"""What adapters to installed libraries share: is it there, pages as it reads them, its LSE as ours.

In: names of modules; our cache; what a library returned. Out: an answer for selection; views of the
cache without a copy; output and LSE as docs/semantics.md has them. Nothing is imported before it runs.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import torch

from attnkit.contract import AttentionType, AttentionVariant, CommonAttentionMetadata
from attnkit.errors import BatchError, UnsupportedConfiguration


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing the packages it lies in."""
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not below:
        return spec is not None
    places = [Path(folder, *below) for folder in spec.submodule_search_locations or ()]
    return any(p.with_suffix(".py").is_file() or (p / "__init__.py").is_file() for p in places)


def token_pages(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a plain cache as views, tokens before heads: (num_blocks, block_size, num_kv_heads,
    size)."""
    by_token = kv_cache.transpose(1, 2)
    return by_token[..., :head_size], by_token[..., head_size:]


def plain_cache_refusal(kv_cache_dtype: str | None, dtype: torch.dtype) -> str | None:
    """Why a library that reads keys in the dtype of the queries does not read such a cache; None: it
    does."""
    name = str(dtype).removeprefix("torch.")
    if kv_cache_dtype in (None, "auto", name):
        return None
    return f"KV cache dtype {kv_cache_dtype} differs from the layer's {name}"


def expect_causal(batch: CommonAttentionMetadata, backend: str) -> None:
    """Refuse a batch for a backend that does causal ones alone.

    Raises:
        BatchError: some request is not causal.
    """
    if batch.causal is not True:
        raise BatchError(
            f"the batch has causal={batch.causal}, and {backend} does causal batches only; name a "
            "backend that does others (attnkit backends)"
        )


def expect_plain_decoder(variant: AttentionVariant, backend: str) -> None:
    """Refuse a layer for a backend whose masks are causal and no more.

    Raises:
        UnsupportedConfiguration: it has a window or ALiBi, or is no decoder.
    """
    others = {
        "sliding window": variant.sliding_window is not None,
        "ALiBi": variant.alibi_slopes is not None,
        f"attention type {variant.attn_type}": variant.attn_type is not AttentionType.DECODER,
    }
    for name in (name for name, given in others.items() if given):
        reason = f"{name} is asked for, which this backend does not do"
        raise UnsupportedConfiguration(f"{backend}: {reason}", (reason,))


def natural_from_base_2(lse: torch.Tensor) -> torch.Tensor:
    """An LSE of base 2 as one of base e."""
    return lse * math.log(2)


def without_keys_minus_infinity(lse: torch.Tensor) -> torch.Tensor:
    """An LSE that is plus infinity where a row sees no key, as one that is minus infinity there."""
    return torch.where(lse == math.inf, -math.inf, lse)


def join_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE with one more logit per head in the denominator, of a call that knew none.

    Args:
        out: (num_tokens, num_heads, head_size_v).
        lse: float32 (num_tokens, num_heads), natural.
        sinks: (num_heads,).

    Returns:
        Both in float32.
    """
    total = torch.logaddexp(lse, sinks.float())
    share = torch.where(torch.isinf(lse), 0.0, torch.exp(lse - total))
    return out.float() * share[..., None], total
