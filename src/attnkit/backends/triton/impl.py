"""TritonImpl: run one layer through the Triton kernels.

In: a layer's static facts, then per step its tensors, its cache and a `TritonMetadata`. Out: attention
in `output`. Which kernel serves a request is decided on the device by its own number of queries: few
go to the decode kernel, which splits long contexts, the rest to the attention kernel. Both are
launched where a batch may need both, so decodes beside a prompt are decoded as fast as alone. On a GPU
a launch is repeated from step to step (`repeat`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnkit.arguments import check_slots
from attnkit.backends.dense import DenseImpl
from attnkit.backends.repeat import Repeats, kind_of
from attnkit.backends.stored import Stored
from attnkit.backends.triton.configs import (
    attention_config,
    decode_config,
    decode_query_len,
    num_splits,
)
from attnkit.backends.triton.operands import (
    Operands,
    OutputCodes,
    Parts,
    StepTensors,
    value_offset,
)
from attnkit.backends.triton.plan import TritonMetadata
from attnkit.contract import (
    AttentionLayer,
    AttentionType,
    QuantKey,
)
from attnkit.kvcache.read import check_pages
from attnkit.output_quant import QuantizedOutput

if TYPE_CHECKING:
    from attnkit.backends.kernel_call import KernelCall

_MAX_PARTS = 1 << 27
"""Float32 elements (512 MiB) that shared requests may take: batches whose parts need more have enough
requests to fill a device without sharing them."""

_CACHELESS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """One call of `TritonImpl.forward`.

    Attributes:
        kv_cache: pages; None: keys and values are those of the step.
        tensors: query and output with as many rows as they were given, the plan's or more.
        kind: what compiled kernels depend on of all this.
    """

    layer: AttentionLayer
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor | None
    tensors: StepTensors
    plan: TritonMetadata
    kind: tuple[object, ...]


class TritonImpl(DenseImpl[TritonMetadata]):
    """One layer. Only launches between call and return."""

    backend_name = "triton"

    def prepare_layer(self) -> None:
        self._repeats = Repeats()

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        return OutputCodes.are_supported(quant_key, self.head_size_v)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend over the cache, or over `key` and `value` themselves for the encoder types.

        Raises:
            UnsupportedConfiguration: the output is in codes that no kernel writes.
        """
        quantized = None
        if output_scale is not None or output_block_scale is not None:
            quantized = QuantizedOutput(
                codes=output, scale=output_scale, block_scale=output_block_scale
            )
            if not self.fused_output_quant_supported(quantized.key):
                self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            if quantized is None:
                output.zero_()
            else:
                quantized.write(query.new_zeros(quantized.shape))
            return output
        plan = attn_metadata
        self.variant = self.variant.to(query.device)
        lse = None
        if self.need_to_return_lse_for_decode:
            shape = (plan.num_actual_tokens, self.num_heads)
            lse = query.new_full(shape, -math.inf, dtype=torch.float32)
        written: torch.Tensor | OutputCodes = output
        if quantized is not None:
            written = OutputCodes.of(quantized, self.num_heads, plan.num_actual_tokens)
        step = self._step(layer, query, key, value, kv_cache, plan, written, lse)
        decoded = 0
        if step.kv_cache is not None:
            check_pages(
                plan.block_table,
                plan.query_start_loc,
                plan.kv_lens,
                kv_cache.shape[0],
                kv_cache.shape[2],
            )
            group_size = self.num_heads // self.num_kv_heads
            decoded = decode_query_len(group_size, plan.decode_query_len)
        if plan.min_query_len <= decoded:
            self._decode(step, decoded)
        if plan.max_query_len > decoded:
            self._attend(step, decoded + 1)
        return output if lse is None else (output, lse)

    def _step(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: TritonMetadata,
        output: torch.Tensor | OutputCodes,
        lse: torch.Tensor | None,
    ) -> _Step:
        attn_type = self.variant.attn_type
        is_decoder = attn_type is AttentionType.DECODER
        cacheless = attn_type in _CACHELESS
        tensors = StepTensors(
            query=_rows(query),
            output=output,
            lse=lse,
            query_start_loc=plan.query_start_loc,
            kv_lens=plan.kv_lens,
            block_table=None if cacheless else plan.block_table,
            causal=plan.causal if is_decoder else False,
            spans=plan.spans if is_decoder else None,
            prefix_lens=plan.prefix_lens if is_decoder else None,
            tree=plan.tree if is_decoder else None,
        )
        kind = tensors.kind
        if cacheless:
            key, value = _rows(key), _rows(value)
            kind = (*kind, kind_of(key, value), value_offset(key, value), query.device)
        return _Step(
            layer=layer,
            key=key,
            value=value,
            kv_cache=None if cacheless else kv_cache,
            tensors=tensors,
            plan=plan,
            kind=kind,
        )

    def _attend(self, step: _Step, min_query_len: int) -> None:
        """Serve the requests with at least so many queries."""
        # Here, so that the class can be asked questions where Triton is not installed.
        from attnkit.backends.triton import launch

        query = step.tensors.query
        sizes = (self.head_size, self.head_size_v, query.element_size(), self._key_bytes(step))
        config = attention_config(*sizes, launch.gpu_of(query.device))
        changing = launch.attention_changes(step.tensors, self.variant, min_query_len)
        if step.kv_cache is None:
            changing |= launch.key_changes(step.key, step.value)
        num_tokens = step.plan.num_actual_tokens
        self._launch(
            step,
            ("attention",),
            launch.attention_grid(step.tensors, num_tokens, self.num_kv_heads, config),
            changing,
            lambda: launch.attention_call(
                self._operands(step), self.variant, min_query_len, config
            ),
        )

    def _decode(self, step: _Step, decoded: int) -> None:
        """Serve the requests with at most `decoded` queries."""
        from attnkit.backends.triton import launch

        plan, tensors = step.plan, step.tensors
        query = tensors.query
        gpu = launch.gpu_of(query.device)
        config = decode_config(
            self.head_size,
            self.head_size_v,
            query.element_size(),
            self._key_bytes(step),
            decoded * (self.num_heads // self.num_kv_heads),
            gpu,
        )
        longest = max(plan.decode_query_len, min(decoded, plan.max_query_len))
        max_segments = max(1, min(config.max_segments, -(-plan.max_kv_len // config.segment)))
        splits = num_splits(
            tensors.num_reqs * self.num_kv_heads,
            gpu.num_sms,
            max_segments,
            longest_to_mean=plan.longest_to_mean,
            is_captured=plan.is_captured,
        )
        numel = Parts.numel(tensors, longest, max_segments)
        if numel > _MAX_PARTS:
            splits = 1
        parts = None
        if splits > 1:
            parts = plan.workspace.parts(tensors, longest, max_segments)
        work = launch.DecodeWork(
            max_query_len=decoded, config=config, num_splits=splits, parts=parts
        )
        changes = launch.decode_changes(tensors, self.variant, self.num_kv_heads, work)
        self._launch(
            step,
            ("decode", decoded, parts is None),
            launch.decode_grid(tensors, self.num_kv_heads, work),
            changes,
            lambda: launch.decode_call(self._operands(step), self.variant, work),
        )
        if parts is not None:
            self._launch(
                step,
                ("merge", decoded),
                launch.merge_grid(tensors, work),
                launch.merge_changes(tensors, self.variant, work),
                lambda: launch.merge_call(self._operands(step), self.variant, work),
            )

    def _launch(
        self,
        step: _Step,
        key: tuple[object, ...],
        grid: tuple[int, ...],
        changing: dict[str, Any],
        make: Callable[[], KernelCall],
    ) -> None:
        """A launch of attention; `key` says which."""
        scales = None if step.kv_cache is None else self._scales(step.layer)
        whole = (*key, *step.kind)
        self._repeats.launch(whole, step.kv_cache, grid, changing, make, scales)

    def _scales(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Those that kernels read."""
        coded = self.cache_format.reads_layer_scales
        return (layer._k_scale, layer._v_scale) if coded else None

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's K and V; slot -1 writes nothing."""
        if kv_cache.numel() == 0:
            return
        check_slots(slot_mapping, kv_cache.shape[0], kv_cache.shape[2])
        from attnkit.backends.triton.cache_launch import write_call, write_changes, write_grid

        key, value = _rows(key), _rows(value)
        self._repeats.launch(
            ("write", kind_of(key, value), slot_mapping.dtype),
            kv_cache,
            write_grid(self.num_kv_heads, slot_mapping),
            write_changes(key, value, slot_mapping),
            lambda: write_call(key, value, self._stored(layer, kv_cache), slot_mapping),
            self._scales(layer),
        )

    def _key_bytes(self, step: _Step) -> int:
        """Of an element of K and V as kernels read them: codes have one."""
        if step.kv_cache is None:
            return step.key.element_size()
        return 1 if self.cache_format.codec is not None else step.kv_cache.element_size()

    def _operands(self, step: _Step) -> Operands:
        """What a step reads and writes, checked."""
        num_tokens = step.plan.num_actual_tokens
        if step.kv_cache is None:
            stored = Stored(key=step.key[:num_tokens], value=step.value[:num_tokens])
        else:
            stored = self._stored(step.layer, step.kv_cache)
        return step.tensors.over(stored, num_tokens)

    def _stored(self, layer: AttentionLayer, kv_cache: torch.Tensor) -> Stored:
        """The cache as the kernels read and write it."""
        from attnkit.backends.triton.launch import gpu_of

        return Stored.of(
            kv_cache,
            self.cache_format,
            self.head_size,
            self.head_size_v,
            layer._k_scale,
            layer._v_scale,
            has_e4m3=gpu_of(kv_cache.device).has_e4m3,
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if the elements of a row do not lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
