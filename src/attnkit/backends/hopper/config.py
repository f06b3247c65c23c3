"""What a kernel is compiled for: one frozen value per kernel, made by `tuning` and read on the device.

In: nothing. Out: `PrefillConfig`, `DecodeConfig` and `LatentConfig`, passed to the kernels as a single
constant each. Equal values share a compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """Which parts of a layer's score and mask a kernel has; the numbers come at run time.

    Attributes:
        linear: a score is q.k times one positive factor, which the softmax applies.
        soft_cap: scores go through cap * tanh(score / cap).
        alibi: 0 none, 1 slope * distance, 2 the square-root form.
        window: queries see a window of keys only.
        sinks: each head has one more logit in its denominator.
        lse: the log-sum-exp of each row is written.
    """

    linear: bool = True
    soft_cap: bool = False
    alibi: int = 0
    window: bool = False
    sinks: bool = False
    lse: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """What both kernels are compiled for.

    Attributes:
        score: see there.
        head_size: 64, 128 or 256.
        group_size: query heads per KV head.
        pack: rows of a tile that a query token takes: heads of one group side by side. A power of two.
        page_size: keys in a page.
        element_bytes: of an element of the pages: 2, or 1 where they hold float8_e4m3fn codes.
        scaled: keys and values count times the layer's scales.
        block_n: keys in a tile, a power of two.
        rows: keys in a box, the most that divide page and tile.
        stages: K and V tiles in a ring, each; for prefill a power of two.
        maxnreg: registers of a thread before roles trade them.
        consumer_registers: of a thread of a consumer, after that.
        producer_registers: of a thread of a producer.
    """

    score: ScoreConfig
    head_size: int
    group_size: int
    pack: int
    page_size: int
    element_bytes: int
    scaled: bool
    block_n: int
    rows: int
    stages: int
    maxnreg: int
    consumer_registers: int
    producer_registers: int

    @property
    def strip(self) -> int:
        """Columns of a box: 128 bytes, the widest a swizzled copy can be, or all."""
        return min(self.head_size, 128 // self.element_bytes)


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(KernelConfig):
    """What the prefill kernel is compiled for.

    Attributes:
        head_size: of queries and keys: 64, 128, 192 or 256.
        value_size: of values and outputs, a power of two.
        ragged: a request's keys lie one after the other from some row on; there are no pages.
        num_consumers: warpgroups that attend, of 64 rows each.
        q_stages: row tiles of Q in a ring, 1 or 2; with 2 the next one's Q is there when it begins.
        q_in_registers: Q is read out of shared memory once a row tile, not by each product.
        turns: consumers issue their products one after the other.
        split: the keys of a row tile are shared out among programs. Each leaves its rows in float32, and
            their LSE, for `merge`.
    """

    value_size: int
    ragged: bool
    num_consumers: int
    q_stages: int
    q_in_registers: bool
    turns: bool
    split: bool

    @property
    def tokens(self) -> int:
        """Of a full row tile."""
        return 64 * self.num_consumers // self.pack

    @property
    def values(self) -> PrefillConfig:
        """Of V tiles."""
        return replace(self, head_size=self.value_size)

    @property
    def parts(self) -> int:
        """Matrices that a K tile, or 64 rows of Q, are kept as: their columns are a power of two."""
        is_power = self.head_size & (self.head_size - 1) == 0
        return 1 if is_power else self.head_size // self.strip


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(KernelConfig):
    """What the decode kernel is compiled for; `pack` is the group size rounded up.

    Attributes:
        tile_rows: of a row tile: 64 for products of a warpgroup (wgmma), 16 for products of a warp.
        q_in_registers: Q is read out of shared memory at once, so that the next piece's can follow after
            the first product.
        beside: it starts while the prefill kernel before it runs, and ends after it.
    """

    tile_rows: int
    q_in_registers: bool
    beside: bool


@dataclass(frozen=True, kw_only=True)
class LatentConfig(KernelConfig):
    """What the decode kernels over latents are compiled for. All query heads share one row of the cache.

    Attributes:
        head_size: columns of a latent, which are the output's too.
        rope_size: columns behind them, which scores have and values have not.
        head_tiles: row tiles that the heads of one token take.
        tile_rows: of a row tile: tokens times `pack` of the heads; 16 in the narrow kernel, 32 or 64 in
            that of codes, else 64.
    """

    rope_size: int
    head_tiles: int
    tile_rows: int

    @property
    def scorer_registers(self) -> int:
        """Of a thread of the warpgroup that scores codes, beside two that accumulate."""
        return 4 * self.maxnreg - 2 * self.consumer_registers - self.producer_registers

    @property
    def strip(self) -> int:
        """Columns of a box: those behind a latent, of which it has eight times as many."""
        return self.rope_size

    @property
    def plan_block_n(self) -> int:
        """Keys in a tile of the plan: a block, or one for each of the consumers that score."""
        return self.block_n * (2 if self.tile_rows == 64 and self.element_bytes == 2 else 1)

    @property
    def row(self) -> LatentConfig:
        """Of whole rows of the cache."""
        return replace(self, head_size=self.head_size + self.rope_size)

    @property
    def half(self) -> LatentConfig:
        """Of the columns that one consumer accumulates."""
        return replace(self, head_size=self.head_size // 2)

    @property
    def quarter(self) -> LatentConfig:
        """Of the columns that are waited for together where a block is scored."""
        return replace(self, head_size=self.head_size // 4)

    @property
    def rope(self) -> LatentConfig:
        """Of the columns behind the latent."""
        return replace(self, head_size=self.rope_size)
