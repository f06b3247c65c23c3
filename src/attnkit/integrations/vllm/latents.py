# pyright: reportMissingImports=false
"""VllmLatentBackend: one of attnkit's backends over latents (MLA) in vLLM's classes.

In: the tensors of vLLM's MLA layer, which keeps its projections: latents to write, queries of prefills,
absorbed queries of decodes. Out: attention by the backend that ATTNKIT_VLLM names, prefills included,
which attend over latents expanded by the layer's own `kv_b_proj`. Sparse layers, and what else it cannot
do, are refused with the reason when the layer is made.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention import backend as vllm_contract

from attnkit.contract import AttentionType, MLADimensions
from attnkit.integrations.vllm.answers import (
    ON_CPU,
    OURS,
    Answers,
    check_layer,
    device_capability,
    supported_dtypes,
    supported_formats,
)
from attnkit.integrations.vllm.plans import VllmBuilder
from attnkit.selection import AttentionRequest

_FORMATS = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3")
"""Cache formats whose rows have the same bytes for vLLM and for us."""


class VllmLatentImpl(vllm_contract.MLAAttentionImpl):
    """One layer."""

    can_return_lse_for_decode = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: torch.nn.Module,
        indexer: object | None = None,
        **features: Any,
    ) -> None:
        """vLLM's arguments; `features` are the keywords a model adds.

        Raises:
            UnsupportedConfiguration: the backend cannot serve this layer; with every reason.
        """
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        dimensions = MLADimensions(
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
        )
        request = AttentionRequest(
            head_size=head_size,
            dtype=torch.get_default_dtype(),  # vLLM sets it while it makes a model.
            num_heads=num_heads,
            num_kv_heads=1,
            kv_cache_dtype=kv_cache_dtype,
            use_mla=True,
            use_sparse=indexer is not None,
            mla=dimensions,
            device_capability=device_capability(),
        )
        others = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
            **features,
        }
        check_layer(
            request,
            _FORMATS,
            *(f"{k} is not served over latents" for k, v in others.items() if v is not None),
        )
        impl_cls: Any = OURS.get_impl_cls()
        self.ours = impl_cls(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            None,
            None,
            kv_cache_dtype,
            None,
            str(AttentionType.DECODER),
            None,
            q_lora_rank,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            qk_head_dim,
            v_head_dim,
            kv_b_proj,
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.ours.layer.projection.absorb(act_dtype)  # It was not loaded when the impl was made.
        self.ours.process_weights_after_loading(act_dtype)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Prefills."""
        self.ours.forward_mha(
            q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decodes."""
        return self.ours.forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write latents; `skip_scale` says that the scale is 1, which ours multiplies by."""
        self.ours.do_kv_cache_update(
            kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
        )

    def reserve_workspace(self, *args: Any, **kwargs: Any) -> None:
        return


class VllmLatentBuilder(VllmBuilder):
    """Plans a batch for a group of layers over latents."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        # vLLM's MLA layer takes the rows of a graph's padding for prefills, which our plans do not have.
        return vllm_contract.AttentionCGSupport.NEVER


class VllmLatentBackend(Answers):
    """What vLLM asks of a backend over latents, answered by `OURS`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = supported_dtypes()
    supported_kv_cache_dtypes: ClassVar[list[str]] = supported_formats(_FORMATS)

    @staticmethod
    def get_name() -> str:
        # A member of vLLM's enumeration, whichever class answers for it.
        return "CPU_MLA" if ON_CPU else "CUSTOM"

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[VllmLatentImpl]:
        return VllmLatentImpl

    @staticmethod
    def get_builder_cls() -> type[VllmLatentBuilder]:
        return VllmLatentBuilder
