# pyright: reportMissingImports=false
"""VllmBackend: one of attnkit's backends in vLLM's classes.

In: vLLM's questions, specs, batches and tensors. Out: the answers, plans and attention of the backend
that ATTNKIT_VLLM names. Layers of decoders and of encoders; everything else is refused with the reason
when the layer is made. vLLM finds the class by its import path, so it stands in a module.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention import backend as vllm_contract
from vllm.v1.kv_cache_interface import KVCacheLayout

from attnkit.contract import (
    COMMON_METADATA_FIELDS,
    AttentionBackend,
    AttentionSpec,
    AttentionType,
    CommonAttentionMetadata,
    DeviceCapability,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MultipleOf,
    SlidingWindowSpec,
)
from attnkit.errors import BatchError, UnsupportedConfiguration
from attnkit.integrations.vllm import ENV_VLLM
from attnkit.kvcache.formats import cache_format
from attnkit.selection import AttentionRequest, reasons_against, resolve

_ON_CPU = current_platform.is_cpu()
OURS: type[AttentionBackend] = resolve(os.environ.get(ENV_VLLM) or ("cpu" if _ON_CPU else "triton"))
"""What runs: one backend a process, since vLLM asks classes."""

if OURS.is_mla():
    raise UnsupportedConfiguration(
        f"{ENV_VLLM} names {OURS.get_name()}, a backend for latents (MLA), and the bridge serves dense "
        "layers: vLLM's layers over latents keep vLLM's own backend. Name a dense one"
    )

_FORMATS = (
    *("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"),
    *("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"),
)
"""Cache formats whose pages have as many bytes for vLLM as for us."""

_SERVED = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

_ASKED = (
    "get_supported_head_sizes",
    "supports_head_size",
    "supports_block_size",
    "get_preferred_block_size",
    "supports_sink",
    "supports_alibi_sqrt",
    "supports_mm_prefix",
    "supports_sliding_window",
    "supports_rswa",
    "supports_non_causal",
    "supports_batch_invariance",
    "supports_kv_connector",
    "supports_device_cpu_query_lens_mismatch",
)
"""Questions that are handed on as they are."""


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
            device_capability=DeviceCapability.cpu() if _ON_CPU else DeviceCapability.of("cuda"),
            attn_type=str(AttentionType(attn_type)),
            has_sliding_window=sliding_window is not None,
            use_alibi=alibi_slopes is not None,
            use_alibi_sqrt=bool(self._extras),
            has_logits_soft_cap=bool(logits_soft_cap),
        )
        reasons = [*reasons_against(OURS, request), *(f"{k} is not known" for k in unknown)]
        if attn_type not in _SERVED:
            reasons.append(f"the bridge serves {' and '.join(_SERVED)} layers, not {attn_type}")
        if kv_cache_dtype not in _FORMATS:
            reasons.append(f"the bridge takes caches of {', '.join(_FORMATS)}")
        if reasons:
            raise UnsupportedConfiguration(
                f"attnkit's {OURS.get_name()} cannot serve this layer in vLLM: {'; '.join(reasons)}. "
                f"Unset {ENV_VLLM}, or name another backend",
                tuple(reasons),
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


class VllmBuilder(vllm_contract.AttentionMetadataBuilder):
    """Plans a batch for a group of layers."""

    supports_update_block_table = False

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        **_: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise UnsupportedConfiguration(
                "attnkit in vLLM does not spread a request's cache over ranks; set "
                "decode_context_parallel_size to 1"
            )
        spec = our_spec(kv_cache_spec)
        self.ours = OURS.get_builder_cls()(spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold = self.ours.reorder_batch_threshold

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        builder = OURS.get_builder_cls()
        level = builder.get_cudagraph_support(vllm_config, our_spec(kv_cache_spec))
        return vllm_contract.AttentionCGSupport[level.name]

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Our plan of vLLM's batch.

        Raises:
            UnsupportedConfiguration: the batch asks for a mask the backend does not do.
        """
        batch = our_batch(common_attn_metadata)
        for name, asked, does in (
            ("mm_req_doc_ranges", batch.mm_req_doc_ranges, OURS.supports_mm_prefix()),
            ("rswa_prefix_lens", batch.rswa_prefix_lens, OURS.supports_rswa()),
            ("causal=False", batch.causal is not True, OURS.supports_non_causal()),
        ):
            if asked is not None and asked is not False and not does:
                raise UnsupportedConfiguration(
                    f"the batch asks for {name}, which attnkit's {OURS.get_name()} does not do; unset "
                    f"{ENV_VLLM}, or name another backend"
                )
        return self.ours.build(common_prefix_len, batch, fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.ours.build_for_cudagraph_capture(our_batch(common_attn_metadata))

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def set_kernel_block_size(self, kernel_block_size: int) -> None:
        return


class VllmBackend(vllm_contract.AttentionBackend):
    """What vLLM asks of a backend, answered by `OURS`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        d for d in (torch.float16, torch.bfloat16, torch.float32) if OURS.supports_dtype(d)
    ]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        f for f in _FORMATS if OURS.supports_kv_cache_dtype(f)
    ]
    forward_includes_kv_cache_update = OURS.forward_includes_kv_cache_update

    @staticmethod
    def get_name() -> str:
        # A member of vLLM's enumeration, whichever class answers for it.
        return "CPU_ATTN" if _ON_CPU else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[VllmImpl]:
        return VllmImpl

    @staticmethod
    def get_builder_cls() -> type[VllmBuilder]:
        return VllmBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        sizes = OURS.get_supported_kernel_block_sizes()
        return [vllm_contract.MultipleOf(s.base) if isinstance(s, MultipleOf) else s for s in sizes]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        layouts = OURS.supported_kv_cache_layouts()
        return None if layouts is None else tuple(KVCacheLayout[layout.name] for layout in layouts)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return OURS.supports_compute_capability(
            DeviceCapability(capability.major, capability.minor)
        )

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


def _handed_on(name: str) -> Any:
    def ask(cls: type, *args: Any) -> Any:
        return getattr(OURS, name)(*args)

    ask.__name__ = name
    return classmethod(ask)


for _name in _ASKED:
    setattr(VllmBackend, _name, _handed_on(_name))


def our_spec(spec: Any) -> AttentionSpec:
    """vLLM's cache spec of a group of layers as ours.

    Raises:
        UnsupportedConfiguration: it is of another kind.
    """
    mode = spec.kv_quant_mode.name
    if mode not in KVQuantMode.__members__:
        raise UnsupportedConfiguration(
            f"attnkit in vLLM does not store caches of mode {mode}; it takes {', '.join(_FORMATS)}"
        )
    facts: dict[str, Any] = {
        "block_size": spec.block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "dtype": spec.dtype,
        "kv_quant_mode": KVQuantMode[mode],
        "page_size_padded": spec.page_size_padded,
        "state_content_bytes": spec.state_content_bytes,
    }
    kind = type(spec).__name__
    if kind == "FullAttentionSpec":
        return FullAttentionSpec(sliding_window=spec.sliding_window, **facts)
    if kind == "SlidingWindowSpec":
        return SlidingWindowSpec(sliding_window=spec.sliding_window, **facts)
    if kind == "EncoderOnlyAttentionSpec":
        return EncoderOnlyAttentionSpec(**facts)
    raise UnsupportedConfiguration(
        f"attnkit in vLLM serves full, sliding-window and encoder-only attention, not {kind}; unset "
        f"{ENV_VLLM}"
    )


def our_batch(batch: Any) -> CommonAttentionMetadata:
    """vLLM's batch as ours: the fields have its names."""
    fields = {name: getattr(batch, name) for name in COMMON_METADATA_FIELDS if hasattr(batch, name)}
    return CommonAttentionMetadata(**fields)
