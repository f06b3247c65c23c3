"""Queries that grow with their position (Llama 4's layers without rotary positions).

In: an attention module that counts positions by the rows of its batch, which in a packed stream are
those of other requests too. Out: `QueryTemperature`, the factor that it would put on each query; while
`left_to_us`, the module leaves it out, and the layer applies it by the positions of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_SWITCH = "attn_temperature_tuning"
_FACTS = ("attn_scale", "floor_scale", "use_rope")


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """1 + scale * log(1 + floor((position + 1) / floor_scale)), after arXiv 2501.19399.

    Attributes:
        scale: 0: none.
        floor_scale: positions in a step.
    """

    scale: float
    floor_scale: float

    def apply(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The query with its factor.

        Args:
            query: (num_tokens, num_heads, head_size).
            positions: int (num_tokens,); below 0 is padding, whose factor is 1.
        """
        steps = torch.floor((positions.clamp(min=-1) + 1).float() / self.floor_scale)
        factor = torch.log1p(steps) * self.scale + 1
        return (query * factor[:, None, None]).to(query.dtype)


def temperature_of(module: nn.Module) -> QueryTemperature | None:
    """What an attention module puts on its queries by itself; None: nothing."""
    own: Any = module
    if not getattr(module, _SWITCH, False) or not all(hasattr(module, name) for name in _FACTS):
        return None
    if own.use_rope:
        return None
    return QueryTemperature(float(own.attn_scale), float(own.floor_scale))


def leave_to_us(module: nn.Module) -> None:
    """Let the module leave its factor out, until `take_back`."""
    setattr(module, _SWITCH, False)


def take_back(module: nn.Module) -> None:
    """Undo `leave_to_us`."""
    setattr(module, _SWITCH, True)


@contextmanager
def left_to_us(model: nn.Module) -> Iterator[dict[nn.Module, QueryTemperature]]:
    """In the body no module of `model` applies a factor; those that would, and which."""
    found = {m: t for m in model.modules() if (t := temperature_of(m)) is not None}
    for module in found:
        leave_to_us(module)
    try:
        yield found
    finally:
        for module in found:
            take_back(module)
