"""Where a model runs and how much memory its pages get.

In: what the user said about device and cache, and what the machine has. Out: a torch device and a
number of pages.
"""

from __future__ import annotations

import os

import torch

from attnkit.errors import ConfigurationError
from attnkit.runner.model import PackedModel

_CPU_CACHE_LIMIT = 4 << 30
_CUDA_CACHE_SHARE = 0.85
"""Of the memory that is free once the weights are there; the rest is for activations."""


def choose_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device {device!r} is not known; use cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device {device!r} is not supported; use cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"device {device!r} was asked for but torch sees no GPU; use device='cpu', or install "
            "torch with CUDA"
        )
    return chosen


def choose_num_blocks(
    packed: PackedModel,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    """Pages to allocate: as asked, else what the memory allows, but no more than could be used."""
    if num_blocks is not None and kv_cache_bytes is not None:
        raise ConfigurationError(
            f"both num_blocks {num_blocks} and kv_cache_bytes {kv_cache_bytes} were given; give one"
        )
    plan = packed.kv_plan
    if num_blocks is not None:
        return num_blocks
    if kv_cache_bytes is not None:
        return plan.num_blocks(kv_cache_bytes)
    most = 1 + max_num_seqs * plan.max_blocks_per_request(
        packed.max_model_len, max_num_batched_tokens
    )
    return max(2, min(plan.num_blocks(_default_cache_bytes(packed.device)), most))


def _default_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_CACHE_SHARE)
    if not hasattr(os, "sysconf"):  # not a POSIX system
        return _CPU_CACHE_LIMIT // 4
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_CPU_CACHE_LIMIT, machine // 4)
