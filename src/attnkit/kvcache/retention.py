"""Retention: which tokens a group of layers can still see, and so which of its pages are needed.

In: a window, chunks or nothing, in tokens; a request's lengths. Out: numbers and indices of its blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnkit.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which tokens a group of layers can still see, and so which pages it needs.

    Attributes:
        block_size: tokens in a block of this group.
        sliding_window: keys a query sees, itself included; None: no window.
        attention_chunk_size: a query sees its own chunk, position // attention_chunk_size, alone;
            None: no chunks.
        keeps_prefix: the window leaves each request's prefix visible (R-SWA).
        follows_encoder: its pages hold the encoder's output (cross attention): all of a request's from
            its first step on, and no more later.
    """

    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    keeps_prefix: bool = False
    follows_encoder: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "sliding_window", "attention_chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} {value} is not allowed; give at least 1")
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ConfigurationError(
                f"sliding_window {self.sliding_window} and attention_chunk_size "
                f"{self.attention_chunk_size} exclude each other; give one"
            )
        if self.keeps_prefix and self.sliding_window is None:
            raise ConfigurationError("keeps_prefix is about a window; give sliding_window too")

    @property
    def is_full(self) -> bool:
        """Every page is needed to the end."""
        return self.sliding_window is None and self.attention_chunk_size is None

    def first_block(self, position: int) -> int:
        """Index of the first block that a query at `position` or later can see, those of a prefix
        aside. Never decreases."""
        if self.sliding_window is not None:
            return max(0, position - self.sliding_window + 1) // self.block_size
        if self.attention_chunk_size is not None:
            return (
                position // self.attention_chunk_size * self.attention_chunk_size // self.block_size
            )
        return 0

    def num_kept(self, prefix_len: int) -> int:
        """First blocks that all later queries see of a request with such a prefix."""
        return _ceil_div(prefix_len, self.block_size) if self.keeps_prefix else 0

    def num_blocks(self, num_tokens: int, encoder_len: int) -> int:
        """Blocks up to `num_tokens` tokens, of a request with so many encoder tokens."""
        return _ceil_div(encoder_len if self.follows_encoder else num_tokens, self.block_size)

    def max_blocks(self, num_tokens: int, max_query_len: int, encoder_len: int = 0) -> int:
        """Most blocks held at once by a request that grows to `num_tokens`, whatever its prefix.

        Args:
            max_query_len: most tokens computed in one step.
            encoder_len: its encoder tokens.
        """
        total = self.num_blocks(num_tokens, encoder_len)
        if self.is_full or self.keeps_prefix:
            return total
        # Tokens from the first one that a step's first query sees to the step's last one.
        span = (self.sliding_window or self.attention_chunk_size or 0) - 1 + max_query_len
        # The first may lie anywhere in a block, but for chunks only where a chunk can begin.
        granule = math.gcd(self.attention_chunk_size or 1, self.block_size)
        return min(total, _ceil_div(self.block_size - granule + span, self.block_size))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
