"""Tile sizes, rings and registers: pure functions of a layer's shape, each with its reason.

In: head size, group size, page size, and the parts of the score. Out: the frozen constants of a kernel.
Nothing is tuned while serving, and nothing depends on the batch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from attnkit.backends.hopper.config import DecodeConfig, LatentConfig, PrefillConfig, ScoreConfig

HEAD_SIZES = (64, 128, 256)
"""Multiples of a 64-column strip, and powers of two, which register tiles must be."""

PAGE_MULTIPLE = 16
"""Pages hold a multiple of this many keys: smaller boxes would be mostly overhead."""

MAX_GROUP_SIZE = 64
"""Query heads of a KV head fit the 64 rows of a warpgroup's product."""

CODED_CACHE_DTYPES = ("fp8", "fp8_e4m3")
"""Formats whose codes the kernels read; the layer's scales, one or one a KV head, stand beside."""

CACHE_DTYPES = ("auto", "float16", "bfloat16", *CODED_CACHE_DTYPES)

MAX_CODED_GROUP_SIZE = 16
"""Codes become numbers in the registers of a warp, whose products have 16 rows."""

MAX_DECODE_QUERY_LEN = 16
"""Requests with at most this many queries are decoded. A row tile of the prefill kernel has 128 rows or
more, so that with 16 queries it would be mostly empty for groups below 8."""


@functools.cache
def prefill_config(
    head_size: int,
    group_size: int,
    page_size: int | None,
    score: ScoreConfig,
    *,
    scaled: bool = False,
    value_size: int | None = None,
    split: bool = False,
) -> PrefillConfig:
    """Constants of the prefill kernel.

    Args:
        page_size: None: requests' keys lie one after the other.
        value_size: None: `head_size`.
        split: the keys of row tiles are shared out; sinks then join in the end (`merge`).
    """
    if split:
        score = replace(score, sinks=False, lse=True)
    block_n, stages, num_consumers, turns = 128, 2, 2, False
    maxnreg, consumer_registers, producer_registers = 168, 240, 24
    if head_size == 256:
        # The accumulator alone is 128 registers, and shared memory has no room for rings of 128 keys.
        block_n = 64
    elif head_size == 64:
        # A third consumer's products run while the softmax of two takes as long as theirs: 457 TFLOP/s
        # with three and turns, 435 without turns, 436 with two (B1 S16384 32/32, in turns).
        block_n, stages, num_consumers, turns = 64, 4, 3, True
        maxnreg, consumer_registers, producer_registers = 128, 160, 32
    return PrefillConfig(
        score=score,
        head_size=head_size,
        group_size=group_size,
        # Heads side by side leave less of the diagonal's tile unused and fill short row tiles. Other
        # factors of the group would not divide 64 rows.
        pack=math.gcd(group_size, MAX_GROUP_SIZE),
        page_size=page_size or block_n,
        element_bytes=2,
        scaled=scaled,
        block_n=block_n,
        rows=math.gcd(page_size or block_n, block_n),
        stages=stages,
        maxnreg=maxnreg,
        consumer_registers=consumer_registers,
        producer_registers=producer_registers,
        value_size=value_size or head_size,
        ragged=page_size is None,
        num_consumers=num_consumers,
        # A ring of two was 2 to 5 % slower for head size 128 (benchmarks/hopper-notes.md).
        q_stages=1,
        q_in_registers=head_size == 64,
        turns=turns,
        split=split,
    )


def decode_rows(group_size: int, query_len: int) -> int:
    """Rows of a row tile of the decode kernel, for a batch whose longest decode has `query_len` queries.

    A warpgroup's product has 64 rows, however few are used. At head size 64 their exponentials alone
    take what reading the keys does (149 us at B64 ctx 4096 32/8, where warps' products of 16 rows in
    the portable kernel took 134).
    """
    return 16 if query_len << (group_size - 1).bit_length() <= 16 else 64


