# pyright: reportMissingImports=false
"""The other way round: an attention backend written for vLLM, run by our layers and our runner.

In: a class of vLLM's contract, which needs vLLM's package but nothing of its engine. Out: a backend of
ours that asks it, plans with its builder and runs its impl, over our pages.

    LLM(model, backend="attnkit.integrations.vllm.foreign:CPU_ATTN")  # any name of vLLM's registry
    LLM(model, backend=adapt(TheirBackend))

Its builder sees a configuration with the attributes of `_engine_view` and no layers of vLLM's. What a
backend needs beyond that it does not find, and raises. A backend whose kernels this build of vLLM does
not have is refused with that reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.config import AttentionConfig, CUDAGraphMode, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.attention import backend as vllm_contract

from attnkit.contract import (
    COMMON_METADATA_FIELDS,
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    DeviceCapability,
    KVCacheLayout,
    KVCacheSpec,
    MultipleOf,
    VllmConfig,
)
from attnkit.errors import UnsupportedConfiguration

_FORMATS = ("auto", "float16", "bfloat16", "float32")
_SPEC_FACTS = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "sliding_window")
_ASKED = (
    *("get_supported_head_sizes", "supports_head_size", "supports_sink", "supports_sliding_window"),
    *("supports_non_causal", "supports_batch_invariance"),
)
"""Questions that are handed on as they are."""


def _has_triton() -> bool:
    from vllm.triton_utils import HAS_TRITON

    return HAS_TRITON


def _has_flash_attn() -> bool:
    from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available

    return is_flash_attn_varlen_func_available()


def _has_cache_write() -> bool:
    return hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash")


_NEEDED: dict[str, tuple[Callable[[], bool], str]] = {
    "TRITON_ATTN": (_has_triton, "Triton, which this vLLM has turned off (no driver it knows)"),
    "FLASH_ATTN": (_has_flash_attn, "vLLM's flash-attention library, which its CPU build lacks"),
    "FLEX_ATTENTION": (_has_cache_write, "vLLM's CUDA operator to write a cache"),
}
"""What the kernels of vLLM's own backends are made of, besides vLLM's package."""


@functools.cache
def adapt(theirs: type) -> type[AttentionBackend]:
    """Our backend that runs `theirs`.

    Args:
        theirs: a subclass of vLLM's AttentionBackend for dense attention.

    Raises:
        UnsupportedConfiguration: it is for latents, or is sparse.
    """
    backend: Any = theirs
    if backend.is_mla() or backend.is_sparse():
        raise UnsupportedConfiguration(
            f"{theirs.__name__} is for latents or sparse attention, whose layers are vLLM's own; adapt "
            "a dense backend"
        )
    impl = type("Impl", (ForeignImpl,), {"theirs": theirs})
    builder = type("Builder", (ForeignBuilder,), {"theirs": theirs})
    facts = {
        "theirs": theirs,
        "get_impl_cls": staticmethod(lambda: impl),
        "get_builder_cls": staticmethod(lambda: builder),
        **{name: _handed_on(backend, name) for name in _ASKED},
    }
    return type(f"Foreign{theirs.__name__}", (ForeignBackend,), facts)


def __getattr__(name: str) -> type[AttentionBackend]:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if not name.isupper():
        raise AttributeError(f"{__name__} has no {name}; names of vLLM's backends are upper case")
    return adapt(AttentionBackendEnum[name].get_class())


class ForeignPlan:
    """A batch, planned by vLLM's builder when the first layer with so many heads runs.

    vLLM's builders ask for the query heads, which a group of ours does not tell.
    """

    def __init__(self, builder: ForeignBuilder, batch: CommonAttentionMetadata) -> None:
        given = {
            name: getattr(batch, name)
            for name in COMMON_METADATA_FIELDS
            if name in vllm_contract.CommonAttentionMetadata.__dataclass_fields__
        }
        self.batch = vllm_contract.CommonAttentionMetadata(**given)
        # Layers of others refuse the plan.
        self.block_size, self.views = batch.block_size, builder.views_of(batch)
        self._builder = builder
        self._planned: dict[int, Any] = {}

    def of(self, num_heads: int, num_blocks: int) -> tuple[Any, Any]:
        """vLLM's builder for layers with so many heads over so many pages, and its plan."""
        builder = self._builder.of(num_heads, num_blocks)
        if num_heads not in self._planned:
            self._planned[num_heads] = builder.build(0, self.batch)
        return builder, self._planned[num_heads]


class ForeignBuilder(AttentionMetadataBuilder[ForeignPlan]):
    """Keeps one of vLLM's builders per number of query heads and pages."""

    theirs: ClassVar[Any]

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._made: dict[tuple[int, int], Any] = {}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ForeignPlan:
        return ForeignPlan(self, common_attn_metadata)

    def of(self, num_heads: int, num_blocks: int) -> Any:
        """vLLM's builder for layers with so many heads over so many pages."""
        kind = num_heads, num_blocks
        if kind not in self._made:
            spec: Any = self.kv_cache_spec
            facts = {name: getattr(spec, name) for name in _SPEC_FACTS if hasattr(spec, name)}
            their_spec = getattr(vllm_specs, type(spec).__name__)(**facts)
            view = _engine_view(self.vllm_config, num_heads, spec, num_blocks)
            with set_current_vllm_config(view):
                self._made[kind] = self.theirs.get_builder_cls()(
                    their_spec, self.layer_names, view, self.device
                )
        return self._made[kind]


