"""LatentImpl: what impls over latents have in common: the constructor, and prefills.

In: the constructor's arguments as the contract gives them. Out: `layer`, a frozen `LatentLayer`, and
`forward_mha`. A backend's own impl says whose it is and adds `forward_mqa` and its write.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

import torch

from attnkit.arguments import check_attribute, check_number
from attnkit.contract import AttentionBackend, AttentionType, MLAAttentionImpl, SparseIndexer
from attnkit.errors import ConfigurationError, UnsupportedConfiguration
from attnkit.mla.layer import LatentLayer
from attnkit.mla.plan import MLAMetadata
from attnkit.mla.prefill import attend_prefill
from attnkit.mla.prefill_backend import MLAPrefillBackend
from attnkit.output_quant import QuantizedOutput

M = TypeVar("M", bound=MLAMetadata)


class LatentImpl(MLAAttentionImpl[M]):
    """One layer over latents.

    Attributes:
        layer: its static facts, checked against what the backend takes.
        indexer: chooses keys in sparse layers; None in dense ones.
    """

    can_return_lse_for_decode = True
    can_return_lse_for_prefill = True
    supports_pcp = False

    prefill_cls: ClassVar[type[MLAPrefillBackend]]
    """Attends for prefills of every size that the backend takes."""

    @staticmethod
    @abstractmethod
    def get_backend_cls() -> type[AttentionBackend]:
        """Whose impl this is: asked for the sizes it takes."""
        ...

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
        q_pad_num_heads: int | None = None,
    ) -> None:
        """Check and keep the layer's facts.

        Raises:
            ConfigurationError: a value is not allowed, or sizes contradict each other.
            UnsupportedConfiguration: the backend says no to the sizes; or something is asked for that
                attention over latents here does not do.
        """
        check_attribute("indexer", indexer, "topk_indices_buffer", optional=True)
        check_number("logits_soft_cap", logits_soft_cap, optional=True)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.indexer: SparseIndexer | None = indexer  # type: ignore[assignment]
        self.layer = LatentLayer.from_impl_args(
            self.get_backend_cls(),
            num_heads=num_heads,
            scale=scale,
            kv_cache_dtype=kv_cache_dtype,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            kv_b_proj=kv_b_proj,
        )
        for name, size, parts in (
            ("head_size", head_size, ("kv_lora_rank", kv_lora_rank)),
            ("qk_head_dim", qk_head_dim, ("qk_nope_head_dim", qk_nope_head_dim)),
        ):
            if size != parts[1] + qk_rope_head_dim:
                raise ConfigurationError(
                    f"{name} {size!r} is not allowed beside {parts[0]} {parts[1]} and qk_rope_head_dim "
                    f"{qk_rope_head_dim}; give their sum"
                )
        asked = {
            f"num_kv_heads {num_kv_heads}": num_kv_heads != 1,
            "alibi_slopes": alibi_slopes is not None,
            "sliding_window": sliding_window is not None,
            "logits_soft_cap": bool(logits_soft_cap),
            f"attn_type {attn_type}": attn_type != AttentionType.DECODER,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name is not None,
            "an indexer": indexer is not None and not self.is_sparse,
            "q_pad_num_heads": q_pad_num_heads is not None,
        }
        reasons = tuple(
            f"{what} is asked for, which this impl does not do"
            for what, is_so in asked.items()
            if is_so
        )
        if reasons:
            raise UnsupportedConfiguration(
                f"{type(self).__name__}: {'; '.join(reasons)}; leave it out, or use another impl",
                reasons,
            )
        self.prefill_backend = self.own_prefill()(num_heads, scale, self.layer.dimensions)
        self.prepare_layer()

    def own_prefill(self) -> type[MLAPrefillBackend]:
        """Who attends for the prefills of `layer` unless it is told otherwise."""
        return self.prefill_cls

    def prepare_layer(self) -> None:
        """Make once, from `layer`, what the backend's kernels want; the last step of construction."""
        return

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: M,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Codes are written by the prefill backend's kernel where that has the whole answer, and made of
        merged parts elsewhere."""
        plan, backend = attn_metadata.prefill, self.prefill_backend
        assert plan is not None, "a batch without prefills has no part for them"
        target: torch.Tensor | QuantizedOutput = output
        codes = numbers = None
        if output_scale is not None:
            target = codes = QuantizedOutput(codes=output, scale=output_scale)
            if not (plan.is_one_part and backend.supports_quant_output()):
                target = numbers = q.new_empty(output.shape)
        lse = attend_prefill(
            q,
            kv_c_normed,
            k_pe[:, 0],
            kv_c_and_k_pe_cache,
            plan,
            self.layer,
            k_scale,
            backend,
            target,
        )
        if codes is not None and numbers is not None:
            codes.write(numbers)
        return lse if self.need_to_return_lse_for_decode else None
