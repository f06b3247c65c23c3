"""WrappingBuilder: shows another batch to the builder of the wrapped backend, whose plans it gives.

In: a class of builders. Out: what builders of wrappers have in common.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attnkit.contract import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCacheSpec,
)


class WrappingBuilder(AttentionMetadataBuilder[Any]):
    """Makes `inner` of `inner_cls`; subclasses say which batch it sees."""

    inner_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec = self.inner_spec(kv_cache_spec)
        self.inner = self.inner_cls(spec, layer_names, vllm_config, device)

    def inner_spec(self, kv_cache_spec: KVCacheSpec) -> KVCacheSpec:
        """What the wrapped backend is told that the layers keep.

        Raises:
            ConfigurationError: layers that keep this cannot be wrapped so.
        """
        return kv_cache_spec

    @classmethod
    def view_of(cls, kv_cache_spec: KVCacheSpec) -> str:
        """What it shows the wrapped builder, as errors call it."""
        raise NotImplementedError

    @classmethod
    def get_views(cls, kv_cache_spec: KVCacheSpec) -> tuple[str, ...]:
        return cls.view_of(kv_cache_spec), *cls.inner_cls.get_views(kv_cache_spec)

    def shown(self, batch: CommonAttentionMetadata, **changes: Any) -> CommonAttentionMetadata:
        """The batch that the wrapped builder sees."""
        return batch.replace(views=(*batch.views, self.view_of(self.kv_cache_spec)), **changes)

    @classmethod
    def get_plan_cls(cls) -> type | None:
        return cls.inner_cls.get_plan_cls()
