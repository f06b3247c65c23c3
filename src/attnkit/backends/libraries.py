"""What adapters to installed libraries share: is it there, pages as it reads them, its LSE as ours.

In: names of modules; our cache; what a library returned. Out: an answer for selection; views of the
cache without a copy; output and LSE as docs/semantics.md has them. Nothing is imported before it runs.
"""

from __future__ import annotations

import importlib.util
import math
from abc import abstractmethod
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Protocol, TypeVar

import torch

from attnkit.backends.dense import DenseImpl
from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    AttentionType,
    AttentionVariant,
    CommonAttentionMetadata,
    DeviceCapability,
)
from attnkit.errors import BatchError, UnsupportedConfiguration
from attnkit.kvcache.formats import cache_format


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing the packages it lies in."""
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not below:
        return spec is not None
    places = [Path(folder, *below) for folder in spec.submodule_search_locations or ()]
    return any(p.with_suffix(".py").is_file() or (p / "__init__.py").is_file() for p in places)


def token_pages(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a plain cache as views, tokens before heads: (num_blocks, block_size, num_kv_heads,
    size)."""
    by_token = kv_cache.transpose(1, 2)
    return by_token[..., :head_size], by_token[..., head_size:]


def plain_cache_refusal(kv_cache_dtype: str | None, dtype: torch.dtype) -> str | None:
    """Why a library that reads keys in the dtype of the queries does not read such a cache; None: it
    does."""
    name = str(dtype).removeprefix("torch.")
    if kv_cache_dtype in (None, "auto", name):
        return None
    return f"KV cache dtype {kv_cache_dtype} differs from the layer's {name}"


def expect_causal(batch: CommonAttentionMetadata, backend: str) -> None:
    """Refuse a batch for a backend that does causal ones alone.

    Raises:
        BatchError: some request is not causal.
    """
    if batch.causal is not True:
        raise BatchError(
            f"the batch has causal={batch.causal}, and {backend} does causal batches only; name a "
            "backend that does others (attnkit backends)"
        )


def expect_plain_decoder(
    variant: AttentionVariant, head_size: int, head_size_v: int, backend: str
) -> None:
    """Refuse a layer for a backend whose masks are causal and no more.

    Raises:
        UnsupportedConfiguration: it has a window or ALiBi, other values than keys, or is no decoder.
    """
    others = {
        "sliding window": variant.sliding_window is not None,
        f"value head size {head_size_v}": head_size_v != head_size,
        "ALiBi": variant.alibi_slopes is not None,
        f"attention type {variant.attn_type}": variant.attn_type is not AttentionType.DECODER,
    }
    for name in (name for name, given in others.items() if given):
        reason = f"{name} is asked for, which this backend does not do"
        raise UnsupportedConfiguration(f"{backend}: {reason}", (reason,))


def natural_from_base_2(lse: torch.Tensor) -> torch.Tensor:
    """An LSE of base 2 as one of base e."""
    return lse * math.log(2)


def without_keys_minus_infinity(lse: torch.Tensor) -> torch.Tensor:
    """An LSE that is plus infinity where a row sees no key, as one that is minus infinity there."""
    return torch.where(lse == math.inf, -math.inf, lse)


def join_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE with one more logit per head in the denominator, of a call that knew none.

    Args:
        out: (num_tokens, num_heads, head_size_v).
        lse: float32 (num_tokens, num_heads), natural.
        sinks: (num_heads,).

    Returns:
        Both in float32.
    """
    total = torch.logaddexp(lse, sinks.float())
    share = torch.where(torch.isinf(lse), 0.0, torch.exp(lse - total))
    return out.float() * share[..., None], total


class LibraryBackend(AttentionBackend):
    """What selection hears of every such library: 16 bits, plain caches, soft caps, and sinks, which we
    add."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

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
        return plain_cache_refusal(kv_cache_dtype, dtype)

    @classmethod
    def supports_logits_soft_cap(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # The library takes the longest query, or all lengths, from the host.
        return False


class LibraryPlan(Protocol):
    """What a library's plan of a batch has."""

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        ...


PlanT = TypeVar("PlanT", bound=LibraryPlan)


class LibraryImpl(DenseImpl[PlanT]):
    """One layer of a plain decoder: a library attends over our pages, the rest is ours.

    Attributes:
        backend_name: as errors call it.
    """

    backend_name: ClassVar[str]

    def prepare_layer(self) -> None:
        expect_plain_decoder(self.variant, self.head_size, self.head_size_v, self.backend_name)
        self._library = self.load_library()

    @abstractmethod
    def load_library(self) -> ModuleType:
        """Import what `attend` calls. A build that is there and breaks raises its own error here."""

    @abstractmethod
    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PlanT, *, want_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the library, at least one query token given.

        Returns:
            Output (num_tokens, num_heads, head_size), and, if wanted, the natural LSE, float32
            (num_tokens, num_heads), minus infinity where a row sees no key. Sinks have no part in it.
        """

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's K and V; slot -1 writes nothing."""
        stored = cache_format(self.kv_cache_dtype)
        stored.write(key, value, kv_cache, slot_mapping, layer._k_scale, layer._v_scale)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PlanT,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend over the cache."""
        self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        num_tokens, sinks = attn_metadata.num_tokens, self.variant.sinks
        want_lse = self.need_to_return_lse_for_decode
        lse = None
        if num_tokens:
            out, lse = self.attend(
                query[:num_tokens],
                kv_cache,
                attn_metadata,
                want_lse=want_lse or sinks is not None,
            )
            if sinks is not None:
                assert lse is not None, "it was wanted"
                out, lse = join_sinks(out, lse, sinks.to(out.device))
            output[:num_tokens] = out.to(output.dtype)
        if not want_lse:
            return output
        none = query.new_empty((0, self.num_heads), dtype=torch.float32)
        return output, none if lse is None else lse
