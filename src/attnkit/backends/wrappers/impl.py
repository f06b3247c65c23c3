"""WrapperImpl: an impl that runs others, which are built from the same layer.

In: what every impl is built with, and the classes of those behind it. Out: them, ready to be run on
parts of a step (`run_inner`). Which parts, with which plans and caches, is each wrapper's own.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar

import torch

from attnkit.contract import (
    AttentionBackend,
    AttentionImpl,
    AttentionImplBase,
    AttentionLayer,
    AttentionType,
)
from attnkit.errors import ConfigurationError


def dense_impl(backend: type[AttentionBackend]) -> type[AttentionImpl[Any]]:
    """The impl of a backend over keys and values."""
    impl_cls = backend.get_impl_cls()
    assert issubclass(impl_cls, AttentionImpl), f"{impl_cls} has no dense forward"
    return impl_cls


def check_wrappable(backend: type[AttentionBackend]) -> None:
    """Refuse what can only run as a whole: wrappers hand out parts of an output and logical pages.

    Raises:
        ConfigurationError: a backend that keeps something else than keys and values, or one of the older
            generation that returns its output or whose cache has a shape of its own.
    """
    if backend.is_mla() or backend.is_sparse() or backend.is_ssm():
        raise ConfigurationError(
            f"backend {backend.get_name()} does not attend to all keys and values, which wrappers are "
            "about; use it as it is"
        )
    parameter = inspect.signature(dense_impl(backend).forward).parameters.get("output")
    returns = parameter is not None and parameter.default is not inspect.Parameter.empty
    own_shape = backend.get_kv_cache_shape is not AttentionBackend.get_kv_cache_shape
    if own_shape or (returns and not backend.accept_output_buffer):
        what = "its cache has a shape of its own" if own_shape else "it fills no output it is given"
        raise ConfigurationError(
            f"backend {backend.get_name()} is of the older generation ({what}) and cannot be wrapped; "
            "use it as it is"
        )


class WrapperImpl(AttentionImpl[Any]):
    """Builds its inner impls with the layer's arguments.

    Attributes:
        inner_classes: what it runs.
        inner_attn_type: what they are told the layer is; None: what it is.
        inner: one of each class.
    """

    inner_classes: ClassVar[tuple[type[AttentionImpl[Any]], ...]]
    inner_attn_type: ClassVar[AttentionType | None] = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        head_size_v: int | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.alibi_slopes = alibi_slopes
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        extras: dict[str, Any] = {}
        if sinks is not None:
            extras["sinks"] = sinks
        if use_alibi_sqrt:
            extras["use_alibi_sqrt"] = True
        if head_size_v is not None:
            extras["head_size_v"] = head_size_v
        self.inner = tuple(
            cls(
                num_heads,
                head_size,
                scale,
                num_kv_heads,
                alibi_slopes,
                sliding_window,
                kv_cache_dtype,
                logits_soft_cap,
                (self.inner_attn_type or AttentionType(attn_type)).value,
                kv_sharing_target_layer_name,
                **extras,
            )
            for cls in self.inner_classes
        )
        self.check_layer()

    def check_layer(self) -> None:
        """Refuse a layer that makes no sense to this wrapper.

        Raises:
            UnsupportedConfiguration: with the reason.
        """
        return

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        for impl in self.inner:
            impl.process_weights_after_loading(act_dtype)

    def get_impl_variants(self) -> tuple[AttentionImplBase[Any], ...]:
        return tuple(variant for impl in self.inner for variant in impl.get_impl_variants())

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Any of them: all write the same bytes."""
        self.inner[0].do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def run_inner(
        self,
        impl: AttentionImpl[Any],
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
    ) -> torch.Tensor | None:
        """One of them over a part of the step.

        Returns:
            Its LSE as a natural logarithm, if the layer wants one.
        """
        impl.need_to_return_lse_for_decode = self.need_to_return_lse_for_decode
        result = impl.forward(
            layer,
            query,
            key,  # type: ignore[arg-type]
            value,  # type: ignore[arg-type]
            kv_cache,
            attn_metadata,
            output,
        )
        if not isinstance(result, tuple):
            return None
        return result[1] if impl.lse_base_on_e else result[1] * math.log(2)