@functools.cache
def decode_config(
    head_size: int,
    group_size: int,
    page_size: int,
    score: ScoreConfig,
    tile_rows: int,
    *,
    coded: bool = False,
    beside: bool = False,
) -> DecodeConfig:
    """Constants of the decode kernel.

    A K and a V tile together are 32 KiB (64 KiB for head size 256); reading at full speed needs about
    35 KB in flight on each multiprocessor (4.6 TB/s times 1 us over 132).
    """
    # Codes take half of that: with 128 keys a tile 145 us instead of 165 at B64 ctx 4096 32/8, and 42
    # instead of 47 at B8 ctx 8192 (bfloat16 takes 248 and 69).
    block_n = 128 if head_size == 64 or (coded and head_size == 128) else 64
    # Two programs a multiprocessor, so that one's products run while the other waits; head size 256
    # leaves shared memory for one.
    alone = head_size == 256
    maxnreg, producer_registers = (160, 72) if alone else (128, 40)
    return DecodeConfig(
        score=score,
        head_size=head_size,
        group_size=group_size,
        pack=1 << (group_size - 1).bit_length(),
        page_size=page_size,
        element_bytes=1 if coded else 2,
        scaled=coded,
        block_n=block_n,
        rows=math.gcd(page_size, block_n),
        stages=3,
        maxnreg=maxnreg,
        consumer_registers=2 * maxnreg - producer_registers,
        producer_registers=producer_registers,
        tile_rows=tile_rows,
        # Products of a warp read nothing else.
        q_in_registers=not alone or tile_rows == 16,
        beside=beside,
    )


def decode_programs(config: DecodeConfig, num_sms: int) -> int:
    """Programs of the decode kernel: all that run at once."""
    return num_sms if config.head_size == 256 else 2 * num_sms


PREFILL_TILE_US = {64: 0.9, 128: 1.7, 256: 1.6}
"""What a K/V tile takes a multiprocessor in the prefill kernel, by head size: 460, 650 and 700 TFLOP/s
on 132 of them."""

DECODE_BYTES_PER_US = 65e3
"""What a multiprocessor reads in the decode kernel while others prefill: 59 to 71 GB/s seen, on 16 to 24
of them."""

MEMORY_BYTES_PER_US = 4.3e6
"""What all of them read together."""


LATENT_SIZES = ((512, 64),)
"""(latent, rope) columns of a row. Halves of an accumulator of 64 rows are a consumer's registers."""


LATENT_HEAD_SIZES = ((192, 128),)
"""(query and key, value) columns of heads that prompts expand latents to."""


MAX_LATENT_QUERY_LEN = 8
"""Requests with at most this many queries attend to latents; longer ones expand them, which costs each
key once for all queries."""


CHOSEN_CACHE_DTYPES = (*CACHE_DTYPES, "fp8_ds_mla")
"""Formats whose rows are gathered: of these too each has its scales in it."""

CHOSEN_PAGE = 64
"""Rows of a page of gathered ones: a block of the kernels over latents, in one box a strip."""

MAX_CHOSEN_TOKENS = 64
"""Queries whose rows are gathered at once."""

MAX_CHOSEN_BYTES = 160 << 20
"""Of memory for gathered rows; 64 queries of 2,048 take 144 MiB."""


def chosen_tokens(size: int, num_tokens: int) -> int:
    """Queries whose lists of `size` positions are gathered at once, in steps of up to `num_tokens`."""
    bytes_of_list = chosen_pages(size) * CHOSEN_PAGE * 2 * sum(LATENT_SIZES[0])
    room = MAX_CHOSEN_BYTES // bytes_of_list
    return max(1, min(MAX_CHOSEN_TOKENS, num_tokens, room))


