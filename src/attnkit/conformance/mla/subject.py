"""MLASubject: a backend over latents under judgement.

In: as for `Subject`. Out: `MLAAttention` layers of cases, and inputs whose sequences are latents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from attnkit.conformance.case import DTYPES, Case
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.mla.case import MLABasis, MLACase
from attnkit.conformance.mla.cases import SIZES, plain_mla_case
from attnkit.conformance.mla.indexer import KitIndexer, watch_plans
from attnkit.conformance.mla.sequence import LatentSequence
from attnkit.conformance.sequences import Tokens
from attnkit.conformance.subject import NotClaimed, Subject
from attnkit.contract import (
    DeviceCapability,
    KVCacheLayout,
    MLADimensions,
    SpeculativeConfig,
    VllmConfig,
)
from attnkit.errors import ConfigurationError, UnsupportedConfiguration
from attnkit.kvcache.formats import LATENT_FORMATS
from attnkit.mla_layer import MLAAttention
from attnkit.paged_layer import PagedLayer

_SMALL = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
_TILED = MLADimensions(kv_lora_rank=128, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32)


class MLASubject(Subject):
    """A backend over latents on a device."""

    law_variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"told": 6},
        {"decode_query_len": 20},
        {"decode_query_len": 1, "workspace_pages": 1},
    )
    coded_variants: ClassVar[tuple[dict[str, Any], ...]] = ({"kv_cache_dtype": "fp8"},)

    def basis(self) -> MLABasis:  # type: ignore[override]
        """The plain layer this backend takes.

        Raises:
            UnsupportedConfiguration: it takes none of the kit's dtypes or sizes.
        """
        backend = self.backend
        dtypes = tuple(name for name, dtype in DTYPES.items() if backend.supports_dtype(dtype))
        formats = tuple(n for n in LATENT_FORMATS if backend.supports_kv_cache_dtype(n))
        takes = [d for d in (_SMALL, _TILED, *SIZES) if self.takes(d, "auto")]
        if not dtypes or not takes:
            reason = f"{self.name} takes none of the kit's dtypes and sizes"
            raise UnsupportedConfiguration(f"{reason}; say which it does", (reason,))
        tiled = [d for d in takes if all(self.takes(d, name) for name in formats)]
        blocks = [b for b in (16, 32, 64, 128, 256) if self.reads_pages_of(b)]
        layouts = backend.supported_kv_cache_layouts()
        return MLABasis(
            dtypes=dtypes,
            dimensions=takes[0],
            tiled=tiled[0] if tiled else takes[0],
            formats=formats,
            block_size=blocks[0] if blocks else 16,
            layout=layouts[0] if layouts else KVCacheLayout.LBNHC,
            lse=backend.supports_lse(),
        )

    def takes(self, dimensions: MLADimensions, kv_cache_dtype: str) -> bool:
        """Whether the backend says yes to these sizes."""
        if not self.backend.supports_head_size(dimensions.latent_size):
            return False
        return self.backend.supports_mla_dimensions(dimensions, kv_cache_dtype) is None

    @property
    def _expands(self) -> bool:
        """Its impl serves prefills with expanded heads."""
        return self.backend.get_impl_cls().supports_dense_mha_prefill

    def plain_case(self, name: str, **fields: Any) -> MLACase:
        return plain_mla_case(name, self.basis(), **fields)

    def plain_request(self) -> dict[str, Any]:
        basis = self.basis()
        return {
            "head_size": basis.dimensions.latent_size,
            "use_mla": True,
            "use_sparse": self.backend.is_sparse(),
            "mla": basis.dimensions,
            "dtype": DTYPES[basis.dtypes[0]],
            "device_capability": DeviceCapability.of(self.device),
        }

    def layer(self, case: Case, **changes: Any) -> MLAAttention:  # type: ignore[override]
        """The layer of a case.

        Args:
            case: what the layer is.
            changes: further or other arguments of `MLAAttention`.

        Raises:
            NotClaimed: the backend refuses such a layer; with its reasons.
        """
        assert isinstance(case, MLACase)
        if case.names_dense_feature:
            raise NotClaimed(
                "a layer over latents has no window, sink, bias, cap or scale per head"
            )
        is_sparse = self.backend.is_sparse()
        if is_sparse and not self._expands and (case.decode_query_len or case.workspace_pages):
            raise NotClaimed("all requests are decodes, since lists are of queries")
        if case.told is not None and not is_sparse:
            raise NotClaimed("the backend attends to all keys")
        indexer = KitIndexer(case.told, case.block_size) if is_sparse else None
        kv_b_proj = nn.Linear(*reversed(case.weight.shape), bias=False, dtype=case.dtype)
        kv_b_proj.weight.data = case.weight.to(self.device)
        drafts = case.num_drafts
        speculative = None if drafts is None else SpeculativeConfig(num_speculative_tokens=drafts)
        arguments: dict[str, Any] = {
            "scale": case.softmax_scale,
            "kv_cache_dtype": case.kv_cache_dtype,
            "dtype": case.dtype,
            "device": self.device,
            "backend": self.backend,
            "block_size": case.block_size,
            "return_lse": case.return_lse,
            "indexer": indexer,
            "vllm_config": VllmConfig(speculative_config=speculative),
        }
        try:
            layer = MLAAttention(
                case.num_heads, case.dimensions, kv_b_proj, **{**arguments, **changes}
            )
        except (UnsupportedConfiguration, ConfigurationError) as refusal:
            raise NotClaimed(str(refusal)) from refusal
        if indexer is not None:
            watch_plans(layer, indexer)
        self.prepare_cache(layer, case)
        builder: Any = layer.make_builder()
        if case.decode_query_len is not None:
            builder.reorder_batch_threshold = case.decode_query_len
        if case.workspace_pages is not None:
            if not hasattr(builder, "workspace_tokens"):
                raise NotClaimed("the builder has no workspace_tokens to bound")
            builder.workspace_tokens = case.workspace_pages * case.block_size
        layer._builder = builder
        return layer

    def inputs(
        self,
        layer: PagedLayer,
        case: Case,
        *,
        poison: float = math.nan,
        page_seed: int = 0,
        tokens: Sequence[Tokens] | None = None,
    ) -> Inputs:
        """As `Subject.inputs`; the sequences have the weights of the layer."""
        assert isinstance(case, MLACase)
        inputs = Subject.inputs(
            self, layer, case, poison=poison, page_seed=page_seed, tokens=tokens
        )
        weight = case.weight.unflatten(0, (case.num_heads, -1))
        latents = [
            LatentSequence(
                q=s.q, k=s.k, v=s.v, meaning=replace(s.meaning, told=case.told), weight=weight
            )
            for s in inputs.sequences
        ]
        return replace(inputs, sequences=tuple(latents))
