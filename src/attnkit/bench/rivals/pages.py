"""Pages as rivals want to see them.

In: the inputs of a workload. Out: K and V as (num_blocks, block_size, num_kv_heads, head_size), either
views of the very pages our backends read, or a copy in the order that libraries document; and whether
a library can be imported at all.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from attnkit.bench.contender import NotInstalled, Refused
from attnkit.bench.inputs import Inputs


def shared_pages(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Strided views of the pages that exist already; no copy."""
    refuse_coded(inputs)
    by_token = inputs.pages(inputs.any_layout).transpose(1, 2)
    k, v = by_token.split(inputs.workload.head_size, dim=-1)
    return k, v


def own_pages(inputs: Inputs) -> torch.Tensor:
    """A copy, contiguous (num_blocks, 2, block_size, num_kv_heads, head_size)."""
    return torch.stack(shared_pages(inputs), dim=1)


def refuse_coded(inputs: Inputs) -> None:
    """Raise `Refused` if pages are in a format that has no plain elements."""
    if not inputs.plain_format:
        raise Refused(f"no pages of format {inputs.workload.kv_cache_dtype} are made for rivals")


def need(device_type: str, inputs: Inputs, *modules: str) -> ModuleType:
    """The first of these modules that is installed, on the device it needs.

    Raises:
        NotInstalled: none is, or the inputs are on another device. A module that is there but breaks
            at import raises its own error.
    """
    if inputs.device.type != device_type:
        raise NotInstalled(f"needs a {device_type.upper()} device")
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name is None or not (
                name == missing.name or name.startswith(missing.name + ".")
            ):
                raise
    raise NotInstalled(f"{' or '.join(modules)} is not installed")
