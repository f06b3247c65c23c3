"""ImageTokens: the vectors that stand for image tokens of a prompt.

In: positions and vectors, once, from `images`. Out: those of a stretch of the prompt, for each step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ImageTokens:
    """What the model puts in the place of some tokens' embeddings.

    Attributes:
        positions: of these tokens in their prompt, in order.
        vectors: (len(positions), hidden_size), on the model's device.
    """

    positions: tuple[int, ...]
    vectors: torch.Tensor

    def between(self, start: int, end: int) -> ImageTokens | None:
        """Those at positions from `start` to `end`, the latter outside; None: there are none."""
        some = slice(bisect_left(self.positions, start), bisect_left(self.positions, end))
        if some.start == some.stop:
            return None
        return ImageTokens(self.positions[some], self.vectors[some])