def chosen_pages(size: int) -> int:
    """Pages that the rows of a list of `size` positions take."""
    return max(1, -(-size // CHOSEN_PAGE))


SPARE = 6
"""Percent by which shares may grow to end with requests, where that spares a fold: over latents 128 KiB
a piece, which take as long as three K/V tiles; in dense decodes of several queries float32 rows out and
back, and of 64 rows a launch (B64 ctx 4096: 4 queries 253 us, not 258, 8 queries 253, not 265). A single
query's rows are few, and its equal shares are left alone (-1.5 to +1.4 %)."""


def latent_rows(num_heads: int, query_len: int) -> int:
    """Rows of a row tile over latents, for decodes of up to `query_len` queries."""
    return 16 if query_len << (num_heads - 1).bit_length() <= 16 else 64


FEW_ROW_TILES = 16
"""Row tiles of 64 over codes are few where there are so many multiprocessors for each. What a piece
costs beyond its keys counts then, and halves of a row tile halve it: 37.2 us for 57.1 at B1 ctx 32768
H64, 48 for 61.2 at H128; but 232 for 188.7 at B64 ctx 8192 H64."""


def code_rows(num_heads: int, query_len: int, num_reqs: int, num_sms: int) -> int:
    """Likewise over codes, for so many requests.

    At B64 ctx 8192 16 heads take 99.7 us as the 16 rows of a warp's product and 116 as the columns of a
    warpgroup's; 32 heads 131.6 as columns, 163 as two tiles of 16 rows.
    """
    rows = query_len << (num_heads - 1).bit_length()
    if rows <= 32:
        return 16 if rows <= 16 else 32
    tiles = head_tiles(num_heads, 64)
    tokens = 64 >> (num_heads // tiles - 1).bit_length()
    num_tiles = num_reqs * tiles * -(-query_len // tokens)
    return 32 if num_tiles * FEW_ROW_TILES <= num_sms else 64


def head_tiles(num_heads: int, tile_rows: int) -> int:
    """Row tiles that the heads of one token take, all of as many heads."""
    least = -(-num_heads // tile_rows)
    return next(n for n in range(least, num_heads + 1) if num_heads % n == 0)


@functools.cache
def latent_config(
    num_heads: int,
    page_size: int,
    tile_rows: int,
    *,
    lse: bool,
    coded: bool = False,
    scaled: bool = False,
) -> LatentConfig:
    """Constants of the decode kernels over latents.

    Args:
        scaled: numbers count times the layer's scale, as codes always do.

    Two blocks of 64 keys take 144 KiB of shared memory, and Q 72 KiB where it has 64 rows. Of codes so
    do two of 128, for which a warp reads its 16 rows of Q half as often.
    """
    num_tiles = head_tiles(num_heads, tile_rows)
    group_size = num_heads // num_tiles
    block_n = 128 if coded and tile_rows == 16 else 64
    stages = 2
    if tile_rows == 16:
        maxnreg, consumer_registers, producer_registers = 144, 248, 40
    elif not coded:
        maxnreg, consumer_registers, producer_registers = 168, 240, 24
    else:
        # Two warpgroups accumulate, in 128 registers each where rows are 64, and one scores. A fourth
        # block fits beside Q of 32 rows, and cost 1 to 4 %.
        maxnreg, consumer_registers, producer_registers = 128, 176 if tile_rows == 64 else 152, 24
        stages = 3
    return LatentConfig(
        score=ScoreConfig(lse=lse),
        head_size=512,
        rope_size=64,
        head_tiles=num_tiles,
        group_size=group_size,
        pack=1 << (group_size - 1).bit_length(),
        page_size=page_size,
        element_bytes=1 if coded else 2,
        scaled=coded or scaled,
        block_n=block_n,
        rows=math.gcd(page_size, block_n),
        stages=stages,
        maxnreg=maxnreg,
        consumer_registers=consumer_registers,
        producer_registers=producer_registers,
        tile_rows=tile_rows,
    )


def min_decode_tiles(config: DecodeConfig) -> int:
    """Least K/V tiles of a program's share: below it the folding of states costs more than the reading.

    Codes of 128 keys take as long as numbers of 64 and more, since they are converted.
    """
    return 1 if config.element_bytes == 1 and config.block_n == 128 else 2


ROW_TILE_COST = 1.5
"""Cost of a row tile beyond its K/V tiles, in K/V tiles: start, epilogue and the ends of the pipeline.
Fitted times of 2 to 3 us beside 1.78 us a K/V tile (head size 128)."""

MERGE_COST = 3.0
"""Cost of merging splits, likewise: a launch, and float32 rows out to memory and back."""

L2_SECTION_BYTES = 16 << 20
"""Keys and values that are worked on together should stay in the L2 cache of 60 MB, whose halves each
keep a copy of what both sides read. 8 to 32 MiB measured alike; without sections 1,024-token prompts
ran 20 % slower."""