class ForeignImpl(AttentionImpl[ForeignPlan]):
    """One layer: vLLM's impl, and its cache write before it."""

    theirs: ClassVar[Any]

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
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        extras = {} if sinks is None else {"sinks": sinks}
        with set_current_vllm_config(_engine_view(VllmConfig(), num_heads)):
            self._impl = self.theirs.get_impl_cls()(
                num_heads,
                head_size,
                scale,
                self.num_kv_heads,
                alibi_slopes,
                sliding_window,
                kv_cache_dtype,
                logits_soft_cap,
                str(AttentionType(attn_type)),
                kv_sharing_target_layer_name,
                **extras,
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self._impl.process_weights_after_loading(act_dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ForeignPlan,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write, then attend; a profiling run, which has no plan, gets zeros.

        Raises:
            UnsupportedConfiguration: a quantised output is asked for.
        """
        self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        builder, plan = attn_metadata.of(self.num_heads, kv_cache.shape[0])
        seen = SimpleNamespace(
            **{
                f"_{x}_scale{y}": getattr(layer, f"_{x}_scale{y}")
                for x in "qkv"
                for y in ("", "_float")
            },
            # CPU_ATTN's builder finds vLLM's layers by their names to tell them its instruction set.
            isa=getattr(builder, "isa", None),
        )
        if key is not None and not self.theirs.forward_includes_kv_cache_update:
            slots = attn_metadata.batch.slot_mapping
            self._impl.do_kv_cache_update(seen, key, value, kv_cache, slots)
        self._impl.forward(seen, query, key, value, kv_cache, plan, output)
        return output


class ForeignBackend(AttentionBackend):
    """What selection asks, answered by `theirs`; made by `adapt`."""

    theirs: ClassVar[Any]
    forward_includes_kv_cache_update = True
    accept_output_buffer = True

    @classmethod
    def get_name(cls) -> str:
        return f"vllm:{cls.theirs.get_name()}"

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, kv_cache_spec: KVCacheSpec | None = None
    ) -> list[int | MultipleOf]:
        sizes = cls.theirs.get_supported_kernel_block_sizes()
        return [s if isinstance(s, int) else MultipleOf(s.base) for s in sizes]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        layouts = cls.theirs.supported_kv_cache_layouts()
        return None if layouts is None else tuple(KVCacheLayout[x.name] for x in layouts)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.theirs.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or (
            kv_cache_dtype in _FORMATS and cls.theirs.supports_kv_cache_dtype(kv_cache_dtype)
        )

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER and cls.theirs.supports_attn_type(attn_type)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        if capability.platform == "cpu" or current_platform.is_cpu():
            return capability.platform == "cpu" and current_platform.is_cpu()
        return cls.theirs.supports_compute_capability(capability)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        is_there, what = _NEEDED.get(cls.theirs.get_name(), (lambda: True, ""))
        return None if is_there() else f"vLLM's {cls.theirs.get_name()} needs {what}"


def _handed_on(theirs: Any, name: str) -> Any:
    def ask(cls: type, *args: Any) -> Any:
        return getattr(theirs, name)(*args)

    return classmethod(ask)


def _engine_view(
    config: Any, num_heads: int, spec: Any | None = None, num_blocks: int | None = None
) -> SimpleNamespace:
    """Our configuration with what vLLM's impls and builders ask of theirs besides.

    Args:
        config: ours.
        num_heads: query heads.
        spec: of the cache; None: an impl is made, which does not ask.
        num_blocks: pages there are, likewise.
    """
    model = SimpleNamespace(
        **{name: getattr(config.model_config, name) for name in ("dtype", "max_model_len")},
        is_mm_prefix_lm=False,
        rswa_window=None,
        get_num_attention_heads=lambda parallel_config: num_heads,
    )
    if spec is not None:
        model.get_num_kv_heads = lambda parallel_config: spec.num_kv_heads
        model.get_head_size = lambda: spec.head_size
    cache = SimpleNamespace(
        block_size=config.cache_config.block_size, cache_dtype="auto", num_gpu_blocks=num_blocks
    )
    compilation = SimpleNamespace(
        static_forward_context={},
        cudagraph_mode=CUDAGraphMode.NONE,
        cudagraph_capture_sizes=[],
        max_cudagraph_capture_size=0,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=cache,
        parallel_config=config.parallel_config,
        scheduler_config=config.scheduler_config,
        speculative_config=config.speculative_config,
        compilation_config=compilation,
        attention_config=AttentionConfig(),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )
