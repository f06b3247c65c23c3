"""Rivals: what people would use instead, measured on the same numbers.

In: names, or "all". Out: contenders. One file a library, imported when a name of it is asked for;
the library itself is imported when a workload is prepared, so what is missing is a note in the
record and nothing more.

`-own` after a name: pages copied into the layout that the library documents, for the case that our
pages do not suit it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

from attnkit.bench.contender import Contender
from attnkit.errors import ConfigurationError

_HERE = "attnkit.bench.rivals"
RIVALS: Mapping[str, str] = {
    "sdpa": f"{_HERE}.sdpa:SDPA",
    "sdpa-gqa": f"{_HERE}.sdpa:SDPA_GQA",
    "sdpa-cudnn": f"{_HERE}.sdpa:SDPA_CUDNN",
    "sdpa-flash": f"{_HERE}.sdpa:SDPA_FLASH",
    "fa3": f"{_HERE}.flash_attention:FA3",
    "fa3-own": f"{_HERE}.flash_attention:FA3_OWN",
    "fa3-dense": f"{_HERE}.flash_attention:FA3_DENSE",
    "fa2": f"{_HERE}.flash_attention:FA2",
    "flashinfer": f"{_HERE}.flashinfer:FLASHINFER",
    "flashinfer-own": f"{_HERE}.flashinfer:FLASHINFER_OWN",
    "flashinfer-fa2": f"{_HERE}.flashinfer:FLASHINFER_FA2",
    "vllm-triton": f"{_HERE}.vllm:VLLM_TRITON",
    "vllm-cpu": f"{_HERE}.vllm:VLLM_CPU",
    "torch-write": f"{_HERE}.sdpa:TORCH_WRITE",
}
"""Name -> "module:CONSTANT"."""


def rivals(names: str) -> list[Contender]:
    """The rivals that were asked for.

    Args:
        names: "all", "none", or names with commas between.

    Raises:
        ConfigurationError: a name is not known.
    """
    if names == "none":
        return []
    wanted = list(RIVALS) if names == "all" else [n.strip() for n in names.split(",") if n.strip()]
    unknown = [name for name in wanted if name not in RIVALS]
    if unknown:
        raise ConfigurationError(
            f"no rival is called {', '.join(unknown)}; use all, none, or some of {', '.join(RIVALS)}"
        )
    return [_load(RIVALS[name]) for name in wanted]


def _load(path: str) -> Contender:
    module, _, constant = path.partition(":")
    return cast(Contender, getattr(importlib.import_module(module), constant))
