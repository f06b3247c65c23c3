# pyright: reportMissingImports=false
"""VllmBackend: one of attnkit's dense backends in vLLM's classes.

In: vLLM's questions, specs, batches and tensors. Out: the answers, plans and attention of the backend
that ATTNKIT_VLLM names. Layers of decoders and of encoders; everything else is refused with the reason
when the layer is made. vLLM finds the class by its import path, so it stands in a module.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention import backend as vllm_contract

from attnkit.contract import AttentionType
from attnkit.errors import BatchError
from attnkit.integrations.vllm.answers import (
    ON_CPU,
    OURS,
    Answers,
    check_layer,
    device_capability,
    supported_dtypes,
    supported_formats,
)
from attnkit.integrations.vllm.plans import VllmBuilder, our_spec
from attnkit.kvcache.formats import cache_format
from attnkit.selection import AttentionRequest

_FORMATS = (
    *("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"),
    *("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"),
)
"""Cache formats whose pages have as many bytes for vLLM as for us."""

_SERVED = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)


class VllmImpl(vllm_contract.AttentionImpl):
    """One layer."""

    can_return_lse_for_decode = False

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
        **features: Any,
    ) -> None:
        """vLLM's arguments; `features` are the keywords a model adds.

        Raises:
            UnsupportedConfiguration: the backend cannot serve this layer; with every reason.
        """
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.kv_cache_dtype = sliding_window, kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._sinks = features.pop("sinks", None)
        self._extras = {k: v for k, v in features.items() if k == "use_alibi_sqrt" and v}
        unknown = [k for k, v in features.items() if v is not None and k != "use_alibi_sqrt"]
        request = AttentionRequest(
            head_size=head_size,
            dtype=torch.get_default_dtype(),  # vLLM sets it while it makes a model.
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            kv_cache_dtype=kv_cache_dtype,
            has_sink=self._sinks is not None,
            device_capability=device_capability(),
            attn_type=str(AttentionType(attn_type)),
            has_sliding_window=sliding_window is not None,
            use_alibi=alibi_slopes is not None,
            use_alibi_sqrt=bool(self._extras),
            has_logits_soft_cap=bool(logits_soft_cap),
        )
        served = f"the bridge serves {' and '.join(_SERVED)} layers, not {attn_type}"
        check_layer(
            request,
            _FORMATS,
            *(f"{k} is not known" for k in unknown),
            None if attn_type in _SERVED else served,
        )
        stored = cache_format(kv_cache_dtype)
        self._content = 2 * head_size
        if stored.codec is not None:
            self._content = stored.layout(head_size, head_size).num_bytes
        self._arguments = (
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            str(AttentionType(attn_type)),
            kv_sharing_target_layer_name,
        )
        self.ours = self._make()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self._sinks is not None:  # They were not loaded when the impl was made.
            self.ours = self._make()
        self.ours.process_weights_after_loading(act_dtype)

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
    ) -> torch.Tensor:
        """Attend; a profiling run, which has no plan, gets zeros."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attnkit's backends do not quantise their output")
        if attn_metadata is None:
            return output.zero_()
        if self.attn_type == AttentionType.DECODER:
            self._check(kv_cache)
        self.ours.forward(layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    def _check(self, kv_cache: torch.Tensor) -> None:
        if kv_cache.shape[-1] != self._content or kv_cache.shape[1] != self.num_kv_heads:
            raise BatchError(
                f"vLLM's cache has shape {tuple(kv_cache.shape)}; attnkit takes (num_blocks, "
                f"{self.num_kv_heads}, block_size, {self._content}): values as wide as keys"
            )

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write K and V; `skip_scale` concerns formats with codes.

        vLLM calls it for layers of encoders too, which have no cache.
        """
        if self.attn_type == AttentionType.DECODER:
            self.ours.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def reserve_workspace(self, *args: Any, **kwargs: Any) -> None:
        return

    def set_interleaved_v_cache(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def _make(self) -> Any:
        extras = dict(self._extras)
        if self._sinks is not None:
            extras["sinks"] = self._sinks.detach().float()
        impl_cls: Any = OURS.get_impl_cls()
        return impl_cls(*self._arguments, **extras)


class VllmBackend(Answers):
    """What vLLM asks of a backend, answered by `OURS`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = supported_dtypes()
    supported_kv_cache_dtypes: ClassVar[list[str]] = supported_formats(_FORMATS)
    forward_includes_kv_cache_update = OURS.forward_includes_kv_cache_update

    @staticmethod
    def get_name() -> str:
        # A member of vLLM's enumeration, whichever class answers for it.
        return "CPU_ATTN" if ON_CPU else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[VllmImpl]:
        return VllmImpl

    @staticmethod
    def get_builder_cls() -> type[VllmBuilder]:
        return VllmBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in _SERVED and OURS.supports_attn_type(attn_type)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        ours = OURS.customize_spec(our_spec(spec))
        if ours.state_content_bytes == spec.state_content_bytes:
            return spec
        content = ours.state_content_bytes
        return dataclasses.replace(spec, dtype=ours.dtype, state_content_bytes=content)
