"""MLAPrefillBackend: who attends for the prefills of a layer over latents.

In: queries of some requests, and keys and values expanded per head. Out: attention and its LSE. This is
dense attention with as many KV heads as query heads, so it is a choice of its own: a layer whose decodes
run on one backend may prefill on another. `prefill_selection` makes the choice.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from attnkit.contract import (
    AttentionBackend,
    AttentionVariant,
    DeviceCapability,
    MLADimensions,
)
from attnkit.kvcache.read import read_tokens
from attnkit.mla.plan import ContextChunk, PrefillPart
from attnkit.output_quant import QuantizedOutput


class MLAPrefillBackend(ABC):
    """Attention of one layer's prefills.

    Both methods are given at least one query, though some requests may have none. They write all rows of
    `output` (num_tokens, num_heads, v_head_dim), in its dtype, zero where a row sees no key, and of
    `lse`, float32 (num_tokens, num_heads), natural, -inf there.
    """

    def __init__(self, num_heads: int, scale: float, dimensions: MLADimensions) -> None:
        """
        Args:
            num_heads: of queries, keys and values.
            scale: factor on q.k.
            dimensions: of the layer.
        """
        self.num_heads, self.scale, self.dimensions = num_heads, scale, dimensions

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """What it is chosen by."""
        ...

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why it cannot run on this machine; None if it can."""
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float16, torch.bfloat16)

    @classmethod
    def supports_dimensions(cls, dimensions: MLADimensions) -> str | None:
        """Why it cannot take heads of these sizes; None if it can."""
        return None

    @classmethod
    def validate_configuration(
        cls,
        device_capability: DeviceCapability | None,
        dtype: torch.dtype,
        dimensions: MLADimensions,
        *,
        here: bool = True,
    ) -> tuple[str, ...]:
        """Every reason why it cannot serve such a layer; empty if it can.

        Args:
            device_capability: None: do not ask.
            dtype: of queries, keys and values.
            dimensions: of the layer.
            here: it must also be able to run on this machine.
        """
        reasons = []
        if here and (absent := cls.unavailable_reason()) is not None:
            reasons.append(absent)
        if device_capability and not cls.supports_compute_capability(device_capability):
            reasons.append(f"device {device_capability} is not supported")
        if not cls.supports_dtype(dtype):
            reasons.append(f"dtype {str(dtype).removeprefix('torch.')} is not supported")
        if (reason := cls.supports_dimensions(dimensions)) is not None:
            reasons.append(reason)
        return tuple(reasons)

    @abstractmethod
    def run_prefill_new_tokens(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefillPart,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Causal attention of each request's tokens to themselves; key and value (num_tokens,
        num_heads, size), requests as in `plan.query_start_loc`."""
        ...

    @classmethod
    def supports_quant_output(cls) -> bool:
        """It has `run_prefill_to_codes`."""
        return False

    def run_prefill_to_codes(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefillPart,
        output: QuantizedOutput,
        lse: torch.Tensor,
    ) -> None:
        """As `run_prefill_new_tokens`, with the output in float8 of one given scale; to the bit what
        quantising it gives. Asked only of backends that say `supports_quant_output`."""
        raise NotImplementedError(f"{type(self).__name__} writes numbers only")

    @abstractmethod
    def run_prefill_context_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: ContextChunk,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attention to the first `chunk.kv_lens` tokens of each request's pages, no mask; key and
        value (num_pages, block_size, num_heads, size). What lies past a length may be NaN."""
        ...


class DensePrefill(MLAPrefillBackend):
    """Through the kernels of a backend for keys and values, which says where they run."""

    dense_backend: ClassVar[type[AttentionBackend]]

    def __init__(self, num_heads: int, scale: float, dimensions: MLADimensions) -> None:
        super().__init__(num_heads, scale, dimensions)
        self._variant = AttentionVariant.from_impl_args(num_heads=num_heads, scale=scale)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return cls.dense_backend.unavailable_reason()

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return cls.dense_backend.supports_compute_capability(capability)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return cls.dense_backend.supports_dtype(dtype)


class RequestwisePrefill(MLAPrefillBackend):
    """Attends for one request after the other; waits for lengths on the device."""

    @abstractmethod
    def attend_request(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attend for one request of q_len >= 1 tokens.

        Args:
            query: (q_len, num_heads, qk_head_dim).
            key: (kv_len, num_heads, qk_head_dim), in order.
            value: (kv_len, num_heads, v_head_dim).
            causal: kv_len is q_len, and token i sees the first i + 1 keys; False: each sees all.
            output, lse: rows of the request.
        """
        ...

    def run_prefill_new_tokens(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefillPart,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        for start, end in itertools.pairwise(plan.query_start_loc.tolist()):
            if start < end:
                rows = slice(start, end)
                self.attend_request(
                    query[rows], key[rows], value[rows], True, output[rows], lse[rows]
                )

    def run_prefill_context_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: ContextChunk,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        starts = itertools.pairwise(chunk.query_start_loc.tolist())
        for request, ((start, end), kv_len) in enumerate(
            zip(starts, chunk.kv_lens.tolist(), strict=True)
        ):
            if start < end:
                rows, table = slice(start, end), chunk.block_table[request]
                k, v = (read_tokens(x, table, kv_len) for x in (key, value))
                self.attend_request(query[rows], k, v, False, output[rows], lse[rows])
