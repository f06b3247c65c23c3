"""Numbers that are hard to encode, for tests of every writer of quantised caches."""

from __future__ import annotations

import torch


def hard_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """(at least 14, heads, size): any bit patterns in every other vector; in the rest numbers of all
    magnitudes, ties, zeros of both signs, denormals, one NaN, infinity."""
    g = torch.Generator().manual_seed(seed)
    wild = torch.randint(-(2**31), 2**31, shape, generator=g).to(torch.int32).view(torch.float32)
    x = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-24, 12, shape, generator=g)
    x[::2] = wild[::2]
    x[1::8] = torch.randn(x[1::8].shape, generator=g)
    x[3::8] = torch.round(x[3::8] * 8) / 16
    x[5], x[7], x[9] = 0.0, -0.0, 1e-41
    x[11, 0, 3], x[13] = torch.nan, torch.inf
    return x.to(dtype)
