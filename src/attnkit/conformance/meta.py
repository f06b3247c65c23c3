"""Tensors without memory.

In: a shape and a dtype. Out: a tensor that launchers make calls of, to be compiled for a GPU that need
not be here.
"""

from __future__ import annotations

import torch


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape, on no device."""
    return torch.empty(shape, dtype=dtype, device="meta")
