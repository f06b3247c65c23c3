"""Attention: one layer, from projected q, k, v to its output, through whichever backend it chose.

In: built once with the layer's static facts; then, per step, q, k, v, the layer's cache and the plan
its builder made for the batch. Out: the attention output, with the log-sum-exp if asked. The layer
has no parameters of its own: it writes K and V, runs the impl and returns.

Under torch.compile the whole of it is one opaque node (`compiled`); plan and cache then come from the
`forward_context` around the compiled call, since a graph cannot carry them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from attnkit.arguments import check_count, check_flags, check_heads, check_number, check_text
from attnkit.backends.wrappers import check_chunk_size, chunked_local
from attnkit.contract import (
    AttentionBackend,
    AttentionImpl,
    AttentionSpec,
    AttentionType,
    AttentionVariant,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DeviceCapability,
    FullAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
    kv_cache_torch_dtype,
)
from attnkit.errors import BackendError, BatchError, ConfigurationError
from attnkit.output_quant import QuantizedOutput
from attnkit.paged_layer import PagedLayer, logical_page, without_gradients, zero_rows
from attnkit.selection import AttentionRequest, Choose, select
from attnkit.step_checks import as_heads, check_cache, check_num_keys, check_num_rows


class Attention(PagedLayer):
    """One attention layer over a paged cache, for inference: no gradient flows through it.

    Attributes:
        backend: the chosen backend class.
        selection: how it was chosen; print it.
        impl: the backend's impl, which runs the layer.
        layer_name: unique name; keys of caches and plans.
        cache_name: whose cache it reads: its own, or that of the layer it shares.
    """

    impl: AttentionImpl[Any]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        *,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        head_size_v: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: str | type[AttentionBackend] = "auto",
        layer_name: str | None = None,
        block_size: int = 16,
        return_lse: bool = False,
        use_non_causal: bool = False,
        use_kv_connector: bool = False,
        use_mm_prefix: bool = False,
        use_rswa: bool = False,
        use_tree_mask: bool = False,
        attention_chunk_size: int | None = None,
        use_per_head_quant_scales: bool = False,
        use_batch_invariant: bool = False,
        vllm_config: Any | None = None,
        choose: Choose = select,
    ) -> None:
        """Choose a backend and build its impl.

        Args:
            num_heads: query heads.
            head_size: of queries and keys.
            scale: factor on q.k; None: head_size ** -0.5.
            num_kv_heads: divides num_heads; None: as many.
            alibi_slopes: one per query head.
            sliding_window: keys a query sees, itself included; None: all.
            kv_cache_dtype: cache format; "auto": the dtype of the layer.
            logits_soft_cap: c in c * tanh(score / c); None: off.
            attn_type: an `AttentionType`.
            kv_sharing_target_layer_name: read that layer's cache and write none.
            sinks: float (num_heads,), one more logit per head in the denominator.
            use_alibi_sqrt: the square-root form of ALiBi.
            head_size_v: of values; None: as keys.
            dtype: of q, k, v and the output.
            device: where it runs.
            backend: a name, a class, or "auto".
            layer_name: None: one is made up.
            block_size: tokens in a kernel block.
            return_lse: return (output, lse).
            use_non_causal: batches with `causal` False will come.
            use_kv_connector: somebody else will copy pages out of and into the cache.
            use_mm_prefix: batches with `mm_req_doc_ranges` will come.
            use_rswa: the window leaves each request's prefix visible (`rswa_prefix_lens` of a batch).
            use_tree_mask: batches with a `tree_mask` will come: drafts that branch.
            attention_chunk_size: a query sees the keys of its own chunk of positions only (position //
                attention_chunk_size); None: no chunks. Any backend does it (`chunked_local`).
            use_per_head_quant_scales: `_q_scale`, `_k_scale` and `_v_scale` have one entry per KV head
                instead of one for all.
            use_batch_invariant: a request's bits may not depend on which others are in its batch.
            vllm_config: engine configuration handed to the builder; None: the defaults for this
                dtype and block size. Of context parallelism, which a backend must do, it is read here.
            choose: who chooses the backend; `functools.cache(select)` for many layers that ask alike.

        Raises:
            ConfigurationError: a value is not allowed.
            BackendError: no such backend, or it cannot serve this layer; with every reason.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(num_heads, num_kv_heads, head_size, head_size_v)
        check_flags(
            {
                "use_alibi_sqrt": use_alibi_sqrt,
                "return_lse": return_lse,
                "use_non_causal": use_non_causal,
                "use_kv_connector": use_kv_connector,
                "use_mm_prefix": use_mm_prefix,
                "use_rswa": use_rswa,
                "use_tree_mask": use_tree_mask,
                "use_per_head_quant_scales": use_per_head_quant_scales,
                "use_batch_invariant": use_batch_invariant,
            }
        )
        check_text("kv_sharing_target_layer_name", kv_sharing_target_layer_name, optional=True)
        check_number("scale", scale, optional=True)
        scale = 1 / math.sqrt(head_size) if scale is None else scale
        # Whatever the backend checks, a layer's variant is checked, and before one is chosen.
        variant = AttentionVariant.from_impl_args(
            num_heads=num_heads,
            scale=scale,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            sinks=sinks,
            use_alibi_sqrt=use_alibi_sqrt,
        )
        sliding_window = variant.sliding_window
        get_kv_quant_mode(kv_cache_dtype)  # An unknown format is the user's mistake, not a refusal.
        capability = DeviceCapability.of(device)
        super().__init__(
            layer_name=layer_name,
            num_kv_heads=num_kv_heads,
            dtype=dtype,
            device=device,
            block_size=block_size,
            vllm_config=vllm_config,
            choose=choose,
            scales_per_head=use_per_head_quant_scales,
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.scale = scale
        self.sliding_window = sliding_window
        self.attn_type = variant.attn_type
        self.kv_cache_dtype = kv_cache_dtype
        self._needs_cache = self.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        if kv_sharing_target_layer_name == self.layer_name or (
            kv_sharing_target_layer_name is not None and not self._needs_cache
        ):
            raise ConfigurationError(
                f"layer {self.layer_name} ({self.attn_type}) cannot share the cache of "
                f"{kv_sharing_target_layer_name}; layers with a cache share that of another layer"
            )
        self.cache_name = kv_sharing_target_layer_name or self.layer_name
        self.use_mm_prefix = use_mm_prefix
        self.use_non_causal = use_non_causal
        if use_rswa and sliding_window is None:
            raise ConfigurationError(
                f"use_rswa is about a window beside a prefix, and layer {self.layer_name} has no "
                "sliding_window; give one, or leave it out"
            )
        self.use_rswa = use_rswa
        self.use_tree_mask = use_tree_mask
        self.attention_chunk_size = attention_chunk_size
        if attention_chunk_size is not None:
            self._check_chunks(attention_chunk_size)
        self.return_lse = return_lse

        self.selection = choose(
            AttentionRequest(
                head_size=head_size,
                head_size_v=self.head_size_v,
                dtype=dtype,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                kv_cache_dtype=kv_cache_dtype,
                block_size=block_size,
                has_sink=sinks is not None,
                use_per_head_quant_scales=use_per_head_quant_scales,
                device_capability=capability,
                attn_type=self.attn_type.value,
                has_sliding_window=sliding_window is not None,
                use_non_causal=use_non_causal,
                use_batch_invariant=use_batch_invariant,
                use_kv_connector=use_kv_connector,
                use_mm_prefix=use_mm_prefix,
                use_rswa=use_rswa,
                use_tree_mask=use_tree_mask,
                use_alibi=alibi_slopes is not None,
                use_alibi_sqrt=use_alibi_sqrt,
                has_logits_soft_cap=bool(logits_soft_cap),
                return_lse=return_lse,
                **self._parallelism(),
            ),
            backend,
        )
        self.backend = self.selection.backend
        if attention_chunk_size is not None:
            self.backend = chunked_local(self.backend)
        extras: dict[str, Any] = {}
        if variant.sinks is not None:
            extras["sinks"] = variant.sinks.to(self.device)
        if use_alibi_sqrt:
            extras["use_alibi_sqrt"] = True
        if self.head_size_v != head_size:
            extras["head_size_v"] = self.head_size_v
        impl_cls = self._impl_cls(AttentionImpl)
        self.impl = impl_cls(
            num_heads,
            head_size,
            self.scale,
            num_kv_heads,
            None if variant.alibi_slopes is None else variant.alibi_slopes.tolist(),
            sliding_window,
            kv_cache_dtype,
            variant.logits_soft_cap,
            self.attn_type.value,
            kv_sharing_target_layer_name,
            **extras,
        )
        if return_lse:
            self.impl.need_to_return_lse_for_decode = True
        # Older impls return a new tensor unless their backend accepts a buffer.
        parameter = inspect.signature(impl_cls.forward).parameters.get("output")
        is_older = parameter is not None and parameter.default is not inspect.Parameter.empty
        self._passes_output = not is_older or self.backend.accept_output_buffer
        shares_cache = kv_sharing_target_layer_name is not None
        self._writes_cache = (
            self._needs_cache
            and not shares_cache
            and not self.backend.forward_includes_kv_cache_update
        )
        # How much of an encoder's output a step writes, the impl knows if it does the writing.
        is_cross = self.attn_type is AttentionType.ENCODER_DECODER
        self._checks_keys = self._writes_cache or not (shares_cache or is_cross)
        self._page = (
            logical_page(self.backend, self._spec(block_size)) if self._needs_cache else None
        )

    def _check_chunks(self, chunk_size: int) -> None:
        longest = torch.iinfo(torch.int32).max  # Of a request: lengths are int32.
        check_count("attention_chunk_size", chunk_size, highest=longest)
        check_chunk_size(chunk_size, self.block_size)
        if self.attn_type is not AttentionType.DECODER:
            raise ConfigurationError(
                f"attention_chunk_size is for decoder layers, and layer {self.layer_name} is "
                f"{self.attn_type}; leave it out"
            )
        others = {
            "sliding_window": self.sliding_window is not None,
            "use_mm_prefix": self.use_mm_prefix,
            "use_tree_mask": self.use_tree_mask,
        }
        for name in (name for name, given in others.items() if given):
            raise ConfigurationError(
                f"attention_chunk_size and {name} exclude each other; give layer {self.layer_name} one"
            )

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_size={self.head_size}, backend={self.selection.name}"
        )

    def get_kv_cache_spec(self, block_size: int | None = None) -> AttentionSpec | None:
        """What this layer keeps in the cache; None if nothing (encoders, layers that share).

        Args:
            block_size: tokens in a block; None: the layer's kernel block size.

        Raises:
            ConfigurationError: cross attention, whose spec needs the encoder's longest output: make
                a `CrossAttentionSpec`.
        """
        if self.cache_name != self.layer_name:
            return None
        if self.attn_type is AttentionType.ENCODER_DECODER:
            raise ConfigurationError(
                "a cross-attention layer cannot know the encoder's longest output; "
                "make a CrossAttentionSpec yourself"
            )
        if self.attn_type is not AttentionType.DECODER:
            return None
        return self._spec(self.block_size if block_size is None else block_size)

    def _spec(self, block_size: int) -> AttentionSpec:
        """The cache this layer reads, whoever owns it."""
        facts: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "dtype": kv_cache_torch_dtype(self.kv_cache_dtype, self.dtype),
            "kv_quant_mode": get_kv_quant_mode(self.kv_cache_dtype),
        }
        if self.attention_chunk_size is not None:
            spec: AttentionSpec = ChunkedLocalAttentionSpec(
                attention_chunk_size=self.attention_chunk_size, **facts
            )
        elif self.attn_type is AttentionType.ENCODER_DECODER:
            # How long encoder outputs get is the cache's matter; plans want no more than a bound.
            longest = self.vllm_config.model_config.max_model_len
            spec = CrossAttentionSpec(max_encoder_tokens=longest, **facts)
        elif self.sliding_window is None:
            spec = FullAttentionSpec(**facts)
        elif self.use_rswa:
            spec = RSWASpec(rswa_window=self.sliding_window, **facts)
        else:
            spec = SlidingWindowSpec(sliding_window=self.sliding_window, **facts)
        return self.backend.customize_spec(spec)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None = None,
        attn_metadata: Any | None = None,
        quantized: QuantizedOutput | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Write K and V into the cache, attend, return.

        Args:
            query: (num_tokens, num_heads, head_size), or the last two flattened.
            key: (num_tokens, num_kv_heads, head_size), likewise; None where the cache is shared, and
                in cross attention when the encoder's output is in the cache already.
            value: (num_tokens, num_kv_heads, head_size_v), likewise.
            kv_cache: this layer's cache; None: from `forward_context`.
            attn_metadata: this step's plan; None: from `forward_context`, and outside of one a
                profiling run, which returns zeros (and an lse of -inf).
            quantized: write codes there and return them as the output.

        Returns:
            The output, shaped as `query` with head_size_v; with `return_lse` also the lse, float32
            (num_tokens, num_heads), natural logarithm.

        Raises:
            BatchError: a tensor does not fit the layer or the plan; nothing has been written.
            UnsupportedConfiguration: the backend does not write such codes (`quantized`).
        """
        q = as_heads(self, "query", query, self.num_heads, self.head_size)
        k = v = None
        if key is not None and value is not None:
            k = as_heads(self, "key", key, self.num_kv_heads, self.head_size)
            v = as_heads(self, "value", value, self.num_kv_heads, self.head_size_v)
            if k.shape[0] != v.shape[0]:
                raise BatchError(
                    f"layer {self.layer_name} got {k.shape[0]} keys and {v.shape[0]} values; "
                    "give one of each per token"
                )
        elif key is not None or value is not None or not self._runs_without_kv():
            raise BatchError(
                f"layer {self.layer_name} got {'no key' if key is None else 'no value'}, and its K and "
                "V are in no other layer's cache; pass both, or set kv_sharing_target_layer_name"
            )
        return self._attend(q, k, v, kv_cache, attn_metadata, quantized, flat=query.dim() == 2)

    def _runs_without_kv(self) -> bool:
        return self.cache_name != self.layer_name or (
            self.attn_type is AttentionType.ENCODER_DECODER
        )

    @without_gradients
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
        if attn_metadata is None:
            zero_rows(0, output, *scales)
            return
        self._check_step(query, key, kv_cache, attn_metadata)
        if kv_cache is None:
            kv_cache = query.new_empty(0)
        if self._writes_cache and key is not None:
            assert value is not None
            self.impl.do_kv_cache_update(self, key, value, kv_cache, attn_metadata.slot_mapping)
        result = self.impl.forward(
            self,
            query,
            key,  # type: ignore[arg-type]
            value,  # type: ignore[arg-type]
            kv_cache,
            attn_metadata,
            *((output,) if self._passes_output else ()),
            *scales,
        )
        if lse is not None and not isinstance(result, tuple):
            raise BackendError(
                f"backend {self.selection.name} says it can return the LSE, but its forward returned "
                "the output alone; return (output, lse) when need_to_return_lse_for_decode is set"
            )
        if isinstance(result, tuple):
            result, rows = result
            if lse is not None:
                if rows.shape[1:] != lse.shape[1:]:
                    raise BackendError(
                        f"backend {self.selection.name} returned an LSE of shape {tuple(rows.shape)}; "
                        f"return (num_tokens, {self.num_heads})"
                    )
                if not self.impl.lse_base_on_e:
                    rows = rows * math.log(2)
                lse[: rows.shape[0]] = rows
        if not self._passes_output:
            output.copy_(result.view_as(output))

    def _check_step(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: Any,
    ) -> None:
        """Whether tensors, cache and plan are of one step, by their shapes alone."""
        check_num_rows(self, query, attn_metadata)
        if key is not None and self._checks_keys:
            check_num_keys(self, key, attn_metadata)
        if self._needs_cache:
            check_cache(self, kv_cache, self._page)
