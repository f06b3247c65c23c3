"""Tile sizes and split counts: pure functions of a layer's shape and a device's size.

In: head sizes, element sizes, rows, a `Gpu`. Out: frozen configs that `launch` turns into kernel
constants. Nothing is tuned while serving.

A config depends on the layer and the device, never on the batch, so that a request's bits do not
depend on its batch mates. Times in the comments are of an H200, bf16, pages of 16 (all of them are in
`benchmarks/triton-tiles-h200-*.jsonl`, by `benchmarks/triton_sweep.py`); registers are those of the
sm_90 build by Triton 3.6 (`attnkit.conformance.compile` reports them).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What tile sizes depend on.

    Attributes:
        num_sms: multiprocessors.
        shared_memory: bytes a program can have.
        has_wgmma: matrix products read shared memory themselves (sm_90, sm_100), so every stage is a
            buffer; elsewhere they read registers, and the stage in use needs none.
        has_e4m3: float8_e4m3fn is a type of the device (from sm_89 on).
    """

    num_sms: int
    shared_memory: int
    has_wgmma: bool
    has_e4m3: bool = True


HOPPER = Gpu(num_sms=132, shared_memory=232448, has_wgmma=True)
"""H100 and H200 (SXM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """Tile of a kernel.

    Attributes:
        block_m: query rows (tokens times heads of a group), a power of two, at least 16.
        block_n: keys, a power of two, at least 16.
        num_warps: of a program.
        num_stages: K/V tiles in flight, the one in use included.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(KernelConfig):
    """Tile of the decode kernel, and how a context is cut into segments.

    A segment ends with a fold of two states and, if programs share the request, a store of one: 2 KB
    against the 128 KB that K and V of 256 keys of a head of 128 are. On an H200 segments of 512 cost
    nothing measurable against 1024 (B64 at 4096 keys: 241 us both).

    Attributes:
        segment: keys in a segment, a multiple of block_n.
        max_segments: longer contexts get longer segments instead of more. One request of 32k keys and
            8 KV heads needs 64 to fill an H200. One with one KV head (MQA) has 64 programs at most, on
            64 of its 132 multiprocessors; what that costs has not been timed.
    """

    segment: int = 256
    max_segments: int = 64


_Config = TypeVar("_Config", bound=KernelConfig)


@functools.cache
def attention_config(
    head_size: int, head_size_v: int, itemsize: int, kv_itemsize: int, gpu: Gpu
) -> KernelConfig:
    """Tile of the attention kernel.

    Args:
        head_size: of queries and keys.
        head_size_v: of values.
        itemsize: bytes of a query element.
        kv_itemsize: bytes of a K/V element.
        gpu: where it runs.
    """
    size = padded(max(head_size, head_size_v))
    if itemsize == 4:
        # float32 products run on the plain units, operands in registers: larger tiles spill, and so
        # does a second stage of codes, which waits there for its conversion.
        stages = 1 if kv_itemsize == 1 else 2
        if size <= 64:
            config = KernelConfig(block_m=64, block_n=32, num_warps=8, num_stages=stages)
        elif size <= 256:
            config = KernelConfig(block_m=32, block_n=16, num_warps=8, num_stages=stages)
        else:
            config = KernelConfig(block_m=16, block_n=16, num_warps=8, num_stages=stages)
    elif padded(head_size) <= 256 and padded(head_size_v) <= 128:
        # TFLOP/s at B4 x 4096, 32/8 heads of 128: 360; two stages 316 (a tile's K and V take longer to
        # come than its products to compute), 128 keys 343, 64 rows 320 (they read K and V from L2
        # twice as often). 16384 tokens, 32 heads of 64: 371; 128 keys 306, 64 rows 335.
        # Codes that are converted in registers leave room for 32 keys.
        keys = 32 if kv_itemsize == 1 and not gpu.has_wgmma else 64
        config = KernelConfig(block_m=128, block_n=keys, num_warps=8, num_stages=3)
    elif size <= 256 and gpu.has_wgmma and kv_itemsize == itemsize:
        # TFLOP/s at 16384 tokens, 8 heads of 256: 483; 32 keys and three stages 391, 64 rows 326. Two
        # words of it spill.
        config = KernelConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
    elif size <= 256:
        # 128 rows spill where operands come from registers: without wgmma, or converted from a cache of
        # another dtype.
        config = KernelConfig(block_m=64, block_n=32, num_warps=8, num_stages=3)
    else:
        # 184 registers; 64 rows spill.
        config = KernelConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)
    columns, columns_v = padded(head_size), padded(head_size_v)
    return _fit(config, columns, columns + columns_v, itemsize, kv_itemsize, gpu)


