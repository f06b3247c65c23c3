"""Where a model runs and how much memory its pages get.

In: what the user said about device and cache, and what the machine has. Out: a torch device and a
number of pages.
"""

from __future__ import annotations

import os

import torch

from attnkit.contract import DeviceCapability
from attnkit.runner.model import PackedModel

_CPU_CACHE_LIMIT = 4 << 30
_CUDA_CACHE_SHARE = 0.85
"""Of the memory that is free once the weights are there; the rest is for activations."""


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device that was asked for; None: a GPU if there is one.

    Raises:
        ConfigurationError: there is no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    DeviceCapability.of(device)
    return torch.device(device)


def choose_num_blocks(
    packed: PackedModel,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    """Pages to allocate: as asked, else what the memory allows, but no more than could be used."""
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
