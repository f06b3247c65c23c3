"""Specs and layouts: their arithmetic is that of real memory, their equality makes groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnkit.contract import (
    CACHE_DTYPES,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    GroupShape,
    KVCacheLayout,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
    kv_cache_torch_dtype,
)
from attnkit.errors import ConfigurationError

FACTS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 3,
    "head_size": 40,
    "dtype": torch.bfloat16,
}
SPECS: dict[str, Callable[..., AttentionSpec]] = {
    "full_attention": FullAttentionSpec,
    "mla_attention": MLAAttentionSpec,
    "sliding_window": lambda **k: SlidingWindowSpec(sliding_window=7, **k),
    "chunked_local_attention": lambda **k: ChunkedLocalAttentionSpec(attention_chunk_size=8, **k),
    "encoder_only_attention": EncoderOnlyAttentionSpec,
    "cross_attention": lambda **k: CrossAttentionSpec(max_encoder_tokens=99, **k),
}


@pytest.mark.parametrize("kind", SPECS)
def test_each_kind_says_which_it_is(kind: str) -> None:
    assert SPECS[kind](**FACTS).kind == kind


def test_mla_has_no_values_of_its_own() -> None:
    spec = MLAAttentionSpec(block_size=64, head_size=576, dtype=torch.bfloat16)
    assert (spec.num_kv_heads, spec.head_size_v) == (1, 0)
    assert spec.content_size == 576
    assert spec.page_size_bytes == 64 * 576 * 2
    assert isinstance(spec, FullAttentionSpec)


def test_values_are_as_wide_as_keys_unless_said() -> None:
    assert FullAttentionSpec(**FACTS).head_size_v == 40
    spec = FullAttentionSpec(**FACTS, head_size_v=24)
    assert spec.content_size == 64
    assert spec.page_size_bytes == 16 * 3 * 64 * 2


def test_packing_of_a_backend_replaces_the_plain_arithmetic() -> None:
    spec = FullAttentionSpec(
        **{**FACTS, "dtype": torch.uint8}, num_head_slots=6, state_content_bytes=28
    )
    assert (spec.head_slots, spec.content_size) == (6, 28)
    assert spec.page_size_bytes == 6 * 16 * 28
    compressed = FullAttentionSpec(**FACTS, tokens_per_state=4)
    assert compressed.num_states == 4
    assert compressed.page_size_bytes == 4 * 3 * 80 * 2


def test_padding_may_grow_a_page_but_not_shrink_it() -> None:
    dense = 16 * 3 * 80 * 2
    assert FullAttentionSpec(**FACTS, page_size_padded=dense + 64).page_size_bytes == dense + 64
    assert FullAttentionSpec(**FACTS, page_size_padded=dense).page_size_bytes == dense
    with pytest.raises(
        ConfigurationError, match=f"page_size_padded {dense - 1} is below .*{dense}"
    ):
        FullAttentionSpec(**FACTS, page_size_padded=dense - 1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"block_size": 0}, "block_size 0"),
        ({"num_kv_heads": 0}, "num_kv_heads 0"),
        ({"head_size": -8}, "head_size -8"),
        ({"head_size_v": -1}, "head_size_v -1"),
        ({"tokens_per_state": 0}, "tokens_per_state 0"),
        ({"num_head_slots": 0}, "num_head_slots 0"),
        ({"state_content_bytes": -4}, "state_content_bytes -4"),
        ({"page_size_padded": 1.5}, "page_size_padded 1.5"),
    ],
)
def test_sizes_that_hold_nothing_are_named(wrong: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{named} is not allowed; give .*at least"):
        FullAttentionSpec(**{**FACTS, **wrong})


def test_the_name_of_a_dtype_is_none() -> None:
    with pytest.raises(
        ConfigurationError, match=r"dtype 'float32' is not allowed; give a torch.dtype"
    ):
        FullAttentionSpec(**{**FACTS, "dtype": "float32"})


def test_windows_that_see_nothing_are_named() -> None:
    with pytest.raises(ConfigurationError, match="sliding_window 0"):
        SlidingWindowSpec(**FACTS, sliding_window=0)
    with pytest.raises(ConfigurationError, match="attention_chunk_size 0"):
        ChunkedLocalAttentionSpec(**FACTS, attention_chunk_size=0)


@pytest.mark.parametrize("max_len", [1, 16, 17, 1000])
def test_full_attention_holds_every_block(max_len: int) -> None:
    spec = FullAttentionSpec(**FACTS)
    assert spec.max_num_blocks(max_len, 512) == -(-max_len // 16)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 4, 7, 33])
@pytest.mark.parametrize("step", [1, 5, 16])
def test_a_window_never_needs_more_blocks_than_it_says(
    block_size: int, window: int, step: int
) -> None:
    """Against counting: the blocks that some query of a step sees, for every place of the step."""
    spec = SlidingWindowSpec(**{**FACTS, "block_size": block_size}, sliding_window=window)
    max_len = 90
    needed = 0
    for first in range(max_len - step + 1):
        oldest = max(0, first - window + 1)
        needed = max(needed, (first + step - 1) // block_size - oldest // block_size + 1)
    bound = spec.max_num_blocks(max_len, step)
    assert needed <= bound <= needed + 1
    assert spec.max_num_blocks(1, step) <= 2


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_chunk_never_needs_more_blocks_than_it_says(block_size: int) -> None:
    chunk, step, max_len = 32, 16, 200
    spec = ChunkedLocalAttentionSpec(
        **{**FACTS, "block_size": block_size}, attention_chunk_size=chunk
    )
    needed = 0
    for first in range(0, max_len - step + 1, step):
        oldest = first // chunk * chunk
        needed = max(needed, (first + step - 1) // block_size - oldest // block_size + 1)
    assert needed <= spec.max_num_blocks(max_len, step) == (chunk + step) // block_size


def test_what_the_other_kinds_hold() -> None:
    assert EncoderOnlyAttentionSpec(**FACTS).max_num_blocks(1000, 100) == 0
    cross = CrossAttentionSpec(**FACTS, max_encoder_tokens=33)
    assert cross.max_num_blocks(5, 1) == cross.max_num_blocks(5000, 1) == 3


def test_a_recurrent_state_is_one_block() -> None:
    shapes, dtypes = ((4, 3), (2, 2, 2)), (torch.bfloat16, torch.float32)
    spec = MambaSpec(block_size=512, shapes=shapes, dtypes=dtypes, num_speculative_blocks=3)
    assert spec.page_size_bytes == 4 * 3 * 2 + 8 * 4
    assert spec.max_num_blocks(100_000, 512) == 4
    assert replace(spec, page_size_padded=64).page_size_bytes == 64
    assert spec.kind == "mamba"
    with pytest.raises(ConfigurationError, match="page_size_padded 55 is below the 56"):
        replace(spec, page_size_padded=55)
    with pytest.raises(ConfigurationError, match="2 shapes and 1 dtypes"):
        MambaSpec(block_size=512, shapes=shapes, dtypes=dtypes[:1])


def test_equal_facts_make_equal_specs() -> None:
    assert FullAttentionSpec(**FACTS) == FullAttentionSpec(**FACTS, head_size_v=40)
    assert len({FullAttentionSpec(**FACTS), FullAttentionSpec(**FACTS)}) == 1
    assert FullAttentionSpec(**FACTS) != FullAttentionSpec(**{**FACTS, "block_size": 32})
    assert FullAttentionSpec(**FACTS) != SPECS["sliding_window"](**FACTS)
    assert FullAttentionSpec(**FACTS) != FullAttentionSpec(
        **FACTS, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
    )


def test_another_block_size_changes_nothing_else() -> None:
    spec = SPECS["sliding_window"](**FACTS)
    other = spec.copy_with_new_block_size(64)
    assert (other.block_size, spec.block_size) == (64, 16)
    assert other.copy_with_new_block_size(16) == spec
    assert other.page_size_bytes == 4 * spec.page_size_bytes


def test_the_base_spec_has_no_page() -> None:
    spec = KVCacheSpec(block_size=1)
    assert spec.kind == "unknown"
    with pytest.raises(NotImplementedError):
        _ = spec.page_size_bytes


def test_cache_modes_are_distinct() -> None:
    values = [member.value for member in KVQuantMode.__members__.values()]
    assert len(set(values)) == len(values) == len(list(KVQuantMode))
    assert KVQuantMode.NONE == 0


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_every_format_has_a_mode_and_a_dtype(name: str) -> None:
    dtype, mode = CACHE_DTYPES[name]
    assert get_kv_quant_mode(name) is mode
    assert kv_cache_torch_dtype(name, torch.bfloat16) == (dtype or torch.bfloat16)
    assert (mode is KVQuantMode.NONE) == (name in ("auto", "float16", "bfloat16", "float32"))


@pytest.mark.parametrize("name", ["fp9", "", "FP8"])
def test_an_unknown_format_is_named_beside_those_known(name: str) -> None:
    for function in (get_kv_quant_mode, lambda n: kv_cache_torch_dtype(n, torch.float16)):
        with pytest.raises(ConfigurationError, match=f"{name!r} is not known; use one of auto, "):
            function(name)


def test_quant_keys_are_values() -> None:
    assert kFp8StaticTensorSym == replace(kFp8StaticTensorSym)
    assert kFp8StaticTensorSym.scale.static
    assert kNvfp4Dynamic.scale2 is not None
    assert kNvfp4Dynamic.scale.group_shape == GroupShape(row=1, col=16) == (1, 16)


def test_layouts_are_six_permutations_of_five_dimensions() -> None:
    assert len(KVCacheLayout) == 6
    for layout in KVCacheLayout:
        assert "".join("LBHNC"[dim] for dim in layout.value) == layout.name
        assert sorted(layout.value) == [0, 1, 2, 3, 4]
        assert layout.value[-1] == 4, "the content of a token is dense in every layout"
        assert KVCacheLayout.parse(layout.name.lower()) is layout


def test_layouts_go_by_their_usual_names_too() -> None:
    assert KVCacheLayout.parse("HND") is KVCacheLayout.LBHNC
    assert KVCacheLayout.parse("nhd") is KVCacheLayout.LBNHC
    with pytest.raises(
        ConfigurationError, match="'DNH' is not known; use HND, NHD or one of LBHNC"
    ):
        KVCacheLayout.parse("DNH")


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_what_a_layout_says_of_itself_is_so_in_memory(layout: KVCacheLayout) -> None:
    sizes = (3, 5, 2, 4, 6)  # L B H N C
    memory = torch.arange(3 * 5 * 2 * 4 * 6).view([sizes[dim] for dim in layout.value])
    logical = memory.permute([layout.value.index(dim) for dim in range(5)])

    def is_dense(part: torch.Tensor) -> bool:
        ids = part.flatten().sort().values
        return int(ids[-1] - ids[0]) + 1 == ids.numel()

    assert layout.is_layer_compact == is_dense(logical[1])
    assert layout.is_block_contiguous == is_dense(logical[1, 3])
