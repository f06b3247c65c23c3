"""PagedLayer: what attention layers have in common, whether they keep keys and values or latents.

In: a layer's name, place and scales. Out: a builder and plans for its batches, scales that are checked
when a checkpoint is loaded, and the handle by which a compiled graph finds the layer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attnkit.arguments import check_count, check_dtype, check_kind, check_text
from attnkit.batch_checks import (
    check_batch,
    check_freed,
    check_lengths,
    check_masks,
    check_written_once,
)
from attnkit.compiled import current_forward_context, new_handle, order_token
from attnkit.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImplBase,
    AttentionMetadataBuilder,
    AttentionSpec,
    AttentionType,
    CacheConfig,
    CommonAttentionMetadata,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
)
from attnkit.errors import BackendError, BatchError, ConfigurationError
from attnkit.output_quant import QuantizedOutput
from attnkit.selection import Choose, Selection
from attnkit.step_checks import check_plan, check_quantized

_COUNTER = itertools.count()
_SCALES = ("_q_scale", "_k_scale", "_v_scale")


def without_gradients(function: Callable[..., None]) -> Callable[..., None]:
    """`torch.no_grad` for what runs in every layer of a step: where no gradient is recorded anyway it
    costs nothing, and torch's decorator as much as a small kernel."""

    @functools.wraps(function)
    def run(*args: Any) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                function(*args)
        else:
            function(*args)

    return run