@functools.cache
def decode_config(
    head_size: int, head_size_v: int, itemsize: int, kv_itemsize: int, rows: int, gpu: Gpu
) -> DecodeConfig:
    """Tile of the decode kernel.

    Args:
        head_size: of queries and keys.
        head_size_v: of values.
        itemsize: bytes of a query element.
        kv_itemsize: bytes of a K/V element.
        rows: query rows of a request and KV head, at most: queries times group size.
        gpu: where it runs.
    """
    size = padded(max(head_size, head_size_v))
    if itemsize == 4:
        keys = 32 if size <= 256 else 16
        stages = 1 if kv_itemsize == 1 else 2  # As in `attention_config`.
        config = DecodeConfig(block_m=16, block_n=keys, num_warps=8, num_stages=stages)
    elif rows <= 16 and size == 128:
        # Measured on an H200 (benchmarks/triton-tiles-h200-*.jsonl), TB/s at 64 requests of 4096 keys
        # and us for one of 32768: 4.25 and 50; 64 keys with 4 warps and 3 stages 3.39 and 41, with 4
        # stages 4.13 and 43; 64 keys with 2 warps and 2 stages 4.37 and 58.
        config = DecodeConfig(block_m=16, block_n=32, num_warps=2, num_stages=4)
    elif rows > 16 and size <= 256:
        # The least rows that wgmma takes; 32 rows without it need more registers than these.
        keys, stages = (64, 3) if size <= 128 else (16, 3) if kv_itemsize == 1 else (32, 2)
        config = DecodeConfig(block_m=64, block_n=keys, num_warps=8, num_stages=stages)
    elif size <= 64:
        # B64 at 4096 keys, 32/8 heads: 126 us; two stages 136, two warps 146.
        config = DecodeConfig(block_m=16, block_n=64, num_warps=4, num_stages=3)
    elif size <= 128:
        # Two warps with all their registers (255): four programs a multiprocessor, so that the 512 of
        # B64 with 8 KV heads run at once. us at B64 x 4096, B256 x 1024, B8 x 8192, B1 x 32768:
        # 241, 246, 72, 46; four warps and three stages: 304, 259, 76, 41; 32 keys, 252, 257, 72, 45.
        config = DecodeConfig(block_m=16, block_n=64, num_warps=2, num_stages=2)
    elif size <= 256:
        # 177 registers; two warps spill.
        config = DecodeConfig(block_m=16, block_n=32, num_warps=4, num_stages=3)
    else:
        # 172 registers; four warps spill.
        config = DecodeConfig(block_m=16, block_n=32, num_warps=8, num_stages=2)
    columns, columns_v = padded(head_size), padded(head_size_v)
    return _fit(config, columns, columns + columns_v, itemsize, kv_itemsize, gpu)


