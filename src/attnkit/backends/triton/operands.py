"""StepTensors: what is new in an attention step; Operands: these over keys and values; OutputCodes: how
an output is written as codes; Parts: memory for the states of split requests.

In: tensors from whoever has them. Out: the same, checked against each other, with the counts that follow
from their shapes. Host code; does not need Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from attnkit.backends.repeat import kind_of
from attnkit.backends.stored import Codes, Encoding, Stored
from attnkit.contract import QuantKey
from attnkit.output_quant import OUTPUT_KEYS, QuantizedOutput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutputCodes:
    """What a kernel makes of its output instead of numbers: a `QuantizedOutput`. T tokens, H heads.

    Attributes:
        codes: uint8 (T, H, bytes of a head), contiguous.
        scale: float32 (1,), given; None: the format has none.
        block_scales: float32, or uint8 of e4m3, (T, H, scales of a head), contiguous, written; None: the
            format has none.
        encoding: of a number.
        unit: bytes of codes that share a scale of `block_scales`; without these 1.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    block_scales: torch.Tensor | None
    encoding: Encoding
    unit: int

    @staticmethod
    def are_supported(key: QuantKey, head_size_v: int) -> bool:
        """Whether a kernel, which has a head of a row at a time, can write such codes."""
        group = key.scale.group_shape.col
        return key in OUTPUT_KEYS and (group < 0 or head_size_v % group == 0)

    @property
    def kind(self) -> tuple[object, ...]:
        """What compiled kernels depend on."""
        return self.encoding, self.unit, *kind_of(self.codes, self.scale, self.block_scales)

    @classmethod
    def of(cls, quantized: QuantizedOutput, num_heads: int, num_tokens: int) -> OutputCodes:
        """Views of the first rows of an output whose key `are_supported`."""
        packed = quantized.codes.dtype is torch.uint8
        codes = quantized.codes.view(torch.uint8)[:num_tokens].view(num_tokens, num_heads, -1)
        scale, blocks, unit = quantized.scale, quantized.block_scale, 1
        if blocks is not None:
            blocks = blocks.view(torch.uint8) if blocks.itemsize == 1 else blocks
            blocks = blocks[:num_tokens].view(num_tokens, num_heads, -1)
            unit = codes.shape[-1] // blocks.shape[-1]
        return cls(
            codes=codes,
            scale=None if scale is None else scale.view(1),
            block_scales=blocks,
            encoding=Encoding.NVFP4 if packed else Encoding.E4M3,
            unit=unit,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTensors:
    """What attention reads and writes beside keys and values. R requests, T tokens.

    Attributes:
        query: (T, num_heads, head_size).
        output: (T, num_heads, head_size_v), numbers or codes of them.
        lse: float32 (T, num_heads); None: not wanted.
        query_start_loc: int32 (R + 1,).
        kv_lens: int32 (R,): keys of each request. Not read without a block table: there the keys are
            the request's own tokens.
        block_table: int32 (R, W).
        causal: of all requests, or bool (R,).
        spans: int32 (T, 2), dense: keys [start, end) that a token sees beside the layer's mask, as
            `CommonAttentionMetadata.mm_token_spans` makes them; None: no token sees any.
        prefix_lens: int32 (R,): keys below are not left of any window; None: no request has any.
        tree: int64 (T,), dense: which of its request's tokens a token sees, as
            `CommonAttentionMetadata.tree_mask` says; None: no request is a tree.
    """

    query: torch.Tensor
    output: torch.Tensor | OutputCodes
    lse: torch.Tensor | None
    query_start_loc: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor | None
    causal: bool | torch.Tensor
    spans: torch.Tensor | None = None
    prefix_lens: torch.Tensor | None = None
    tree: torch.Tensor | None = None

    @property
    def num_reqs(self) -> int:
        """Requests, padding rows included."""
        return self.kv_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return self.query.shape[0]

    @property
    def head_size_v(self) -> int:
        """Numbers of a head of the output."""
        out = self.output
        if isinstance(out, OutputCodes):
            return out.codes.shape[-1] * (2 if out.encoding is Encoding.NVFP4 else 1)
        return out.shape[-1]

    def over(self, stored: Stored, num_tokens: int) -> Operands:
        """The first rows of these over keys and values, checked."""
        return Operands(
            query=self.query[:num_tokens],
            stored=stored,
            output=self.output
            if isinstance(self.output, OutputCodes)
            else self.output[:num_tokens],
            lse=self.lse,
            query_start_loc=self.query_start_loc,
            kv_lens=self.kv_lens,
            block_table=self.block_table,
            causal=self.causal,
            spans=self.spans,
            prefix_lens=self.prefix_lens,
            tree=self.tree,
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """What compiled kernels depend on of all these (`repeat`)."""
        out, causal = self.output, self.causal
        written = out.kind if isinstance(out, OutputCodes) else kind_of(out)
        flags = causal if isinstance(causal, torch.Tensor) else None
        of_batch = (self.query_start_loc, self.kv_lens, self.block_table, flags)
        beside = (self.spans, self.prefix_lens, self.tree)
        return (
            kind_of(self.query, self.lse),
            written,
            # Kernels do not look at the alignment of these.
            *(None if x is None else x.dtype for x in of_batch),
            *(None if x is None else (x.dtype, x.stride()) for x in beside),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operands(StepTensors):
    """What attention reads and writes.

    Attributes:
        stored: K and V: pages (num_blocks, num_kv_heads, block_size, ...), any strides but 1 for the
            last; without a block table numbers (T, num_kv_heads, size).
    """

    stored: Stored

    def __post_init__(self) -> None:
        q, lse = self.query, self.lse
        k, v = self.stored.key, self.stored.value
        out = self.output.codes if isinstance(self.output, OutputCodes) else self.output
        ndim = 3 if self.block_table is None else 4
        assert k.dim() == v.dim() == ndim, f"key {k.shape} and value {v.shape} are not {ndim}-d"
        assert k.shape[:-1] == v.shape[:-1], f"key {k.shape} does not fit value {v.shape}"
        assert q.shape[-1] == k.shape[-1] * self._per_element, (
            f"query {q.shape} does not fit key {k.shape}"
        )
        assert q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads over {k.shape[1]} KV heads"
        size = v.shape[-1] * self._per_element
        is_fit = out.shape[:-1] == q.shape[:2] and self.head_size_v == size
        assert is_fit, f"output {out.shape} does not fit query {q.shape} and values of {size}"
        for name, x in (("query", q), ("key", k), ("value", v), ("output", out)):
            assert x.stride(-1) == 1 or x.shape[-1] == 1, f"{name} has last stride {x.stride(-1)}"
        assert lse is None or (lse.shape == q.shape[:2] and lse.dtype == torch.float32), lse
        assert lse is None or lse.stride(-1) == 1 or lse.shape[-1] == 1, lse.stride()
        assert self.query_start_loc.shape[0] == self.num_reqs + 1, self.query_start_loc.shape
        spans = self.spans
        assert spans is None or (spans.dtype == torch.int32 and spans.is_contiguous()), spans
        tree = self.tree
        assert tree is None or (tree.dtype == torch.int64 and tree.is_contiguous()), tree

    @property
    def _per_element(self) -> int:
        """Numbers in an element of K and V."""
        return 2 if self.stored.codes in (Codes.INT4, Codes.NVFP4) else 1

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self.stored.key.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.num_kv_heads

    @property
    def value_offset(self) -> int | None:
        """Of the stored keys and values."""
        return value_offset(self.stored.key, self.stored.value)


def value_offset(key: torch.Tensor, value: torch.Tensor) -> int | None:
    """Elements from each key to its value, where both stand in one row as in a layer's cache."""
    offset = value.storage_offset() - key.storage_offset()
    in_row = (
        key.stride() == value.stride()
        and key.untyped_storage()._cdata == value.untyped_storage()._cdata
        and 0 < offset < key.stride(-2)
    )
    return int(offset) if in_row else None


class SplitOperands(Protocol):
    """What the memory for parts depends on: `StepTensors`, or those over latents."""

    @property
    def query(self) -> torch.Tensor: ...
    @property
    def head_size_v(self) -> int: ...
    @property
    def num_reqs(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Where programs that share a request leave the states of its segments.

    Attributes:
        acc: float32 (rows, max_segments, head_size_v), with rows (R, part_rows, num_heads).
        top: float32 (rows, max_segments), the largest score.
        total: float32 (rows, max_segments), the sum of weights.
        part_rows: queries per request that there is room for.
        max_segments: segments per request that there is room for.
    """

    acc: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor
    part_rows: int
    max_segments: int

    @staticmethod
    def numel(operands: SplitOperands, part_rows: int, max_segments: int) -> int:
        """float32 elements that `of` needs."""
        num_parts = operands.num_reqs * part_rows * operands.query.shape[1] * max_segments
        return num_parts * operands.head_size_v + 2 * _aligned(num_parts)

    @classmethod
    def of(
        cls, memory: torch.Tensor, operands: SplitOperands, part_rows: int, max_segments: int
    ) -> Parts:
        """Lay the three out in float32 memory of at least `numel` elements."""
        num_parts = operands.num_reqs * part_rows * operands.query.shape[1] * max_segments
        first = num_parts * operands.head_size_v
        second = first + _aligned(num_parts)
        return cls(
            acc=memory[:first],
            top=memory[first : first + num_parts],
            total=memory[second : second + num_parts],
            part_rows=part_rows,
            max_segments=max_segments,
        )


def _aligned(num_parts: int) -> int:
    """Numbers up to the next multiple of 16 bytes: kernels are compiled anew for another alignment."""
    return -(-num_parts // 4) * 4
