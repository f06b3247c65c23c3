"""The contract between an engine and its attention kernels: all that a backend author reads.

One module exports every name. What each means stands in the file it is defined in:

    types          AttentionType, AttentionCGSupport, MultipleOf
    backend        AttentionBackend: what can it do
    reasons        why it cannot serve a layer, in words
    subclass       backends like others with something changed
    builder        AttentionMetadataBuilder: plan once per batch
    impl           AttentionImpl: run a layer
    mla_impl       MLAAttentionImpl: run a layer that keeps latents
    mla            MLADimensions: sizes of a layer that keeps latents
    metadata       CommonAttentionMetadata: one batch
    spans          ranges and prefixes of a batch, checked, and per token for kernels
    tree           which of the step's own tokens a drafted one sees
    variant        AttentionVariant: score and mask of a layer
    kv_cache_spec  what a layer keeps in the cache, and how pages lie in memory
    quant          cache formats and keys of quantised outputs
    device         DeviceCapability
    config         the slice of an engine's configuration that backends read
"""

from attnkit.contract.backend import AttentionBackend
from attnkit.contract.builder import AttentionMetadataBuilder, CommonMetadataBuilder
from attnkit.contract.config import (
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    ParallelContext,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    get_parallel_context,
    max_decode_query_len,
    parallel_context,
)
from attnkit.contract.device import KNOWN_DEVICES, DeviceCapability
from attnkit.contract.impl import AttentionImpl, AttentionImplBase, AttentionLayer
from attnkit.contract.kv_cache_spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from attnkit.contract.metadata import (
    COMMON_METADATA_FIELDS,
    AttentionMetadata,
    CommonAttentionMetadata,
)
from attnkit.contract.mla import MLADimensions, SparseIndexer
from attnkit.contract.mla_impl import MLAAttentionImpl
from attnkit.contract.quant import (
    CACHE_DTYPES,
    CacheDType,
    GroupShape,
    KVQuantMode,
    QuantKey,
    ScaleDesc,
    get_kv_quant_mode,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
    kv_cache_torch_dtype,
)
from attnkit.contract.spans import check_prefix_lens, check_ranges
from attnkit.contract.subclass import (
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
)
from attnkit.contract.tree import check_tree_words, tree_words
from attnkit.contract.types import AttentionCGSupport, AttentionType, MultipleOf
from attnkit.contract.variant import AttentionVariant

__all__ = [
    "CACHE_DTYPES",
    "COMMON_METADATA_FIELDS",
    "KNOWN_DEVICES",
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionImplBase",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionSpec",
    "AttentionType",
    "AttentionVariant",
    "CacheConfig",
    "CacheDType",
    "ChunkedLocalAttentionSpec",
    "CommonAttentionMetadata",
    "CommonMetadataBuilder",
    "CompilationConfig",
    "CrossAttentionSpec",
    "DeviceCapability",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "GroupShape",
    "KVCacheLayout",
    "KVCacheSpec",
    "KVQuantMode",
    "MLAAttentionImpl",
    "MLAAttentionSpec",
    "MLADimensions",
    "MambaSpec",
    "ModelConfig",
    "MultipleOf",
    "ParallelConfig",
    "ParallelContext",
    "QuantKey",
    "RSWASpec",
    "ScaleDesc",
    "SchedulerConfig",
    "SlidingWindowSpec",
    "SparseIndexer",
    "SpeculativeConfig",
    "VllmConfig",
    "check_prefix_lens",
    "check_ranges",
    "check_tree_words",
    "get_kv_quant_mode",
    "get_parallel_context",
    "kFp8Dynamic64Sym",
    "kFp8Dynamic128Sym",
    "kFp8StaticTensorSym",
    "kNvfp4Dynamic",
    "kv_cache_torch_dtype",
    "max_decode_query_len",
    "parallel_context",
    "subclass_attention_backend",
    "subclass_attention_backend_with_overrides",
    "tree_words",
]
