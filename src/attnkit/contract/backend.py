"""AttentionBackend: what an attention implementation can do, asked before any of it runs.

In: selection and engines ask class methods; nothing is instantiated and no device is touched.
Out: yes or no per feature, every reason for a refusal, the block sizes, layouts and spec the
kernels want, and the two classes that do the work: the metadata builder (plan once per batch) and
the impl (run a layer).

Names, parameters and defaults are vLLM's, of two generations, so a backend ports by changing an
import. What attnkit adds stands in a block of its own at the end of the class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attnkit.contract import reasons
from attnkit.contract.device import DeviceCapability
from attnkit.contract.impl import AttentionImplBase
from attnkit.contract.kv_cache_spec import AttentionSpec, KVCacheLayout, KVCacheSpec
from attnkit.contract.metadata import AttentionMetadata
from attnkit.contract.mla import MLADimensions
from attnkit.contract.types import AttentionType, MultipleOf

if TYPE_CHECKING:
    from attnkit.contract.builder import AttentionMetadataBuilder


class AttentionBackend(ABC):
    """Class-level facts about one attention implementation. Never instantiated.

    A backend names itself, its impl and its builder, and overrides what differs from the defaults.
    Every default that is a refusal stays a refusal until the backend says otherwise; every yes is a
    promise that the conformance kit checks.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    """Dtypes of query, key and value. Selection refuses others; so must the impl."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    """Cache format names the kernels read. An empty list means any."""

    forward_includes_kv_cache_update: bool = True
    """True: `impl.forward` writes K and V itself. False: the layer calls
    `impl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)` before each forward."""

    accept_output_buffer: bool = False
    """Older generation: True asks the layer to pass a preallocated `output`. Impls whose `forward`
    requires `output` (the current generation) always get it."""

    supports_quant_query_input: bool = False
    """Older generation's place of `AttentionImplBase.supports_quant_query_input`: the layer may
    hand over queries already quantised with `_q_scale`."""

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Block sizes the kernels read: ints are exact, `MultipleOf(n)` any multiple.

        Asked without a spec at selection and with the group's spec when the cache is made. The
        engine's own blocks may be larger: they are then split into kernel blocks.
        """
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name users choose the backend by. Wrappers keep the name of what they wrap."""
        raise NotImplementedError("get_name is not defined; a backend returns its name there")

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        """The impl class. A backend that only makes metadata (an SSM's) raises NotImplementedError."""
        raise NotImplementedError(
            "get_impl_cls is not defined; a backend returns its AttentionImpl there"
        )

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """The builder class; also asked class-level questions before one is made."""
        raise NotImplementedError(
            "get_builder_cls is not defined; a backend returns its AttentionMetadataBuilder there"
        )

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """(module, qualified name): layers are grouped by it, since wrappers keep `get_name`."""
        return (cls.__module__, cls.__qualname__)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes the kernels do; an empty list means any."""
        return []

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether keys and queries of this head size work."""
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Whether queries of this dtype work."""
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Whether this cache format works; None means the caller does not care."""
        if kv_cache_dtype is None:
            return True
        return not cls.supported_kv_cache_dtypes or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether an engine's blocks of this size can be read, split if need be.

        So 128 is fine for a kernel of exactly 64. None means the caller does not care.
        """
        if block_size is None:
            return True
        sizes = cls.get_supported_kernel_block_sizes()
        return block_size > 0 and (
            not sizes
            or any(
                block_size % (size.base if isinstance(size, MultipleOf) else size) == 0
                for size in sizes
            )
        )

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The block size to use when the user named none: the default where it works, else the
        smallest that does."""
        sizes = cls.get_supported_kernel_block_sizes()
        if not sizes or cls.supports_block_size(default_block_size):
            return default_block_size
        return min(size.base if isinstance(size, MultipleOf) else size for size in sizes)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Rewrite a layer's cache spec to how these kernels pack a page.

        Must be pure and idempotent, and must not depend on `spec.block_size`, since it is also
        asked with a block size of 1 to learn the bytes of a token.
        """
        return spec

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Layouts the kernels read, most preferred first; None: any, without preference."""
        return None

    @classmethod
    def is_mla(cls) -> bool:
        """Reads a latent cache. Must equal what the layer is: refused both ways otherwise."""
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        """Attends to chosen keys only. Must equal what the layer is: refused both ways otherwise."""
        return False

    @classmethod
    def is_ssm(cls) -> bool:
        """Keeps a recurrent state, not keys: takes no part in the choice of a block size."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """A learned logit per head that joins the denominator (`sinks` of the impl)."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """The square-root form of ALiBi (`use_alibi_sqrt` of the impl)."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Bidirectional spans inside a causal prompt (`mm_req_doc_ranges` of a batch)."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """`_k_scale` and `_v_scale` of the layer may have one entry per KV head."""
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """`sliding_window` of the impl."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """A prefix visible to all later tokens, a window for the rest (`rswa_prefix_lens`)."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Batches with `causal` False over the paged cache of a decoder.

        Not the encoder types, which `supports_attn_type` answers for.
        """
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Can promise that the bits of a request's output do not depend on its batch mates."""
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Pages may be copied out of and into the cache by somebody else between steps."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Right even when `query_start_loc` on the device differs from the host's per request.

        Totals, prefill lengths and the decode/prefill boundary still agree (adaptive verification
        moves drafts between requests on the device). A builder that plans single rows from
        `query_start_loc_cpu` must say False; recurrent states always do.
        """
        return not cls.is_ssm()

    @classmethod
    def supports_pcp(cls) -> bool:
        """Prefill context parallelism; the impl class says so."""
        return cls._ask_impl("supports_pcp")

    @classmethod
    def supports_dcp(cls) -> bool:
        """Decode context parallelism; the impl class says so."""
        return cls._ask_impl("supports_dcp")

    @classmethod
    def supports_non_causal_dcp(cls) -> bool:
        """Non-causal multi-token decodes under decode context parallelism; the builder says so."""
        return bool(getattr(cls.get_builder_cls(), "supports_non_causal_multi_token_dcp", False))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether layers of this `AttentionType` work; the default is decoders only."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Whether the kernels run on such a device, which need not be present."""
        return True

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
        """Why these values do not work together although each does alone; None if they do."""
        return None

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        use_per_head_quant_scales: bool,
        device_capability: DeviceCapability,
        attn_type: str,
        has_sliding_window: bool = False,
        use_non_causal: bool = False,
        use_batch_invariant: bool = False,
        use_kv_connector: bool = False,
        use_pcp: bool = False,
        use_adaptive_verification: bool = False,
        use_dcp: bool = False,
        use_rswa: bool = False,
    ) -> list[str]:
        """Every reason why this backend cannot serve such a layer; empty means it can.

        Asked by selection and by `attnkit explain`. Reasons come in a fixed order, each with the
        value that was asked for and what is allowed.
        """
        lacks = reasons.lacks
        found = [
            reasons.of_head_size(cls, head_size),
            reasons.of_dtype(cls, dtype),
            reasons.of_kv_cache_dtype(cls, kv_cache_dtype),
            reasons.of_block_size(cls, block_size),
            lacks(use_mm_prefix, cls.supports_mm_prefix, "bidirectional multimodal prefix"),
            reasons.of_mla(cls, use_mla),
            lacks(has_sink, cls.supports_sink, "attention sink"),
            reasons.of_sparse(cls, use_sparse),
            lacks(
                use_per_head_quant_scales,
                cls.supports_per_head_quant_scales,
                "one K/V scale per head",
            ),
            reasons.of_device(cls, device_capability),
            reasons.of_attn_type(cls, attn_type),
            lacks(has_sliding_window, cls.supports_sliding_window, "sliding window"),
            lacks(use_rswa, cls.supports_rswa, "reference sliding window (R-SWA)"),
            lacks(use_non_causal, cls.supports_non_causal, "non-causal decoder attention"),
            lacks(
                use_mla and use_non_causal and use_dcp,
                cls.supports_non_causal_dcp,
                "non-causal MLA decode over DCP ranks",
            ),
            lacks(use_batch_invariant, cls.supports_batch_invariance, "batch invariance"),
            lacks(use_kv_connector, cls.supports_kv_connector, "KV connector"),
            lacks(use_pcp, cls.supports_pcp, "prefill context parallelism (PCP)"),
            lacks(use_dcp, cls.supports_dcp, "decode context parallelism (DCP)"),
            lacks(
                use_adaptive_verification,
                cls.supports_device_cpu_query_lens_mismatch,
                "adaptive verification (query lengths decided on the device)",
            ),
            cls.supports_combination(
                head_size,
                dtype,
                kv_cache_dtype,
                block_size,
                use_mla,
                has_sink,
                use_sparse,
                use_mm_prefix,
                device_capability,
            ),
        ]
        return [reason for reason in found if reason is not None]

    # The older generation's cache and metadata classes. A backend that overrides
    # `get_kv_cache_shape` gets a tensor of that shape instead of the logical (B, H, N, C).

    @staticmethod
    def get_metadata_cls() -> type[Any]:
        """Older generation: the metadata class `make_metadata` fills."""
        return AttentionMetadata

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> Any:
        """Older generation: an instance of `get_metadata_cls()` from its own arguments."""
        return cls.get_metadata_cls()(*args, **kwargs)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Older generation: the shape of a layer's cache tensor.

        Raises:
            NotImplementedError: the backend reads the logical (B, H, N, C), as current ones do.
        """
        raise NotImplementedError

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """Older generation: the order in memory, outermost first, of the dimensions of
        `get_kv_cache_shape`.

        Raises:
            NotImplementedError: the order is that of the shape.
        """
        raise NotImplementedError

    # What attnkit adds: features the seeds' impls take but selection never asked about.

    own_score: ClassVar[Callable[[Any, int, Any, Any], Any] | None] = None
    """For the conformance kit, where a backend does another attention than `docs/semantics.md` says: a
    static method (score, head, query position, key position) -> score, the last step before the mask.
    In float64 numpy; positions are absolute, (q_len, 1) and (1, kv_len), and broadcast. -inf hides a
    key."""

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why this backend cannot run on this machine ("triton is not installed"); None if it can.

        Only absence is answered here: a library that is present but broken raises its own error.
        """
        return None

    @classmethod
    def supports_alibi(cls) -> bool:
        """`alibi_slopes` of the impl."""
        return False

    @classmethod
    def supports_logits_soft_cap(cls) -> bool:
        """`logits_soft_cap` of the impl."""
        return False

    @classmethod
    def supports_tree_mask(cls) -> bool:
        """Drafts that branch (`tree_mask` of a batch)."""
        return False

    @classmethod
    def supports_head_size_v(cls, head_size: int, head_size_v: int) -> bool:
        """Whether values of size `head_size_v` work beside keys of `head_size`."""
        return head_size == head_size_v

    @classmethod
    def supports_mla_dimensions(
        cls, dimensions: MLADimensions, kv_cache_dtype: str | None
    ) -> str | None:
        """Why an MLA layer of these sizes does not work with such a cache; None if it does. Asked of MLA
        backends, about formats they support."""
        return None

    @classmethod
    def supports_lse(cls) -> bool:
        """Returns the log-sum-exp of its rows when the layer asks; the impl class says so."""
        return cls._ask_impl("can_return_lse_for_decode") and (
            not cls.is_mla() or cls._ask_impl("can_return_lse_for_prefill")
        )

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        """Relative cost of serving `request` (an `attnkit.selection.AttentionRequest`).

        Automatic selection takes the lowest among those that can; equal costs fall back to the
        order of the table. 1.0 is a kernel made for the device.
        """
        return 1.0

    @classmethod
    def describe_runtime(cls) -> str | None:
        """What of this machine it runs on ("native: built with gcc"), for people; None: nothing to
        tell. Asked of the chosen backend only, which may load what it needs to answer."""
        return None

    @classmethod
    def _ask_impl(cls, flag: str) -> bool:
        try:
            impl_cls = cls.get_impl_cls()
        except NotImplementedError:
            return False
        return bool(getattr(impl_cls, flag, False))
