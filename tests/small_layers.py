"""Small layers, caches and tokens for tests of `Attention`, and backends for them: one whose forward
writes K and V, one whose layer does, and one that writes down how it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import Attention, PagedKVCache
from attnkit.backends.reference import ReferenceBackend, ReferenceImpl
from attnkit.contract import (
    AttentionImpl,
    FullAttentionSpec,
)
from attnkit.kvcache.write import write_kv

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4


class WritesItself(ReferenceBackend):
    """forward writes K and V: the reference as it is."""


class SplitImpl(ReferenceImpl):
    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        write_kv(key, value, kv_cache, slot_mapping)

    def forward(self, layer: Any, query: torch.Tensor, key: Any, value: Any, *rest: Any) -> Any:
        return super().forward(layer, query, None, None, *rest)  # type: ignore[arg-type]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class LayerWrites(ReferenceBackend):
    """The layer is asked to write K and V before forward, which reads the cache alone."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[ReferenceImpl]:
        return SplitImpl


BOTH = pytest.mark.parametrize("backend", [WritesItself, LayerWrites])


class Recorder(AttentionImpl[Any]):
    """Writes down how it was made and called; the output is the number of calls before."""

    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made_with = (args, kwargs)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.calls.append(("process_weights_after_loading", (act_dtype,)))

    def do_kv_cache_update(self, *args: Any) -> None:
        self.calls.append(("do_kv_cache_update", args))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> Any:
        output.fill_(len(self.calls))
        self.calls.append(("forward", (layer, query, key, value, kv_cache, attn_metadata, output)))
        if self.need_to_return_lse_for_decode:
            return output, torch.full(query.shape[:2], 3.0)
        return output


class Recording(ReferenceBackend):
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return Recorder


def make_layer(backend: Any = WritesItself, **arguments: Any) -> Attention:
    facts = {"num_kv_heads": KV_HEADS, "block_size": BLOCK, "backend": backend}
    facts = {"num_heads": HEADS, "head_size": SIZE, **facts}
    return Attention(**{**facts, **arguments})


def make_cache(blocks: int = 9, **changes: Any) -> torch.Tensor:
    facts = {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_size": SIZE}
    spec = FullAttentionSpec(**{**facts, "dtype": torch.float32, **changes})
    return PagedKVCache({"a": spec}, blocks, poison=True)["a"]


def make_tokens(count: int, seed: int = 0, size_v: int = SIZE) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    shapes = (HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, size_v)
    return tuple(torch.randn(count, *shape, generator=g) for shape in shapes)