def mla_decode_config(
    rank: int, rope: int, itemsize: int, kv_itemsize: int, rows: int, page_size: int, gpu: Gpu
) -> DecodeConfig:
    """Tile of the decode kernel over latents, whose accumulator of 64 rows of 512 alone is half of a
    multiprocessor's registers. Not timed yet: chosen by what fits without spilling.

    Args:
        rank: of the latent.
        rope: of the rotated part.
        itemsize: bytes of a query element.
        kv_itemsize: bytes of an element of the cache.
        rows: query rows of a request, at most: queries times heads.
        page_size: tokens in a page.
        gpu: where it runs.
    """
    if itemsize == 4:
        stages = 1 if kv_itemsize == 1 else 2  # As in `attention_config`.
        config = DecodeConfig(block_m=16, block_n=16, num_warps=8, num_stages=stages, segment=512)
    elif rows <= 16 or not gpu.has_wgmma:
        # 128 registers; with four warps codes that are converted take all there are.
        warps = 8 if kv_itemsize == 1 else 4
        config = DecodeConfig(block_m=16, block_n=32, num_warps=warps, num_stages=2, segment=512)
    elif kv_itemsize != itemsize:
        # 254 registers: tiles wait in them for their conversion.
        config = DecodeConfig(block_m=64, block_n=32, num_warps=8, num_stages=2, segment=512)
    elif rows <= 32:
        config = DecodeConfig(block_m=32, block_n=32, num_warps=8, num_stages=3, segment=512)
    elif page_size % 64 == 0:
        # 246 registers.
        config = DecodeConfig(block_m=64, block_n=64, num_warps=8, num_stages=2, segment=512)
    else:
        # 64 keys with pages of their own spill.
        config = DecodeConfig(block_m=64, block_n=32, num_warps=8, num_stages=3, segment=512)
    if page_size == 1:
        # Chosen keys are some thousands at most; segments of 512 leave half of the card idle.
        config = replace(config, segment=128 if rows <= 16 else 256)
    columns = padded(rank) + padded(rope)
    return _fit(config, columns, columns, itemsize, kv_itemsize, gpu)


def index_tile(itemsize: int) -> tuple[int, int, int]:
    """Keys in a tile of an indexer's scores, warps of a program, and stages of its loop. Of 16 bits the
    fastest of nine on an H200 (benchmarks/hopper-notes.md, "Choosing them").

    Args:
        itemsize: bytes of a query element.
    """
    if itemsize == 4:
        return (
            16,
            4,
            1,
        )  # Products of float32 have no matrix instructions; with more stages they spill.
    return 64, 4, 3


def padded(size: int) -> int:
    """The power of two, at least 16, that a matrix product needs for `size`."""
    return max(16, 1 << (size - 1).bit_length())


def decode_query_len(group_size: int, configured: int) -> int:
    """Queries up to which a request is decoded; longer ones go to the attention kernel.

    A tile has 16 rows at least, so short verifications are free while they fit beside the group; no
    more than 4 of them, which keeps the memory for parts small.

    Args:
        group_size: query heads per KV head.
        configured: width of the engine's decodes (1 + drafts).
    """
    return max(configured, min(4, 16 // group_size))


def num_splits(
    num_programs: int,
    num_sms: int,
    max_segments: int,
    *,
    longest_to_mean: float = 1.0,
    is_captured: bool = False,
) -> int:
    """Programs that share the context of one request and KV head. Changes speed, never bits.

    Args:
        num_programs: without splitting.
        num_sms: multiprocessors of the device.
        max_segments: most segments that a request of the batch can have.
        longest_to_mean: longest context over the mean one.
        is_captured: the batch's lengths are not known yet.
    """
    # Four programs a multiprocessor keep enough reads in flight for the full bandwidth.
    fill = 4 * num_sms // max(num_programs, 1)
    # A request much longer than the others would run on alone at the end, so its shares are made as
    # long as they are. A graph must expect such a request: 4 costs an even batch about 1 % of traffic.
    even = 4 if is_captured else int(longest_to_mean)
    return max(1, min(max(fill, even), max_segments))


def _fit(
    config: _Config, columns: int, kv_columns: int, itemsize: int, kv_itemsize: int, gpu: Gpu
) -> _Config:
    """The config with fewer stages, then fewer keys, until it fits the shared memory.

    Args:
        config: to fit.
        columns: of a tile of queries.
        kv_columns: of a tile of K and V together.
    """
    # Besides queries and K/V tiles: a converted copy of those of another dtype, and scratch.
    fixed = config.block_m * columns * itemsize + 4096
    while True:
        buffers = max(1, config.num_stages - (0 if gpu.has_wgmma and config.block_m >= 64 else 1))
        tile = config.block_n * kv_columns
        copy = tile * itemsize if itemsize != kv_itemsize else 0
        if fixed + buffers * tile * kv_itemsize + copy <= gpu.shared_memory:
            return config
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        else:
            return config
