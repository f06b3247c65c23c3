"""AttentionImpl: run one layer over keys and values. What every impl is stands in its base.

In: built once per layer with the layer's static facts; then, per step, the layer's tensors, its
cache and the plan its builder made. Out: attention written into `output`. Between build and return
nothing asks the host: `forward` only launches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from attnkit.contract.config import get_parallel_context
from attnkit.contract.quant import KVQuantMode, QuantKey, get_kv_quant_mode
from attnkit.contract.types import AttentionType
from attnkit.errors import UnsupportedConfiguration

T = TypeVar("T")
"""The metadata class a builder makes and its impl reads."""

_Impl = TypeVar("_Impl", bound="AttentionImplBase")


class AttentionLayer(Protocol):
    """What an impl may read of the layer that calls it.

    Scales are per tensor (shape ()) or per KV head: stored = x / scale, read back = stored * scale.
    The `_float` twins are host copies, so that a launch need not ask the device.
    """

    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _v_scale: torch.Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float
    _prob_scale: torch.Tensor
    """Scale of quantised probabilities, for kernels that quantise them."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend and return (num_tokens, num_heads, head_size_v), with the LSE if it was built so."""
        ...


class AttentionImplBase(ABC, Generic[T]):
    """What every impl is, whichever forward it has.

    Ranks are read from the `parallel_context` scope the impl is made under, in `__new__`, so that
    subclasses need not call a base constructor.
    """

    is_sparse: ClassVar[bool] = False
    """The impl attends to chosen (top-k) keys; an MLA layer routes prefills by it."""

    supports_dense_mha_prefill: ClassVar[bool] = True
    """A sparse MLA impl has `forward_mha` too; False sends prefills through `forward_mqa`."""

    num_heads: int
    """Query heads on this rank; set by the impl, as the next two."""
    head_size: int
    """Of queries and keys."""
    scale: float
    """Factor on q.k."""

    can_return_lse_for_decode: bool = False
    """`forward` can return the log-sum-exp of its rows. Selection asks the class when a layer wants
    it (context parallelism, merging)."""

    lse_base_on_e: bool = True
    """The LSE returned is a natural logarithm. False: base 2; the layer then converts it, so that
    outside an impl an LSE is always natural."""

    supports_pcp: bool = False
    """Works when the queries of a prompt are spread over ranks."""

    supports_dcp: bool = False
    """Works when the cache of a request is spread over ranks; needs an LSE."""

    supports_mtp_with_cp_non_trivial_interleave_size: bool = False
    """Masks queries of several tokens rightly when ranks interleave more than one token at a time."""

    need_to_return_lse_for_decode: bool = False
    """Set on the instance: `forward` must return (output, lse). True where ranks are merged, or
    where the layer was built with `return_lse`."""

    supports_quant_query_input: bool = False
    """`forward` takes queries already quantised with the layer's `_q_scale`."""

    dcp_world_size: int
    """Ranks of decode context parallelism, from the scope the impl was made under."""
    dcp_rank: int
    """This process's among them."""
    pcp_world_size: int
    """Ranks of prefill context parallelism, likewise."""
    pcp_rank: int
    """This process's among them."""
    total_cp_world_size: int
    """Ranks that a request's cache is spread over: those of decode context parallelism."""
    total_cp_rank: int
    """This process's among them."""

    def __new__(cls: type[_Impl], *args: Any, **kwargs: Any) -> _Impl:
        self = object.__new__(cls)
        context = get_parallel_context()
        self.dcp_world_size, self.dcp_rank = context.dcp_world_size, context.dcp_rank
        self.pcp_world_size, self.pcp_rank = context.pcp_world_size, context.pcp_rank
        self.total_cp_world_size, self.total_cp_rank = self.dcp_world_size, self.dcp_rank
        self.need_to_return_lse_for_decode = (
            self.dcp_world_size > 1 and self.can_return_lse_for_decode
        )
        return self

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called once when the checkpoint is loaded: repack what the kernels want repacked.

        Args:
            act_dtype: dtype activations will have.
        """
        return

    def get_impl_variants(self) -> tuple[AttentionImplBase, ...]:
        """The impls behind this one: itself, or both halves of a hybrid. Code that inspects impls
        looks at these."""
        return (self,)

    def prepare_for_batch(self, attn_metadata: T | None) -> None:
        """Called once per step before the layers run, also with None (a profiling run)."""
        return


class AttentionImpl(AttentionImplBase[T], Generic[T]):
    """Attention over a cache of keys and values."""

    kv_cache_dtype: str
    """A name of `CACHE_DTYPES`; set by the impl."""

    @property
    def kv_quant_mode(self) -> KVQuantMode:
        """How this layer's cache encodes K and V, from its `kv_cache_dtype`."""
        return get_kv_quant_mode(self.kv_cache_dtype)

    @abstractmethod
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
    ) -> None:
        """Keep the layer's static facts; the layer passes these ten by position.

        Further features arrive as keywords, and only when the layer has them: `sinks` (float32,
        (num_heads,)), `use_alibi_sqrt`, `head_size_v`.

        Args:
            num_heads: query heads on this rank.
            head_size: of queries and keys.
            scale: factor on q.k.
            num_kv_heads: divides num_heads; None: as many.
            alibi_slopes: one per query head.
            sliding_window: keys a query sees, itself included.
            kv_cache_dtype: a name of `CACHE_DTYPES`.
            logits_soft_cap: c in c * tanh(score / c); 0 and None: off.
            attn_type: an `AttentionType`.
            kv_sharing_target_layer_name: the layer whose cache this one reads and never writes.

        Raises:
            ConfigurationError: a value is not allowed.
            UnsupportedConfiguration: a feature this impl does not do.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend; called by the layer once per step.

        Args:
            layer: the caller, for its scales.
            query: (num_tokens, num_heads, head_size). Rows past the plan's tokens are padding.
            key: (num_tokens, num_kv_heads, head_size) of this step's tokens; already in the cache
                unless the backend writes itself.
            value: (num_tokens, num_kv_heads, head_size_v).
            kv_cache: (num_blocks, num_kv_heads, block_size, head_size + head_size_v), any strides.
            attn_metadata: what the backend's builder made; None on a profiling run, which must fill
                `output` with zeros and touch nothing else.
            output: (num_tokens, num_heads, head_size_v), written in place; padding rows stay.
            output_scale: scale of a quantised output, if `fused_output_quant_supported` said yes.
            output_block_scale: where block scales of a quantised output go.

        Returns:
            `output`, or (output, lse) with lse float32 (num_tokens, num_heads) when
            `need_to_return_lse_for_decode` is set.
        """
        raise NotImplementedError

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K and V; called before `forward` when the backend leaves the write to the layer.

        The length of `slot_mapping` says how many tokens there are; -1 writes nothing.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define do_kv_cache_update, since its backend says "
            "forward_includes_kv_cache_update = False"
        )

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Whether `forward` can write its output quantised like this. Asked by a compiler that
        looks for a quantisation after attention to fuse."""
        return False

    def refuse_output_scales(
        self, output_scale: torch.Tensor | None, output_block_scale: torch.Tensor | None
    ) -> None:
        """Ours: for a `forward` that writes plain numbers only.

        Raises:
            UnsupportedConfiguration: a scale of a quantised output was given.
        """
        if output_scale is not None or output_block_scale is not None:
            reason = "quantised outputs are not supported"
            raise UnsupportedConfiguration(
                f"{type(self).__name__}: {reason}; ask fused_output_quant_supported before, and "
                "quantise after attention",
                (reason,),
            )

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether `do_rope_and_kv_cache_update` is there. Asked by the same kind of compiler."""
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        """Whether `do_qk_norm_rope_kvcache_update` is there."""
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        """Whether `do_qk_norm_mrope_kvcache_update` is there."""
        return False

    def do_rope_and_kv_cache_update(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate query and key in place and write key and value to the cache, in one launch.

        Args:
            positions: int64 (num_tokens,).
            cos_sin_cache: (max positions, rotary_dim): cosines, then sines.
            is_neox: rotate halves; False: neighbouring pairs.
        """
        raise NotImplementedError

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        q_out: torch.Tensor,
        k_out: torch.Tensor,
        positions: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        rms_norm_eps: float,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Normalise query and key per head (RMS), rotate them and write the cache, in one launch.

        Args:
            qkv: (num_tokens, (num_heads + 2 * num_kv_heads) * head_size), read only.
            q_out, k_out: preallocated, receive the rotated query and key; V is a slice of qkv.
            q_weight, k_weight: (head_size,) of the norms; rms_norm_eps is their epsilon.
        """
        raise NotImplementedError

    def do_qk_norm_mrope_kvcache_update(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        q_out: torch.Tensor,
        positions: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        rms_norm_eps: float,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        mrope_section: tuple[int, int, int],
        is_interleaved: bool,
        rotary_dim: int,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """The same for rotary positions of three axes; the key goes to the cache only.

        Args:
            positions: int64 (3, num_tokens): time, height, width.
            mrope_section: how many rotary pairs each axis owns.
            is_interleaved: axes alternate pair by pair instead of lying in sections.
            rotary_dim: leading part of head_size that is rotated.
        """
        raise NotImplementedError
