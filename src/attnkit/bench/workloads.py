"""Workloads: one batch shape each, with the bytes and FLOPs that it cannot do without.

In: constructors with the field's words, or a shape written as `batch=8,ctx=4096`. Out: `Workload`,
frozen, whose name says everything that matters about it. No tensors here.

Counts are floors, not measurements: each key, value, query and output moves once, and only pairs of
a query and a key that the causal mask leaves are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from attnkit.contract import kv_cache_torch_dtype
from attnkit.errors import ConfigurationError
from attnkit.kvcache.formats import CACHE_FORMATS

Kind = Literal["prefill", "decode", "verify", "mixed", "write", "build"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ATTENTION_KINDS: tuple[Kind, ...] = ("prefill", "decode", "verify", "mixed")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One batch to be measured.

    Attributes:
        kind: what is timed: attention over pages (prefill, decode, verify, mixed), the write of new
            tokens into pages, or the building of a plan on the host.
        label: the batch in a few words; with the layer's sizes it makes the name.
        query_lens: new tokens of each request.
        seq_lens: all tokens of each request, the new ones included.
        num_heads: query heads.
        num_kv_heads: divides num_heads.
        head_size: of keys, queries and values.
        block_size: tokens in a page.
        dtype: of queries, keys, values and outputs: a key of `DTYPES`.
        kv_cache_dtype: format of the pages.
    """

    kind: Kind
    label: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigurationError(
                f"dtype {self.dtype!r} is not known; use one of {', '.join(DTYPES)}"
            )
        kv_cache_torch_dtype(self.kv_cache_dtype, DTYPES[self.dtype])
        for name in ("num_heads", "num_kv_heads", "head_size", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"{name} {getattr(self, name)} is not allowed; give at least 1"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"{self.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly; "
                "give a divisor"
            )
        stored = CACHE_FORMATS.get(self.kv_cache_dtype)
        if stored is not None and (reason := stored.refusal(self.head_size, self.head_size)):
            raise ConfigurationError(f"{reason}; give such a head_size")
        if not self.query_lens or len(self.query_lens) != len(self.seq_lens):
            raise ConfigurationError(
                f"{len(self.query_lens)} query lengths and {len(self.seq_lens)} sequence lengths; "
                "give one of each per request, and at least one request"
            )
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            if not 1 <= query_len <= seq_len:
                raise ConfigurationError(
                    f"{query_len} new tokens in a sequence of {seq_len} is not allowed; give at "
                    "least 1 and at most the sequence"
                )

    @property
    def name(self) -> str:
        """What it is called in tables and records; equal workloads have equal names."""
        cache = "" if self.kv_cache_dtype == "auto" else f" {self.kv_cache_dtype} cache"
        return (
            f"{self.kind} {self.label} {self.num_heads}/{self.num_kv_heads} D{self.head_size} "
            f"page{self.block_size} {_SHORT[self.dtype]}{cache}"
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def cache_torch_dtype(self) -> torch.dtype:
        return kv_cache_torch_dtype(self.kv_cache_dtype, self.torch_dtype)

    @property
    def content_bytes(self) -> int:
        """Bytes of a token and KV head in the pages, scales beside the codes included."""
        stored = CACHE_FORMATS.get(self.kv_cache_dtype)
        if stored is None or stored.codec is None:
            return 2 * self.head_size * self.cache_torch_dtype.itemsize
        return stored.layout(self.head_size, self.head_size).num_bytes

    @property
    def num_reqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """New tokens of the batch."""
        return sum(self.query_lens)

    @property
    def uniform(self) -> bool:
        """All requests have one query length and one sequence length."""
        return len(set(self.query_lens)) == 1 and len(set(self.seq_lens)) == 1

    @property
    def num_pages(self) -> int:
        """Pages that the batch occupies."""
        return sum(-(-n // self.block_size) for n in self.seq_lens)

    @property
    def num_bytes(self) -> int:
        """Fewest bytes that must move: each input read once, each output written once.

        Attention: K and V of all tokens in the format of the pages, queries, outputs. Write: K and V
        of the new tokens read and written, and 8 bytes of slot each. Build: none.
        """
        token = 2 * self.num_kv_heads * self.head_size
        item, cached = self.torch_dtype.itemsize, self.num_kv_heads * self.content_bytes
        if self.kind == "build":
            return 0
        if self.kind == "write":
            return self.num_tokens * (token * item + cached + 8)
        queries = self.num_tokens * self.num_heads * self.head_size
        return sum(self.seq_lens) * cached + 2 * queries * item

    @property
    def num_flops(self) -> int:
        """Multiplications and additions of both products over the visible pairs; 0 without attention.

        A request of n new tokens after c others has n * c + n * (n + 1) / 2 visible pairs, and each
        costs 4 * head_size per head.
        """
        if self.kind not in ATTENTION_KINDS:
            return 0
        pairs = sum(
            n * (total - n) + n * (n + 1) // 2
            for n, total in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return 4 * pairs * self.num_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The sizes of a layer and its pages, shared by the constructors below."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"

    def workload(
        self, kind: Kind, label: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
    ) -> Workload:
        """A workload of this layer."""
        return Workload(
            kind=kind,
            label=label,
            query_lens=query_lens,
            seq_lens=seq_lens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size=self.block_size,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
        )


def prefill(batch: int, new: int, layer: LayerShape, context: int = 0) -> Workload:
    """`batch` prompts of `new` tokens each, after `context` tokens that are cached already."""
    label = f"B{batch} S{new}" + (f" ctx{context}" if context else "")
    return layer.workload("prefill", label, (new,) * batch, (context + new,) * batch)


def decode(batch: int, context: int, layer: LayerShape) -> Workload:
    """One new token per request; `context` counts it."""
    return layer.workload("decode", f"B{batch} ctx{context}", (1,) * batch, (context,) * batch)


def verify(batch: int, query: int, context: int, layer: LayerShape) -> Workload:
    """`query` drafted tokens per request, checked at once; `context` counts them."""
    label = f"Q{query} B{batch} ctx{context}"
    return layer.workload("verify", label, (query,) * batch, (context,) * batch)


def mixed(
    chunk: int, context: int, decodes: int, decode_context: int, layer: LayerShape
) -> Workload:
    """A prompt's chunk after `context` cached tokens, and `decodes` requests of one new token.

    Decodes come first, as engines order a batch.
    """
    label = f"1x{chunk} after {context} + {decodes}x1 ctx{decode_context}"
    return layer.workload(
        "mixed",
        label,
        (1,) * decodes + (chunk,),
        (decode_context,) * decodes + (context + chunk,),
    )


def write(requests: int, new: int, layer: LayerShape) -> Workload:
    """The K and V of `new` tokens of each request go into their pages.

    One new token per request is what a decode step writes; it then lands behind 1,024 others.
    """
    seq_len = 1025 if new == 1 else new
    label = f"B{requests} S{new}"
    return layer.workload("write", label, (new,) * requests, (seq_len,) * requests)


def build(requests: int, context: int, layer: LayerShape) -> Workload:
    """The plan of a decode batch is made on the host."""
    return layer.workload(
        "build", f"R{requests} ctx{context}", (1,) * requests, (context,) * requests
    )


_DEFAULTS: Mapping[Kind, Mapping[str, int]] = {
    "prefill": {"batch": 1, "s": 2048, "ctx": 0},
    "decode": {"batch": 8, "ctx": 4096},
    "verify": {"batch": 8, "q": 4, "ctx": 4096},
    "mixed": {"chunk": 2048, "ctx": 8192, "decodes": 63, "decode_ctx": 4096},
    "write": {"batch": 8, "s": 1024},
    "build": {"requests": 256, "ctx": 4096},
}
_LAYER_KEYS = ("heads", "d", "page", "dtype", "kv")


def parse_shape(kind: Kind, text: str) -> Workload:
    """A workload from `key=value,...`.

    Keys of every kind: heads=32/8 (query/KV), d=128, page=16, dtype=bfloat16, kv=auto (cache
    format). Of prefill: batch, s (new tokens), ctx (cached before). Of decode: batch, ctx. Of verify:
    batch, q, ctx. Of mixed: chunk, ctx, decodes, decode_ctx. Of write: batch, s. Of build: requests,
    ctx. What is left out has a default.

    Raises:
        ConfigurationError: a key is not known for this kind, or a value is not allowed.
    """
    values = dict(_DEFAULTS[kind])
    layer: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = part.partition("=")
        if key in _LAYER_KEYS:
            layer[key] = value
        elif key in values:
            values[key] = _whole(key, value)
            if values[key] == 0 and not key.endswith("ctx"):
                raise ConfigurationError(f"{key}=0 leaves nothing to measure; give at least 1")
        else:
            allowed = ", ".join((*_DEFAULTS[kind], *_LAYER_KEYS))
            raise ConfigurationError(f"shape of {kind} has no key {key!r}; use {allowed}")
    shape = _layer(layer)
    if kind == "prefill":
        return prefill(values["batch"], values["s"], shape, values["ctx"])
    if kind == "decode":
        return decode(values["batch"], values["ctx"], shape)
    if kind == "verify":
        return verify(values["batch"], values["q"], values["ctx"], shape)
    if kind == "mixed":
        chunk, context = values["chunk"], values["ctx"]
        return mixed(chunk, context, values["decodes"], values["decode_ctx"], shape)
    if kind == "write":
        return write(values["batch"], values["s"], shape)
    return build(values["requests"], values["ctx"], shape)


def _layer(given: Mapping[str, str]) -> LayerShape:
    default = LayerShape()
    heads, _, kv_heads = given.get(
        "heads", f"{default.num_heads}/{default.num_kv_heads}"
    ).partition("/")
    return LayerShape(
        num_heads=_whole("heads", heads),
        num_kv_heads=_whole("heads", kv_heads or heads),
        head_size=_whole("d", given.get("d", str(default.head_size))),
        block_size=_whole("page", given.get("page", str(default.block_size))),
        dtype=given.get("dtype", default.dtype),
        kv_cache_dtype=given.get("kv", default.kv_cache_dtype),
    )


def _whole(key: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(f"{key}={text} is not a whole number; write e.g. {key}=8")
    return int(text)