class PagedLayer(nn.Module):
    """A layer over a paged cache, for inference: no gradient flows through it.

    Attributes:
        backend: the chosen backend class.
        selection: how it was chosen; print it.
        impl: the backend's impl, which runs the layer.
        layer_name: unique name; keys of caches and plans.
        cache_name: whose cache it reads: its own, or that of the layer it shares.
        num_kv_heads: heads of the cache.
        num_heads: query heads.
        head_size_v: of a head of the output.
        attn_type: an `AttentionType`.
        return_lse: the layer returns its log-sum-exp too.
        sliding_window: keys a query sees, itself included; None: no window.
        attention_chunk_size: it sees those of its own chunk of positions alone; None: no chunks.
        use_non_causal: its batches may have `causal` False.
        use_mm_prefix: its batches may have `mm_req_doc_ranges`.
        use_rswa: its batches have `rswa_prefix_lens`.
        use_tree_mask: its batches may have a `tree_mask`.
        dtype, device: of its tensors.
        block_size: tokens in a kernel block.
        tokens_per_state: tokens that a row of the cache stands for.
        vllm_config: engine configuration handed to the builder.
    """

    backend: type[AttentionBackend]
    selection: Selection
    impl: AttentionImplBase[Any]
    cache_name: str
    num_heads: int
    head_size_v: int
    attn_type: AttentionType
    return_lse: bool
    _passes_output: bool = True

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    use_non_causal: bool = False
    use_mm_prefix: bool = False
    use_rswa: bool = False
    use_tree_mask: bool = False
    tokens_per_state: int = 1

    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _v_scale: torch.Tensor
    _prob_scale: torch.Tensor
    _order: torch.Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float

    def __init__(
        self,
        *,
        layer_name: str | None,
        num_kv_heads: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block_size: int,
        vllm_config: Any | None,
        choose: Choose,
        scales_per_head: bool = False,
    ) -> None:
        """
        Args:
            layer_name: None: one is made up.
            num_kv_heads: heads of the cache.
            dtype: of the layer's tensors.
            device: where it runs.
            block_size: tokens in a kernel block.
            vllm_config: None: the defaults, for this dtype and block size.
            choose: who will choose the backend.
            scales_per_head: `_q_scale`, `_k_scale` and `_v_scale` have one entry per KV head.

        Raises:
            ConfigurationError: a value is not allowed.
        """
        super().__init__()
        check_count("block_size", block_size)
        check_text("layer_name", layer_name, optional=True)
        check_dtype(dtype)
        check_kind("choose", choose, Callable, "a function like attnkit.selection.select")  # type: ignore[arg-type]
        _check_vllm_config(vllm_config)
        self.layer_name = f"attention.{next(_COUNTER)}" if layer_name is None else layer_name
        self.cache_name = self.layer_name
        self.num_kv_heads = num_kv_heads
        self.dtype, self.device, self.block_size = dtype, torch.device(device), block_size
        if vllm_config is None:
            vllm_config = VllmConfig(
                model_config=ModelConfig(dtype=dtype),
                cache_config=CacheConfig(block_size=block_size),
            )
        self.vllm_config = vllm_config
        self._scale_shape = (num_kv_heads,) if scales_per_head else ()
        for name in _SCALES:
            ones = torch.ones(self._scale_shape, device=self.device)
            self.register_buffer(name, ones, persistent=False)
            setattr(self, f"{name}_float", _host_scale(ones))
        self.register_buffer("_prob_scale", torch.ones((), device=self.device), persistent=False)
        self.register_buffer("_order", order_token(self.device), persistent=False)
        self._builder: AttentionMetadataBuilder[Any] | None = None
        self._handle = new_handle(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy is a layer of its own: under the handle of the original, compiled code would run that.
        super().__setstate__(state)
        self._handle = new_handle(self)

    def _impl_cls(self, kind: type[AttentionImplBase[Any]]) -> Any:
        """The chosen backend's impl class.

        Raises:
            BackendError: it is none for such layers.
        """
        given = self.backend.get_impl_cls()
        if not (isinstance(given, type) and issubclass(given, kind)):
            raise BackendError(
                f"get_impl_cls of backend {self.selection.name} gave {given!r}; let it give a subclass "
                f"of {kind.__name__}"
            )
        return given

    def _parallelism(self) -> dict[str, Any]:
        """What the engine's configuration asks of a backend, as fields of the request for one."""
        parallel = getattr(self.vllm_config, "parallel_config", ParallelConfig())
        return {
            "use_dcp": parallel.decode_context_parallel_size > 1,
            "use_pcp": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        }

    def get_kv_cache_spec(self, block_size: int | None = None) -> AttentionSpec | None:
        """What this layer keeps in the cache; None if nothing."""
        raise NotImplementedError

    def _spec(self, block_size: int) -> AttentionSpec:
        """The cache this layer reads, whoever owns it."""
        raise NotImplementedError

    def _run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: Any | None,
        *scales: torch.Tensor | None,
    ) -> None:
        """Fill `output` and `lse` as far as the plan goes; None for both cache and plan: profile."""
        raise NotImplementedError

    def make_builder(
        self, layer_names: Sequence[str] | None = None
    ) -> AttentionMetadataBuilder[Any]:
        """A builder for a group of layers equal to this one.

        Args:
            layer_names: of the group; None: this layer alone.

        Raises:
            BackendError: the backend gives no builder class, or one that wants more than a layer knows.
        """
        names = [self.layer_name] if layer_names is None else list(layer_names)
        spec = self._spec(self.block_size)
        builder_cls = self.backend.get_builder_cls()
        if not isinstance(builder_cls, type):
            raise BackendError(
                f"get_builder_cls of backend {self.selection.name} gave {builder_cls!r}; let it give a "
                "subclass of AttentionMetadataBuilder"
            )
        if getattr(builder_cls, "requires_block_table_width", False):
            raise BackendError(
                f"the builder of backend {self.selection.name} requires_block_table_width, which no "
                "layer knows before its first batch; let it read block_table_tensor.shape in build"
            )
        return builder_cls(spec, names, self.vllm_config, self.device)

    def get_cudagraph_support(self) -> AttentionCGSupport:
        """Which steps of this layer can be captured as a graph."""
        builder_cls = self.backend.get_builder_cls()
        return builder_cls.get_cudagraph_support(self.vllm_config, self._spec(self.block_size))

    def build(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Plan a batch; the plan serves every layer equal to this one for this step.

        Args:
            common_attn_metadata: from `attnkit.make_batch`, or an engine's own.

        Raises:
            BatchError: the batch's tensors are too short for its tokens or requests, or of other
                dtypes than `CommonAttentionMetadata` says; or its lengths contradict each other; or it
                has a mask that the layer was not built for, or the null block where the layer looks,
                or, looked at on a CPU only, tokens that would overwrite each other.
        """
        check_batch(common_attn_metadata, self.block_size)
        self._check_masks(common_attn_metadata)
        if (
            self.attn_type is AttentionType.DECODER
        ):  # Others have other keys than the batch's tokens.
            check_lengths(common_attn_metadata, self.block_size)
            check_freed(common_attn_metadata, self)
            check_written_once(common_attn_metadata, self, self.block_size)
        if common_attn_metadata.block_size is None:  # So that the plan will say it.
            common_attn_metadata = common_attn_metadata.replace(block_size=self.block_size)
        if self._builder is None:
            self._builder = self.make_builder()
        return self._builder.build(0, common_attn_metadata)

    def _check_masks(self, batch: CommonAttentionMetadata) -> None:
        """Whether the layer was built for the batch's masks; layers of a kind may want more."""
        check_masks(batch, self)
        if batch.dcp_local_seq_lens is not None and not self._parallelism()["use_dcp"]:
            raise BatchError(
                f"the batch has dcp_local_seq_lens, and layer {self.layer_name} looks for every key in "
                "its own cache; build it for a decode_context_parallel_size above 1, or leave them out"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Call once when a checkpoint is loaded: scales are checked, and host copies follow them.

        Scales go into `_q_scale`, `_k_scale` and `_v_scale` before: `fill_` or `copy_` in place, or a
        tensor of any float dtype assigned. Formats without a scale from the layer do not read them.

        Raises:
            ConfigurationError: a scale is not finite, not above zero, or of another shape than one
                number or, with `use_per_head_quant_scales`, one per KV head; nothing was changed.
        """
        scales = {name: self._checked_scale(name) for name in _SCALES}
        for name, scale in scales.items():
            setattr(self, name, scale)
            setattr(self, f"{name}_float", _host_scale(scale))
        self.impl.process_weights_after_loading(act_dtype)

    def _checked_scale(self, name: str) -> torch.Tensor:
        scale: torch.Tensor = getattr(self, name)
        # One number may come from a checkpoint as shape (1,).
        if scale.shape != self._scale_shape and (self._scale_shape or scale.numel() != 1):
            per_head = f"({self.num_kv_heads},) for one per KV head"
            wanted = per_head if self._scale_shape else "() for one number"
            hint = "" if self._scale_shape else f"; {per_head} needs use_per_head_quant_scales=True"
            raise ConfigurationError(
                f"{name} of layer {self.layer_name} has shape {tuple(scale.shape)}; give {wanted}{hint}"
            )
        scale = scale.detach().to(self.device, torch.float32).reshape(self._scale_shape)
        # Below its smallest normal number float32 is zero on a GPU, and dividing by it NaN.
        tiny = torch.finfo(torch.float32).tiny
        if not bool((torch.isfinite(scale) & (scale >= tiny)).all()):
            raise ConfigurationError(
                f"{name} of layer {self.layer_name} is {scale.tolist()}; give finite numbers above 0 "
                f"({tiny:.3g} at least)"
            )
        return scale

    def _step_of(
        self, kv_cache: torch.Tensor | None, attn_metadata: Any | None
    ) -> tuple[torch.Tensor | None, Any | None]:
        """Cache and plan of a call: its own, else those of the `forward_context` around it."""
        context = current_forward_context()
        if context is None:
            self._check_outside(kv_cache, attn_metadata)
        else:
            if attn_metadata is None:
                attn_metadata = context.plan_of(self.layer_name)
            if kv_cache is None:
                kv_cache = context.kv_caches.get(self.cache_name)
        if isinstance(attn_metadata, torch.Tensor):
            raise BatchError(
                f"layer {self.layer_name} got a tensor as its plan; the cache comes first, then "
                "what layer.build(batch) gives"
            )
        if kv_cache is not None and not isinstance(kv_cache, torch.Tensor):
            raise BatchError(
                f"layer {self.layer_name} got {type(kv_cache).__name__} as its cache; pass its tensor, "
                f"cache[{self.cache_name!r}], and the plan behind it"
            )
        return kv_cache, attn_metadata

    def _check_outside(self, kv_cache: torch.Tensor | None, attn_metadata: Any | None) -> None:
        """Whether a call that no `forward_context` is around has what it needs."""
        if attn_metadata is None and kv_cache is not None:
            raise BatchError(
                f"layer {self.layer_name} got a cache and no plan; pass layer.build(batch) too, or "
                "neither for a profiling run"
            )

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: Any | None,
        quantized: QuantizedOutput | None,
        *,
        flat: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The end of every `forward`: memory for output and LSE, filled by `_fill`, or in a compiled
        graph by the node that stands for it.

        Args:
            query, key, value: of the layer's shapes.
            quantized: write codes there and return them as the output.
            flat: the output's heads lie in one dimension, as those of the query that was given.

        Returns:
            The output; with `return_lse` also the lse.

        Raises:
            ConfigurationError: a compiled call brought what a graph cannot carry.
            BatchError: memory for codes, cache or plan are not of this step.
        """
        num_tokens = query.shape[0]
        scales: tuple[torch.Tensor | None, ...] = ()
        if quantized is None:
            output = query.new_empty(num_tokens, self.num_heads, self.head_size_v)
        else:
            check_quantized(self, quantized, num_tokens)
            output, scales = quantized.codes, (quantized.scale, quantized.block_scale)
        lse = None
        if self.return_lse:
            lse = query.new_full((num_tokens, self.num_heads), -math.inf, dtype=torch.float32)
        if torch.compiler.is_compiling():
            if not (kv_cache is None and attn_metadata is None and quantized is None):
                raise ConfigurationError(
                    "a compiled graph cannot carry a cache, a plan or memory for codes; leave them "
                    "out and put attnkit.forward_context(...) around the compiled call"
                )
            torch.ops.attnkit.attention(query, key, value, output, lse, self._order, self._handle)
        else:
            self._fill(query, key, value, output, lse, kv_cache, attn_metadata, *scales)
        if flat and quantized is None:
            output = output.flatten(1)
        return output if lse is None else (output, lse)

    def _fill(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: Any | None,
        *scales: torch.Tensor | None,
    ) -> None:
        """`_run`, and zeros in rows past the plan's tokens, which backends leave as they are; what the
        custom op stands for. `scales` are the two of a quantised output, which is then codes.

        Raises:
            BatchError: cache and plan are not of this step.
        """
        kv_cache, plan = self._step_of(kv_cache, attn_metadata)
        if plan is not None:
            check_plan(self, plan, self._plan_cls, self._plan_views)
        self._run(query, key, value, output, lse, kv_cache, plan, *scales)
        num_planned = getattr(plan, "num_actual_tokens", None)
        if num_planned is not None and num_planned < output.shape[0]:
            zero_rows(num_planned, output, *scales)

    @functools.cached_property
    def _plan_cls(self) -> type | None:
        return self.backend.get_builder_cls().get_plan_cls()

    @functools.cached_property
    def _plan_views(self) -> tuple[str, ...]:
        return self.backend.get_builder_cls().get_views(self._spec(self.block_size))


def _check_vllm_config(vllm_config: Any | None) -> None:
    """An engine's own object has some of the parts of ours; which ones, its builders know."""
    parts = [part.name for part in dataclasses.fields(VllmConfig)]
    if vllm_config is not None and not any(hasattr(vllm_config, part) for part in parts):
        raise ConfigurationError(
            f"vllm_config {vllm_config!r} has none of {', '.join(parts)}; give a VllmConfig, ours or "
            "vLLM's, or None"
        )


def _host_scale(scale: torch.Tensor) -> float:
    """The host copy of a scale. No one number stands for several: NaN shows where it is used as one."""
    return float(scale) if scale.dim() == 0 else math.nan


def zero_rows(first: int, output: torch.Tensor, *scales: torch.Tensor | None) -> None:
    """Zeros in the rows of an output from `first` on; of codes also in their block scales, the second of
    `scales`."""
    for written in (output, *scales[1:]):
        if written is not None:
            written[first:].zero_()


def logical_page(
    backend: type[AttentionBackend], spec: AttentionSpec
) -> tuple[int, int, int, torch.dtype] | None:
    """What a block of the layer's cache looks like; None for backends with a shape of their own."""
    try:
        backend.get_kv_cache_shape(1, spec.block_size, spec.num_kv_heads, spec.head_size)
    except NotImplementedError:
        return spec.head_slots, spec.num_states, spec.content_size, spec.dtype
    return None
