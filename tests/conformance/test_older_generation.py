"""A backend of the older generation is judged too: its own cache shape, no output buffer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnkit.conformance import verify
from attnkit.contract import AttentionBackend, AttentionImpl, CommonMetadataBuilder


class OldImpl(AttentionImpl[Any]):
    shift = 0

    def __init__(self, num_heads: int, head_size: int, scale: float, *rest: Any) -> None:
        self.scale, self.kv_cache_dtype = scale, rest[3]
        self.owns_cache = rest[6] is None

    def forward(  # type: ignore[override]
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = torch.zeros_like(query)
        keys, values = kv_cache.unbind(0)
        block_size = kv_cache.shape[2]
        if self.owns_cache:
            for token, slot in enumerate(attn_metadata.slot_mapping.tolist()):
                if slot >= 0:
                    place = (slot // block_size, slot % block_size)
                    keys[place], values[place] = key[token], value[token]
        starts = attn_metadata.query_start_loc.tolist()
        for r, kv_len in enumerate(attn_metadata.seq_lens.tolist()):
            rows = slice(starts[r], starts[r + 1])
            position = torch.arange(kv_len)
            blocks = attn_metadata.block_table_tensor[r].long()[position // block_size]
            places = (blocks, position % block_size)
            q = query[rows].transpose(0, 1)
            mask = position <= torch.arange(kv_len - q.shape[1], kv_len)[:, None] + self.shift
            k, v = (x[places].transpose(0, 1).to(q.dtype) for x in (keys, values))
            out = scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=True)
            result[rows] = out.transpose(0, 1)
        return result


class OldBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    impl_cls: ClassVar[type[OldImpl]] = OldImpl

    @staticmethod
    def get_name() -> str:
        return "old"

    @classmethod
    def get_impl_cls(cls) -> type[OldImpl]:
        return cls.impl_cls

    @staticmethod
    def get_builder_cls() -> type[CommonMetadataBuilder]:
        return CommonMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return (0, 1, 3, 2, 4)


def test_it_passes() -> None:
    report = verify(OldBackend)
    assert report.ok, str(report)
    assert report.num_cases > 100


class OldWrongImpl(OldImpl):
    shift = 1


class OldWrong(OldBackend):
    impl_cls = OldWrongImpl


def test_a_mistake_in_it_is_caught() -> None:
    report = verify(OldWrong, filter="case:plain-extend")
    assert len(report.failed) == 1
    assert "values are wrong" in report.failed[0].message
