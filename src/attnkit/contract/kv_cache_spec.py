"""What one layer keeps in the KV cache, and how pages lie in memory.

In: a layer's head counts, sizes and cache format. Out: `KVCacheSpec`s, whose equality decides which
layers share a block table, whose arithmetic sizes the pool; and `KVCacheLayout`, a permutation of
one logical shape. Everything is in bytes and tokens; nothing here holds memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import replace as _replace
from enum import Enum

import torch

from attnkit.arguments import check_count, check_dtype
from attnkit.contract.quant import KVQuantMode
from attnkit.contract.types import MultipleOf
from attnkit.errors import ConfigurationError


class KVCacheLayout(Enum):
    """Order in memory, outermost first, of layers L, blocks B, KV heads H, tokens N, content C.

    The logical shape of a layer's cache is always (B, H, N, C); a layout only changes its strides.
    Values are the permutation of (L, B, H, N, C).
    """

    LBHNC = (0, 1, 2, 3, 4)
    """One tensor a layer, heads before tokens ("HND")."""
    LBNHC = (0, 1, 3, 2, 4)
    """One tensor a layer, tokens before heads ("NHD")."""
    LHBNC = (0, 2, 1, 3, 4)
    """One tensor a layer, all blocks of a head together."""
    BLHNC = (1, 0, 2, 3, 4)
    """All layers of a block together, heads before tokens: one copy moves a block."""
    BLNHC = (1, 0, 3, 2, 4)
    """All layers of a block together, tokens before heads."""
    BHLNC = (1, 2, 0, 3, 4)
    """All layers of a head of a block together: one copy moves a rank's heads."""

    @classmethod
    def parse(cls, name: str) -> KVCacheLayout:
        """A layout by its letters, or "HND" / "NHD".

        Raises:
            ConfigurationError: the name is not known.
        """
        alias = {"HND": "LBHNC", "NHD": "LBNHC"}.get(name.upper(), name.upper())
        if alias not in cls.__members__:
            raise ConfigurationError(
                f"KV cache layout {name!r} is not known; use HND, NHD or one of "
                f"{', '.join(cls.__members__)}"
            )
        return cls[alias]

    @classmethod
    def heads_first(cls) -> tuple[KVCacheLayout, ...]:
        """All layouts, in the order of kernels that take any strides and read a head at a time: first
        those in which a head's tokens of a page lie side by side."""
        return (cls.LBHNC, cls.LHBNC, cls.BLHNC, cls.BHLNC, cls.LBNHC, cls.BLNHC)

    @property
    def is_layer_compact(self) -> bool:
        """Each layer's cache is one dense region."""
        return self.value[0] == 0

    @property
    def is_block_contiguous(self) -> bool:
        """A block of one layer is one dense page."""
        return self.value[2:] in ((2, 3, 4), (3, 2, 4))


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What a layer keeps per block of tokens. Layers whose specs are equal form a group.

    Attributes:
        block_size: tokens in a block.
        block_stride_alignment: distance between blocks is a multiple of this many tokens' bytes.
    """

    block_size: int
    block_stride_alignment: MultipleOf | None = None

    def __post_init__(self) -> None:
        check_count("block_size", self.block_size)

    @property
    def kind(self) -> str:
        """What errors call this kind of cache."""
        return "unknown"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError

    def max_num_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks one request can hold at once.

        Args:
            max_model_len: longest request in tokens.
            max_in_flight_tokens: most tokens scheduled but not yet settled in one step.
        """
        return math.ceil(max_model_len / self.block_size)

    def copy_with_new_block_size(self, block_size: int) -> KVCacheSpec:
        """The same spec for blocks of another size."""
        return _replace(self, block_size=block_size)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of a softmax attention layer.

    Attributes:
        num_kv_heads: heads on this rank.
        head_size: of keys.
        head_size_v: of values; None: as keys.
        dtype: of cache elements.
        kv_quant_mode: how the elements encode K and V.
        page_size_padded: bytes of a page including padding; None: no padding.
        num_head_slots: heads in the logical shape where a backend packs K and V as separate heads.
        state_content_bytes: bytes per head and token where a backend packs scales beside the codes.
        tokens_per_state: tokens that share one cached state.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int | None = None
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        for name in ("num_kv_heads", "head_size", "tokens_per_state"):
            check_count(name, getattr(self, name))
        check_count("head_size_v", self.head_size_v, lowest=0)
        for name in ("page_size_padded", "num_head_slots", "state_content_bytes"):
            check_count(name, getattr(self, name), optional=True)
        check_dtype(self.dtype)
        _check_padding(self.page_size_padded, self.unpadded_page_size_bytes)

    @property
    def num_states(self) -> int:
        """Cached states in a block: block_size unless several tokens share one."""
        return self.block_size // self.tokens_per_state

    @property
    def content_bytes(self) -> int:
        """Bytes per head and state."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        assert self.head_size_v is not None
        return (self.head_size + self.head_size_v) * self.dtype.itemsize

    @property
    def content_size(self) -> int:
        """Elements per head and state: the last dimension C of the logical shape."""
        return self.content_bytes // self.dtype.itemsize

    @property
    def head_slots(self) -> int:
        """Dimension H of the logical shape."""
        return self.num_head_slots or self.num_kv_heads

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of a page without padding."""
        return self.head_slots * self.num_states * self.content_bytes

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token stays: later ones may see all of them, or a window whose pages are not freed."""

    @property
    def kind(self) -> str:
        return "full_attention"


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """A latent and a rope part shared by all heads: no separate values (`head_size_v` 0).

    `num_kv_heads` is 1. `cache_dtype_str` is a name of `CACHE_DTYPES` that says how a row is packed;
    None: plainly, in `dtype`.
    """

    num_kv_heads: int = 1
    head_size_v: int | None = 0
    cache_dtype_str: str | None = None

    @property
    def kind(self) -> str:
        return "mla_attention"


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    """Reference sliding-window attention: a request's prefix stays visible to all later tokens, other
    tokens for `rswa_window` ones. Blocks wholly between the two are freed.

    How long a prefix is differs per request, so the most that one holds is that of full attention.
    """

    rswa_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rswa_window < 1:
            raise ConfigurationError(
                f"rswa_window {self.rswa_window} sees nothing; give at least 1"
            )

    @property
    def kind(self) -> str:
        return "rswa_attention"


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Only the last `sliding_window` tokens are visible; blocks wholly before them are freed."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window < 1:
            raise ConfigurationError(
                f"sliding_window {self.sliding_window} sees nothing; give at least 1"
            )

    @property
    def kind(self) -> str:
        return "sliding_window"

    def max_num_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        # One more: the window may begin in the middle of a block.
        return math.ceil(tokens / self.block_size) + 1


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Only tokens of the query's own chunk (position // `attention_chunk_size`) are visible."""

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_chunk_size < 1:
            raise ConfigurationError(
                f"attention_chunk_size {self.attention_chunk_size} sees nothing; give at least 1"
            )

    @property
    def kind(self) -> str:
        return "chunked_local_attention"

    def max_num_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        tokens = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return math.ceil(tokens / self.block_size)


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Nothing is kept between steps."""

    @property
    def kind(self) -> str:
        return "encoder_only_attention"

    def max_num_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of the encoder's output, written once per request.

    Attributes:
        max_encoder_tokens: longest encoder output.
    """

    max_encoder_tokens: int

    @property
    def kind(self) -> str:
        return "cross_attention"

    def max_num_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return math.ceil(self.max_encoder_tokens / self.block_size)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """The recurrent state of an SSM layer: one block holds one whole state.

    Attributes:
        shapes: of the state's tensors (convolution, recurrence, ...).
        dtypes: of the same.
        mamba_type: which mixer the state belongs to; layers of two are not one group.
        num_speculative_blocks: further states kept per request for drafts.
        page_size_padded: bytes of a block including padding; None: no padding.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_type: str = "mamba2"
    num_speculative_blocks: int = 0
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shapes) != len(self.dtypes):
            raise ConfigurationError(
                f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes were given; "
                "give one dtype per state tensor"
            )
        _check_padding(self.page_size_padded, self.unpadded_page_size_bytes)

    @property
    def kind(self) -> str:
        return "mamba"

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of a block without padding."""
        return sum(math.prod(s) * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True))

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_size_bytes

    def max_num_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return 1 + self.num_speculative_blocks


def _check_padding(padded: int | None, dense: int) -> None:
    if padded is not None and padded < dense:
        raise ConfigurationError(
            f"page_size_padded {padded} is below the {dense} bytes a page needs; give more or None"
        )
