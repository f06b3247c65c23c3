# pyright: reportMissingImports=false
"""VllmBuilder: our builder in vLLM's class, and vLLM's specs and batches as ours.

In: vLLM's specs of caches and its batches. Out: the plans of the backend of ours that runs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention import backend as vllm_contract

from attnkit.contract import (
    COMMON_METADATA_FIELDS,
    AttentionSpec,
    CommonAttentionMetadata,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from attnkit.errors import UnsupportedConfiguration
from attnkit.integrations.vllm import ENV_VLLM
from attnkit.integrations.vllm.answers import OURS


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


def our_spec(spec: Any) -> AttentionSpec:
    """vLLM's cache spec of a group of layers as ours.

    Raises:
        UnsupportedConfiguration: it is of another kind.
    """
    mode = spec.kv_quant_mode.name
    if mode not in KVQuantMode.__members__:
        raise UnsupportedConfiguration(
            f"attnkit in vLLM does not store caches of mode {mode}; unset {ENV_VLLM}, or choose another "
            "kv_cache_dtype"
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
        return FullAttentionSpec(**facts)
    if kind == "SlidingWindowSpec":
        return SlidingWindowSpec(sliding_window=spec.sliding_window, **facts)
    if kind == "EncoderOnlyAttentionSpec":
        return EncoderOnlyAttentionSpec(**facts)
    if kind == "MLAAttentionSpec" and not spec.non_causal_multi_token_decode:
        return MLAAttentionSpec(cache_dtype_str=spec.cache_dtype_str, **facts)
    raise UnsupportedConfiguration(
        "attnkit in vLLM serves full, sliding-window and encoder-only attention and causal attention "
        f"over latents, not {kind}; unset {ENV_VLLM}"
    )


def our_batch(batch: Any) -> CommonAttentionMetadata:
    """vLLM's batch as ours: the fields have its names."""
    fields = {name: getattr(batch, name) for name in COMMON_METADATA_FIELDS if hasattr(batch, name)}
    return CommonAttentionMetadata(**fields)
