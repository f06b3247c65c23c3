"""MLAAttention: one layer over latents, from queries, latents and rotated parts to its output.

In: built once with the layer's sizes and its `kv_b_proj`; then, per step, q, kv_c, k_pe, the layer's
latent cache and the plan its builder made. Out: the attention output per head, with the log-sum-exp if
asked. The layer writes latents, sends prefills to the impl's `forward_mha`, absorbs the queries of
decodes for `forward_mqa`, and turns what these attended to into values.

Under torch.compile the whole of it is one opaque node, as of `Attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attnkit.arguments import check_attribute, check_count, check_flags, check_number
from attnkit.backends.wrappers import check_tokens_per_state, compressed
from attnkit.contract import (
    AttentionBackend,
    AttentionMetadataBuilder,
    AttentionSpec,
    AttentionType,
    CommonAttentionMetadata,
    DeviceCapability,
    MLAAttentionImpl,
    MLAAttentionSpec,
    MLADimensions,
    QuantKey,
    SparseIndexer,
    get_kv_quant_mode,
    kFp8StaticTensorSym,
    kv_cache_torch_dtype,
)
from attnkit.errors import (
    BackendError,
    BatchError,
    ConfigurationError,
    UnsupportedConfiguration,
)
from attnkit.kvcache.formats import LATENT_FORMATS
from attnkit.mla.impl import LatentImpl
from attnkit.mla.prefill_backend import MLAPrefillBackend
from attnkit.mla.projection import KvBProjection
from attnkit.mla.sparse import SparseLatentImpl, SparseMLAMetadataBuilder, lists_of
from attnkit.output_quant import QuantizedOutput
from attnkit.paged_layer import PagedLayer, logical_page, without_gradients, zero_rows
from attnkit.prefill_selection import select_prefill
from attnkit.selection import AttentionRequest, Choose, select
from attnkit.step_checks import as_heads, check_cache, check_num_rows, check_num_written


class MLAAttention(PagedLayer):
    """One attention layer over a paged cache of latents; always a causal decoder.

    Attributes:
        dimensions: sizes of latents and heads.
        projection: `kv_b_proj` as plain weights.
        num_heads: query heads.
        tokens_per_state: tokens that a row of the cache stands for.
        indexer: tells each query which keys to attend to; None: to all.
        prefill_selection: who attends for prefills, and how it was chosen; print it. None: the backend
            does it by itself.
        head_size: numbers in a row of the cache.
        head_size_v: of a head of the output.
    """

    impl: MLAAttentionImpl[Any]

    def __init__(
        self,
        num_heads: int,
        dimensions: MLADimensions,
        kv_b_proj: nn.Module,
        scale: float | None = None,
        *,
        kv_cache_dtype: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: str | type[AttentionBackend] = "auto",
        layer_name: str | None = None,
        block_size: int = 16,
        return_lse: bool = False,
        use_kv_connector: bool = False,
        use_batch_invariant: bool = False,
        prefill_backend: str | type[MLAPrefillBackend] = "auto",
        indexer: SparseIndexer | None = None,
        tokens_per_state: int = 1,
        vllm_config: Any | None = None,
        choose: Choose = select,
    ) -> None:
        """Choose a backend and build its impl.

        Args:
            num_heads: query heads.
            dimensions: of the layer.
            kv_b_proj: expands a latent to the keys (without rotation) and values of all heads, in any
                weight dtype, without a bias. It is read here, or, if it is still on the meta device,
                in `process_weights_after_loading`.
            scale: factor on q.k; None: qk_head_dim ** -0.5.
            kv_cache_dtype: cache format; "auto": the dtype of the layer.
            dtype: of q, kv_c, k_pe and the output.
            device: where it runs.
            backend: a name, a class, or "auto".
            layer_name: None: one is made up.
            block_size: tokens in a kernel block.
            return_lse: return (output, lse).
            use_kv_connector: somebody else will copy pages out of and into the cache.
            use_batch_invariant: a request's bits may not depend on which others are in its batch. No
                backend over latents that comes with attnkit promises it: contexts are expanded in
                chunks that requests share.
            prefill_backend: who attends for prefills: a name of `MLA_PREFILL_BACKENDS`, a class, or
                "auto", the backend's own.
            indexer: tells each query which keys to attend to; None: to all.
            tokens_per_state: tokens that a row of the cache stands for (DeepSeek-V4's C128A: 128); it
                divides `block_size`. The row that comes with the last of them is kept, those of the
                others are not read, and a query sees the rows that are whole at its position, which
                is also what an indexer then counts. Any backend does it (`compressed`).
            vllm_config: engine configuration handed to the builder; None: the defaults for this
                dtype and block size. Of context parallelism, which a backend must do, it is read here.
            choose: who chooses the backend; `functools.cache(select)` for many layers that ask alike.

        Raises:
            ConfigurationError: a value is not allowed.
            BackendError: no such backend, or it cannot serve this layer; with every reason.
        """
        check_count("num_heads", num_heads)
        if not isinstance(dimensions, MLADimensions) or not isinstance(kv_b_proj, nn.Module):
            raise ConfigurationError(
                f"dimensions and kv_b_proj are {type(dimensions).__name__} and "
                f"{type(kv_b_proj).__name__}; give MLADimensions, and the projection as a torch module"
            )
        check_attribute("indexer", indexer, "topk_indices_buffer", optional=True)
        check_number("scale", scale, optional=True)
        check_count("tokens_per_state", tokens_per_state)
        check_flags(
            {
                "return_lse": return_lse,
                "use_kv_connector": use_kv_connector,
                "use_batch_invariant": use_batch_invariant,
            }
        )
        scale = 1 / math.sqrt(dimensions.qk_head_dim) if scale is None else float(scale)
        get_kv_quant_mode(kv_cache_dtype)  # An unknown format is the user's mistake, not a refusal.
        capability = DeviceCapability.of(device)
        super().__init__(
            layer_name=layer_name,
            num_kv_heads=1,
            dtype=dtype,
            device=device,
            block_size=block_size,
            vllm_config=vllm_config,
            choose=choose,
        )
        self.dimensions, self.num_heads, self.scale = dimensions, num_heads, scale
        self.head_size, self.head_size_v = dimensions.latent_size, dimensions.v_head_dim
        self.attn_type, self.sliding_window = AttentionType.DECODER, None
        self.kv_cache_dtype, self.return_lse = kv_cache_dtype, return_lse
        self.tokens_per_state, self.indexer = tokens_per_state, indexer
        check_tokens_per_state(tokens_per_state, block_size)
        if tokens_per_state > 1 and prefill_backend != "auto":
            raise ConfigurationError(
                f"prefill_backend {prefill_backend} has nothing to do in layer {self.layer_name}: with "
                f"tokens_per_state {tokens_per_state} every query is a decode; leave it out"
            )
        self.selection = choose(
            AttentionRequest(
                head_size=self.head_size,
                dtype=dtype,
                num_heads=num_heads,
                num_kv_heads=1,
                kv_cache_dtype=kv_cache_dtype,
                block_size=block_size // tokens_per_state,
                use_mla=True,
                use_sparse=indexer is not None,
                mla=dimensions,
                device_capability=capability,
                return_lse=return_lse,
                use_kv_connector=use_kv_connector,
                use_batch_invariant=use_batch_invariant,
                **self._parallelism(),
            ),
            backend,
        )
        self.backend = self.selection.backend
        if tokens_per_state > 1:
            self.backend = compressed(self.backend)
        self.projection = KvBProjection(kv_b_proj, num_heads, dimensions, dtype, self.device)
        impl_cls = self._impl_cls(MLAAttentionImpl)
        if impl_cls.forward_mqa is MLAAttentionImpl.forward_mqa:
            reason = "it has the older forward only, whose queries are still compressed"
            raise UnsupportedConfiguration(
                f"backend {self.selection.name} cannot serve this layer: {reason}; define forward_mqa",
                (reason,),
            )
        self.impl = impl_cls(
            num_heads,
            self.head_size,
            scale,
            1,
            None,
            None,
            kv_cache_dtype,
            None,
            AttentionType.DECODER.value,
            None,
            dimensions.q_lora_rank,
            dimensions.kv_lora_rank,
            dimensions.qk_nope_head_dim,
            dimensions.qk_rope_head_dim,
            dimensions.qk_head_dim,
            dimensions.v_head_dim,
            self.projection,
            indexer,
        )
        self.prefill_selection = None
        if tokens_per_state == 1:
            self.prefill_selection = select_prefill(
                self.impl,
                prefill_backend,
                device_capability=capability,
                dtype=dtype,
                dimensions=dimensions,
            )
        if self.prefill_selection is not None and prefill_backend != "auto":
            chosen = self.prefill_selection.backend
            self.impl.prefill_backend = chosen(num_heads, scale, dimensions)
        if return_lse:
            self.impl.need_to_return_lse_for_decode = True
        self._page = logical_page(self.backend, self._spec(block_size))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, {self.dimensions}, backend={self.selection.name}"

    def _check_masks(self, batch: CommonAttentionMetadata) -> None:
        if batch.causal is not True:
            raise BatchError(
                f"the batch has causal={batch.causal}, and layers over latents are causal decoders; "
                "leave causal out"
            )
        super()._check_masks(batch)

    def get_kv_cache_spec(self, block_size: int | None = None) -> AttentionSpec:
        """What this layer keeps in the cache.

        Args:
            block_size: tokens in a block; None: the layer's kernel block size.
        """
        return self._spec(self.block_size if block_size is None else block_size)

    def _spec(self, block_size: int) -> AttentionSpec:
        d, num_bytes = self.dimensions, None
        if (stored := LATENT_FORMATS.get(self.kv_cache_dtype)) and stored.codec is not None:
            num_bytes = stored.layout(d.kv_lora_rank, d.qk_rope_head_dim).num_bytes
        return self.backend.customize_spec(
            MLAAttentionSpec(
                block_size=block_size,
                head_size=self.head_size,
                dtype=kv_cache_torch_dtype(self.kv_cache_dtype, self.dtype),
                kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
                state_content_bytes=num_bytes,
                tokens_per_state=self.tokens_per_state,
                cache_dtype_str=self.kv_cache_dtype,
            )
        )

    def make_builder(
        self, layer_names: Sequence[str] | None = None
    ) -> AttentionMetadataBuilder[Any]:
        builder = super().make_builder(layer_names)
        if isinstance(builder, SparseMLAMetadataBuilder) and isinstance(
            self.impl, SparseLatentImpl
        ):
            builder.longest_whole = self.impl.longest_whole
        return builder

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Call once when a checkpoint is loaded: `kv_b_proj` is read, scales are checked. Latents and
        rotated parts are both scaled by `_k_scale`.

        Raises:
            ConfigurationError: the projection has other sizes than the layer, or a scale is not allowed.
        """
        self.projection.absorb(self.dtype)
        super().process_weights_after_loading(act_dtype)

    def forward(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor | None = None,
        attn_metadata: Any | None = None,
        quantized: QuantizedOutput | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Write latents into the cache, attend, return.

        Args:
            q: (num_tokens, num_heads, qk_head_dim), the rotated part last; or the last two flattened.
            kv_c_normed: (num_tokens, kv_lora_rank).
            k_pe: (num_tokens, qk_rope_head_dim), rotated; or (num_tokens, 1, qk_rope_head_dim).
            kv_cache: this layer's cache; None: from `forward_context`.
            attn_metadata: this step's plan; None: from `forward_context`, and outside of one a
                profiling run, which returns zeros (and an lse of -inf).
            quantized: write codes there and return them as the output.

        Returns:
            The output (num_tokens, num_heads, v_head_dim), flattened as q; with `return_lse` also the
            lse, float32 (num_tokens, num_heads), natural logarithm.

        Raises:
            BatchError: a tensor does not fit the layer or the plan; nothing has been written.
            UnsupportedConfiguration: the backend does not write such codes (`quantized`).
        """
        d = self.dimensions
        query = as_heads(self, "q", q, self.num_heads, d.qk_head_dim)
        kv_c = as_heads(self, "kv_c_normed", kv_c_normed, 1, d.kv_lora_rank)
        pe = as_heads(self, "k_pe", k_pe, 1, d.qk_rope_head_dim)
        if kv_c.shape[0] != pe.shape[0]:
            raise BatchError(
                f"layer {self.layer_name} got {kv_c.shape[0]} latents and {pe.shape[0]} rotated parts; "
                "give one of each per token"
            )
        return self._attend(query, kv_c, pe, kv_cache, attn_metadata, quantized, flat=q.dim() == 2)

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
        """Fill `output` and `lse`; key is kv_c (num_tokens, 1, kv_lora_rank), value k_pe likewise.

        With the `scales` of a quantised output, prefills write its codes where they can. What decodes
        attend to becomes values in a product, whose rows are then made codes.
        """
        assert key is not None
        assert value is not None
        plan = attn_metadata
        if plan is None:
            zero_rows(0, output, *scales)
            return
        if self.projection.weight.numel() == 0:
            raise BatchError(
                f"layer {self.layer_name} has not read its kv_b_proj, which was not loaded when "
                "the layer was made; call process_weights_after_loading first"
            )
        check_num_rows(self, query, plan)
        check_num_written(self, key, plan)
        if self.indexer is not None:
            lists_of(self.indexer, plan.num_decode_tokens, query.device)
            if plan.num_prefill_tokens and not self._may_prefill(plan):
                raise BatchError(
                    f"layer {self.layer_name} attends to chosen keys, and got a plan with "
                    f"{plan.num_prefill_tokens} tokens to prefill, as of a layer over all keys; "
                    "pass what its own build(batch) gives"
                )
        check_cache(self, kv_cache, self._page)
        assert kv_cache is not None
        # An older backend's own shape is taken as it is.
        cache = kv_cache[:, 0] if self._page is not None else kv_cache
        decodes = slice(0, plan.num_decode_tokens)
        prefills = slice(decodes.stop, decodes.stop + plan.num_prefill_tokens)
        if not self.backend.forward_includes_kv_cache_update:
            self.impl.do_kv_cache_update(
                key[:, 0], value, cache, plan.slot_mapping, self.kv_cache_dtype, self._k_scale
            )
        numbers = by_prefills = output
        quantized = prefill_scale = None
        if scales:
            quantized = QuantizedOutput(codes=output, scale=scales[0], block_scale=scales[1])
            if self._prefills_write(quantized.key):
                numbers, prefill_scale = self._numbers(query, decodes.stop), scales[0]
            else:
                numbers = by_prefills = self._numbers(query, plan.num_actual_tokens)
        # Nobody's rows that a replayed batch counts: no kernel writes them, and somebody may look.
        by_prefills[prefills.stop : plan.num_actual_tokens].zero_()
        if prefills.start < prefills.stop:
            given = self._attend_expanded(
                query, key, value, cache, plan, prefills, by_prefills, prefill_scale
            )
            self._store_lse(lse, prefills, given)
        if decodes.stop:
            given = self._attend_absorbed(query, cache, plan, decodes, numbers)
            self._store_lse(lse, decodes, given)
        if quantized is not None:
            quantized.write(numbers)

    def _may_prefill(self, plan: Any) -> bool:
        """Whether the prefills of a plan are right in a layer over chosen keys."""
        impl = self.impl
        if isinstance(impl, SparseLatentImpl):  # Those that are told all they see.
            return plan.prefill.max_seq_len <= impl.longest_whole()
        return impl.supports_dense_mha_prefill

    def _numbers(self, query: torch.Tensor, num_rows: int) -> torch.Tensor:
        return query.new_empty(num_rows, self.num_heads, self.head_size_v)

    def _prefills_write(self, key: QuantKey) -> bool:
        """Whether `forward_mha` writes such codes by itself, in the kernel of its prefill backend."""
        if key != kFp8StaticTensorSym or not isinstance(self.impl, LatentImpl):
            return False
        backend = self.impl.prefill_backend
        return backend is not None and backend.supports_quant_output()

    def _attend_expanded(
        self,
        query: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        rows: slice,
        output: torch.Tensor,
        output_scale: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """`forward_mha` of some rows; its LSE."""
        dense = output[rows].view(rows.stop - rows.start, -1)
        step = (query[rows], kv_c[rows, 0], k_pe[rows], cache, plan, self._k_scale, dense)
        return self.impl.forward_mha(*step, *(() if output_scale is None else (output_scale,)))

    def _attend_absorbed(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        rows: slice,
        output: torch.Tensor,
    ) -> torch.Tensor | None:
        """`forward_mqa` of some rows; its LSE."""
        d = self.dimensions
        q_nope, q_pe = query[rows].split([d.qk_nope_head_dim, d.qk_rope_head_dim], dim=-1)
        absorbed = torch.cat([self.projection.absorb_queries(q_nope), q_pe], dim=-1)
        attended, lse = self.impl.forward_mqa(absorbed, cache, plan, self)  # type: ignore[arg-type]
        self.projection.values_of(attended, output[rows])
        return lse

    def _store_lse(self, lse: torch.Tensor | None, rows: slice, given: torch.Tensor | None) -> None:
        if lse is None:
            return
        if given is None:
            raise BackendError(
                f"backend {self.selection.name} says it can return the LSE, but returned none; return "
                "one from forward_mqa and forward_mha when need_to_return_lse_for_decode is set"
            )
        lse[rows] = given if self.impl.lse_base_on_e else given * math.log(2)
