"""Subject: the backend under judgement, reached only by the way users reach it.

In: a backend class or name, and a device. Out: layers built through selection, and runs of them
through builder, cache write and impl, into buffers that start as NaN. Nothing here knows how any
backend works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnkit.conformance.case import DTYPES, Basis, Case
from attnkit.conformance.cases import plain_case
from attnkit.conformance.inputs import Inputs, context_of, make_inputs
from attnkit.conformance.pages import cache_scales
from attnkit.conformance.sequences import Tokens, alibi_slopes, sink_logits
from attnkit.contract import (
    AttentionBackend,
    AttentionSpec,
    AttentionType,
    CommonAttentionMetadata,
    CrossAttentionSpec,
    DeviceCapability,
    MultipleOf,
    kv_cache_torch_dtype,
)
from attnkit.errors import BackendUnavailable, ConfigurationError, UnsupportedConfiguration
from attnkit.layer import Attention
from attnkit.paged_layer import PagedLayer
from attnkit.selection import resolve


class LawBroken(AssertionError):
    """The backend did something a right one does not; the message says what was and what should be."""


class NotClaimed(Exception):
    """The backend refuses what a check needs, and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run left behind.

    Attributes:
        out: (num_tokens + padding, num_heads, head_size_v); NaN where nothing was written.
        lse: float32 (num_tokens + padding, num_heads), or None if the case asks for none.
    """

    out: torch.Tensor
    lse: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend on a device.

    Attributes:
        backend: the class.
        device: where it runs.
        name: what it is called in reports.
    """

    backend: type[AttentionBackend]
    device: torch.device
    name: str

    law_variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"sliding_window": 7},
        {"sliding_window": 5, "freed_window": True},
        {"sinks": True},
        {"logits_soft_cap": 2.0},
        {"alibi": True},
        {"causal": False},
        {"mm_prefix": True, "sliding_window": 7},
        {"rswa": True, "sliding_window": 5},
        {"chunk_pages": 1},
        {"tree": True},
    )
    """Fields of a `Case` that laws are tried with, the plain layer first."""

    coded_variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8_per_token_head"},
    )
    """Caches of codes, with scales in the layer and beside the codes: for laws about pages and slots."""

    @classmethod
    def of(
        cls, backend: str | type[AttentionBackend], device: torch.device | str = "cpu"
    ) -> Subject:
        """From a class, or any name that `attnkit.selection.resolve` knows.

        Raises:
            BackendError: there is no such backend, or it cannot run on this machine.
            ConfigurationError: there is no such device.
        """
        DeviceCapability.of(device)
        found = resolve(backend) if isinstance(backend, str) else backend
        name = backend if isinstance(backend, str) else backend.get_name()
        absent = found.unavailable_reason()
        if absent is not None:
            raise BackendUnavailable(f"backend {name} cannot run on this machine: {absent}")
        return cls(found, torch.device(device), name)

    def basis(self) -> Basis:
        """The plain layer this backend takes: what cases are when they are about something else.

        Raises:
            UnsupportedConfiguration: it takes none of the kit's dtypes.
        """
        backend = self.backend
        dtypes = tuple(name for name, dtype in DTYPES.items() if backend.supports_dtype(dtype))
        if not dtypes:
            given = ", ".join(map(str, backend.supported_dtypes)) or "nothing"
            reason = f"{self.name} takes none of {', '.join(map(str, DTYPES.values()))}"
            raise UnsupportedConfiguration(f"{reason}; supported_dtypes says {given}", (reason,))
        sizes = [s for s in (32, 64, 128, *range(8, 513, 8)) if backend.supports_head_size(s)]
        blocks = [b for b in (16, 32, 64, 128, 256) if self.reads_pages_of(b)]
        layouts = backend.supported_kv_cache_layouts()
        plain = Basis()
        size = sizes[0] if sizes else plain.head_size
        return Basis(
            dtypes=dtypes,
            head_size=size,
            small_head_size=16 if backend.supports_head_size(16) else size,
            block_size=blocks[0] if blocks else plain.block_size,
            layout=layouts[0] if layouts else plain.layout,
            lse=backend.supports_lse(),
        )

    def reads_pages_of(self, block_size: int) -> bool:
        """Whether the kernels read pages of this size as they are.

        `supports_block_size` says yes to multiples of an exact size too, since an engine splits them.
        """
        sizes = self.backend.get_supported_kernel_block_sizes()
        return not sizes or any(
            block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size
            for size in sizes
        )

    def layer(self, case: Case, **changes: Any) -> Attention:
        """The layer of a case.

        Args:
            case: what the layer is.
            changes: further or other arguments of `Attention`.

        Raises:
            NotClaimed: the backend refuses such a layer; with its reasons.
        """
        sinks = sink_logits(case)
        arguments: dict[str, Any] = {
            "num_heads": case.num_heads,
            "head_size": case.head_size,
            "scale": case.softmax_scale,
            "num_kv_heads": case.num_kv_heads,
            "alibi_slopes": alibi_slopes(case),
            "sliding_window": case.sliding_window,
            "kv_cache_dtype": case.kv_cache_dtype,
            "logits_soft_cap": case.logits_soft_cap,
            "attn_type": case.attn_type,
            "sinks": None if sinks is None else torch.tensor(sinks),
            "use_alibi_sqrt": case.alibi_sqrt,
            "head_size_v": case.head_size_v,
            "dtype": case.dtype,
            "device": self.device,
            "backend": self.backend,
            "block_size": case.block_size,
            "return_lse": case.return_lse,
            "use_per_head_quant_scales": case.per_head_scales,
            "use_non_causal": case.attn_type is AttentionType.DECODER and case.causal is not True,
            "use_mm_prefix": case.mm_prefix,
            "use_rswa": case.rswa,
            "use_tree_mask": case.tree,
            "attention_chunk_size": case.attention_chunk_size,
        }
        try:
            layer = Attention(**{**arguments, **changes})
        except (UnsupportedConfiguration, ConfigurationError) as refusal:
            raise NotClaimed(str(refusal)) from refusal
        if not case.is_cacheless:
            self.prepare_cache(layer, case)
        return layer

    def prepare_cache(self, layer: PagedLayer, case: Case) -> None:
        """Give a layer the scales of its case.

        Raises:
            NotClaimed: the backend does not read pages of the case's size or layout.
        """
        if case.stored.reads_layer_scales:
            for name, scale in zip(("_k_scale", "_v_scale"), cache_scales(case), strict=True):
                getattr(layer, name).copy_(scale)
            layer.process_weights_after_loading(case.dtype)
        if not self.reads_pages_of(case.block_size):
            raise NotClaimed(
                f"blocks of {case.block_size} tokens are split before the kernels see them"
            )
        layouts = self.backend.supported_kv_cache_layouts()
        if layouts is not None and case.layout not in layouts:
            allowed = ", ".join(layout.name for layout in layouts)
            raise NotClaimed(
                f"KV cache layout {case.layout.name} is not supported (allowed: {allowed})"
            )

    def plain_case(self, name: str, **fields: Any) -> Case:
        """A case of the basis; explicit fields win."""
        return plain_case(name, self.basis(), **fields)

    def plain_request(self) -> dict[str, Any]:
        """Fields of an `AttentionRequest` for the plain layer this backend takes."""
        basis = self.basis()
        return {
            "head_size": basis.head_size,
            "dtype": DTYPES[basis.dtypes[0]],
            "device_capability": DeviceCapability.of(self.device),
        }

    def spec(self, layer: PagedLayer, case: Case) -> AttentionSpec | None:
        """What the layer of a case keeps in the cache; None if it keeps nothing."""
        if case.attn_type is not AttentionType.ENCODER_DECODER:
            return layer.get_kv_cache_spec(case.block_size)
        return CrossAttentionSpec(
            block_size=case.block_size,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            head_size_v=case.head_size_v,
            dtype=kv_cache_torch_dtype(case.kv_cache_dtype, case.dtype),
            max_encoder_tokens=max(case.seq_lens, default=1),
        )

    def inputs(
        self,
        layer: PagedLayer,
        case: Case,
        *,
        poison: float = math.nan,
        page_seed: int = 0,
        tokens: Sequence[Tokens] | None = None,
    ) -> Inputs:
        """Tensors of a case for this backend, its cache holding the context.

        Args:
            layer: of the case.
            case: what to make; the rest as in `make_inputs`.

        Raises:
            NotClaimed: the backend has a cache shape of its own, which this case cannot be put into.
        """
        inputs = make_inputs(
            case,
            self.spec(layer, case),
            self.device,
            poison=poison,
            page_seed=page_seed,
            tokens=tokens,
            backend=self.backend,
        )
        if case.is_cacheless or inputs.is_logical:
            return inputs
        quantised = case.stored.codec is not None
        if quantised or case.freed_window or case.attn_type is not AttentionType.DECODER:
            raise NotClaimed("a cache in a shape of the backend's own is filled by the layer only")
        context = context_of(inputs)
        if context is not None:
            self.run(layer, context)
        return inputs

    def plan(self, layer: PagedLayer, inputs: Inputs, batch: CommonAttentionMetadata) -> Any:
        """What the backend's builder makes of a batch."""
        if layer.attn_type is not AttentionType.ENCODER_DECODER:
            return layer.build(batch)
        # The spec of cross attention is the engine's to make, and so is the builder's.
        builder_cls = layer.backend.get_builder_cls()
        spec = self.spec(layer, inputs.case)
        assert spec is not None
        names = [layer.layer_name]
        return builder_cls(spec, names, layer.vllm_config, self.device).build(0, batch)

    def run(
        self,
        layer: PagedLayer,
        inputs: Inputs,
        *,
        batch: CommonAttentionMetadata | None = None,
        plan: Any = None,
    ) -> Result:
        """One step of the layer.

        Args:
            layer: from `layer`.
            inputs: tensors of the step.
            batch: instead of the inputs' own.
            plan: instead of building one from the batch.
        """
        if plan is None:
            plan = self.plan(layer, inputs, inputs.batch if batch is None else batch)
        num_rows, heads = inputs.query.shape[0], layer.num_heads
        out = torch.full(
            (num_rows, heads, layer.head_size_v), math.nan, dtype=layer.dtype, device=self.device
        )
        lse = None
        if layer.return_lse:
            lse = torch.full((num_rows, heads), math.nan, device=self.device)
        # What Attention.forward does after it has made its output, so that the output may start as
        # NaN and rows that nobody wrote show.
        layer._run(inputs.query, inputs.key, inputs.value, out, lse, inputs.kv_cache, plan)
        return Result(out=out, lse=lse)
