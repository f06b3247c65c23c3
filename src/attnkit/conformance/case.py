"""Case: one layer and one batch, as plain data.

In: nothing. Out: frozen values; `cases` makes the table of them, `inputs` makes tensors from one and
`checks` runs it on a backend.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from attnkit.contract import AttentionType, KVCacheLayout
from attnkit.kvcache.formats import CacheFormat, cache_format

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of dtypes in the names of cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What a case is when it is about something else: the plain layer that a backend takes.

    Attributes:
        dtypes: names in `DTYPES` that the backend takes; the first one is used most.
        head_size: of keys and values.
        small_head_size: for cases with many heads.
        block_size: tokens per page.
        layout: order in memory of the cache.
        lse: ask for the LSE too, wherever a case does not say otherwise.
    """

    dtypes: tuple[str, ...] = tuple(DTYPES)
    head_size: int = 32
    small_head_size: int = 16
    block_size: int = 16
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    lse: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer, one batch.

    Attributes:
        name: unique; the seed of all random numbers of the case is derived from it.
        query_lens: new tokens per request; 0 is a padding row.
        seq_lens: all tokens per request. May be below the query length: the first queries then
            stand before the first key. For cross attention: tokens of the encoder.
        num_heads, num_kv_heads, head_size: of the layer.
        head_size_v: of values; None: as keys.
        dtype: of q, k, v and the output.
        kv_cache_dtype: cache format. Formats that read the layer's scales get some.
        per_head_scales: those scales differ per KV head.
        block_size: tokens per page.
        layout: order in memory of the cache.
        causal: of the batch; a tuple says it per request.
        sliding_window: keys a query sees, itself included.
        chunk_pages: pages in a chunk; a query sees the keys of its own chunk only.
        freed_window: pages left of every query's window or chunk are freed: the table has the null
            block.
        mm_prefix: requests have ranges that are seen in both directions.
        mm_ranges: per request, (first, last) positions; None: some that are made up (`ranges_of`).
        rswa: each request has a prefix that its window does not hide.
        prefix_lens: how long those are; None: some that are made up (`prefix_of`).
        tree: new tokens of requests are trees (`parents_of`).
        logits_soft_cap: c in c * tanh(score / c).
        alibi, alibi_sqrt: slopes are added, in the square-root form.
        sinks: each head has a sink logit.
        attn_type: an `AttentionType`.
        return_lse: the layer also returns its LSE.
        shared_blocks: leading pages that all requests share.
        first_block: smallest block id in use is above this one.
        padding_tokens: rows behind the last real token.
        padding_reqs: rows of the batch behind the last real request.
        query_gain: factor on random queries: larger gives peaked softmaxes.
        value_gain: factor on random values: larger saturates 8-bit codes.
        scale: factor on q.k; None: head_size ** -0.5.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    per_head_scales: bool = False
    block_size: int = 16
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    causal: bool | tuple[bool, ...] = True
    sliding_window: int | None = None
    chunk_pages: int | None = None
    freed_window: bool = False
    mm_prefix: bool = False
    mm_ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None
    rswa: bool = False
    prefix_lens: tuple[int, ...] | None = None
    tree: bool = False
    logits_soft_cap: float | None = None
    alibi: bool = False
    alibi_sqrt: bool = False
    sinks: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    return_lse: bool = False
    shared_blocks: int = 0
    first_block: int = 0
    padding_tokens: int = 0
    padding_reqs: int = 0
    query_gain: float = 1.0
    value_gain: float = 1.0
    scale: float | None = None

    @property
    def seed(self) -> int:
        """Of the case's random numbers."""
        return zlib.crc32(self.name.encode())

    @property
    def value_size(self) -> int:
        """head_size_v, or head_size where it is None."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def query_size(self) -> int:
        """Of a query head; that of a key, but where the cache holds latents."""
        return self.head_size

    @property
    def is_latent(self) -> bool:
        """Keys and values of the case are latents and rotated parts of an MLA layer."""
        return False

    @property
    def stored(self) -> CacheFormat:
        """The format of the cache."""
        return cache_format(self.kv_cache_dtype)

    @property
    def softmax_scale(self) -> float:
        """The scale in use."""
        return self.head_size**-0.5 if self.scale is None else self.scale

    @property
    def attention_chunk_size(self) -> int | None:
        """Tokens in a chunk."""
        return None if self.chunk_pages is None else self.chunk_pages * self.block_size

    @property
    def num_reqs(self) -> int:
        """Requests, without padding rows behind them."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the step."""
        return sum(self.query_lens)

    @property
    def is_cacheless(self) -> bool:
        """Keys are this step's, there are no pages."""
        return self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

    def is_causal(self, request: int) -> bool:
        """Whether queries of this request are blind to later keys; only a decoder's can be."""
        if self.attn_type is not AttentionType.DECODER:
            return False
        return self.causal[request] if isinstance(self.causal, tuple) else self.causal

    def ranges_of(self, request: int) -> tuple[tuple[int, int], ...]:
        """Ranges of a request, (first, last) position each: one in the context, one from there into the
        new tokens, one behind it, as far as there is room."""
        if not self.mm_prefix:
            return ()
        if self.mm_ranges is not None:
            return self.mm_ranges[request]
        new, length = self.query_lens[request], self.seq_lens[request]
        context = length - new
        if new == 0 or context < 0:
            return ()
        ranges = [(1, 2)] if context >= 5 else []
        ranges.append((max(0, context - 2), context + new // 3))
        if new >= 4:
            ranges.append((context + new // 2, length - 1))
        return tuple(ranges)

    def parents_of(self, request: int) -> tuple[int, ...]:
        """Which earlier new token each of a request's follows, -1: none; () where it is no tree, as is
        every fourth request, or one of more tokens than a tree has. A root at every fourth token, two
        branches at the others."""
        num_tokens = self.query_lens[request]
        if not self.tree or num_tokens > 64 or request % 4 == 3:
            return ()
        return tuple(-1 if i % 4 == 3 else (i - 1) // 2 for i in range(num_tokens))

    def prefix_of(self, request: int) -> int:
        """First tokens of a request that its window does not hide: three tenths of the first request,
        four of the next and so on, none of the sixth, which ends inside pages and tiles."""
        if not self.rswa:
            return 0
        if self.prefix_lens is not None:
            return self.prefix_lens[request]
        return self.seq_lens[request] * ((request + 3) % 8) // 10
