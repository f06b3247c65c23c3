"""Cache formats number by number: every byte as documented, every error within half a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from stored_numbers import (
    E2M1,
    E4M3,
    E5M2,
    PACKED,
    QUANTISED,
    SCALED_BY_LAYER,
    decode_content,
    encode,
    largest_error,
    side_bytes,
)

from attnkit.contract import CACHE_DTYPES, KVQuantMode, get_kv_quant_mode
from attnkit.errors import CacheError, ConfigurationError
from attnkit.kvcache.formats import CACHE_FORMATS, cache_format

ONE = torch.ones(())
HEAD_SIZE, HEAD_SIZE_V, HEADS = 32, 16, 2

all_but_nan = st.floats(width=32, allow_nan=False)
moderate = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(-400, 400, width=32),
    st.sampled_from([0.0, -0.0, 2.0**-9, 2.0**-20, -(2.0**-30)]),
)
scales = st.sampled_from([0.007, 0.25, 1.0, 1.5, 3.0])


def vectors(elements: st.SearchStrategy[float], size: int) -> st.SearchStrategy[Any]:
    return arrays(np.float32, (2, HEADS, size), elements=elements)


def bytes_of(name: str, k: Any, v: Any, k_scale: Any = 1.0, v_scale: Any = 1.0) -> Any:
    contents = cache_format(name).encode(
        torch.from_numpy(k),
        torch.from_numpy(v),
        torch.tensor(k_scale, dtype=torch.float32),
        torch.tensor(v_scale, dtype=torch.float32),
    )
    return contents.view(torch.uint8).numpy()


def round_trip(name: str, x: Any, scale: float = 1.0) -> torch.Tensor:
    """Vectors (..., size) as they are read back, as V of the one head."""
    value = torch.as_tensor(x, dtype=torch.float32).reshape(-1, 1, np.shape(x)[-1])
    key = torch.zeros(value.shape[0], 1, 16)
    format_, scale_ = cache_format(name), torch.tensor(scale)
    contents = format_.encode(key, value, ONE, scale_)
    k, v = format_.decode(contents, 16, value.shape[-1], ONE, scale_)
    assert (k == 0).all()
    return v.reshape(np.shape(x))


@pytest.mark.parametrize("name", QUANTISED)
@settings(max_examples=40, deadline=None)
@given(
    k=vectors(all_but_nan, HEAD_SIZE),
    v=vectors(moderate, HEAD_SIZE_V),
    k_scales=st.tuples(scales, scales),
    v_scale=scales,
)
def test_every_byte_is_the_documented_one(
    name: str, k: Any, v: Any, k_scales: tuple[float, float], v_scale: float
) -> None:
    """Keys with a scale per head and any magnitude, values with one scale."""
    per_head = np.array(k_scales, dtype=np.float32)[:, None]
    wanted = np.concatenate(
        [encode(name, k, per_head), encode(name, v, np.array(v_scale, dtype=np.float32))], -1
    )
    assert np.array_equal(bytes_of(name, k, v, k_scales, v_scale), wanted)


@pytest.mark.parametrize("name", QUANTISED)
@settings(max_examples=40, deadline=None)
@given(
    k=vectors(all_but_nan, HEAD_SIZE),
    v=vectors(moderate, HEAD_SIZE_V),
    k_scales=st.tuples(scales, scales),
    v_scale=scales,
)
def test_reading_back_is_code_times_scale(
    name: str, k: Any, v: Any, k_scales: tuple[float, float], v_scale: float
) -> None:
    data = bytes_of(name, k, v, k_scales, v_scale)
    per_head = np.array(k_scales, dtype=np.float32)[:, None]
    wanted = decode_content(
        name, data, HEAD_SIZE, HEAD_SIZE_V, per_head, np.array(v_scale, dtype=np.float32)
    )
    got = cache_format(name).decode(
        torch.from_numpy(data),
        HEAD_SIZE,
        HEAD_SIZE_V,
        torch.tensor(k_scales, dtype=torch.float32),
        torch.tensor(v_scale, dtype=torch.float32),
    )
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype is torch.float32
        assert torch.isfinite(ours).all()
        # One rounding of a float32 product.
        assert np.allclose(ours.double().numpy(), theirs, rtol=2.0**-23, atol=2.0**-149)


@pytest.mark.parametrize("name", QUANTISED)
@settings(max_examples=40, deadline=None)
@given(v=vectors(moderate, HEAD_SIZE_V), scale=st.sampled_from([1.0, 1.5, 3.0]))
def test_an_error_is_at_most_half_a_step(name: str, v: Any, scale: float) -> None:
    if name == "nvfp4":
        # Block scales below e4m3's normal range have wider steps.
        v = np.where(np.abs(v) < 1, 0, v)
    back = round_trip(name, v, scale).double().numpy()
    assert (np.abs(back - v) <= largest_error(name, v, np.array(scale))).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_random_vectors_lose_about_as_much_as_their_bits_say(name: str) -> None:
    """Relative error in the norm: a guard against codes that are right but needlessly coarse."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    error = (round_trip(name, x) - x).norm() / x.norm()
    allowed = {
        "fp8": 0.03,
        "fp8_e4m3": 0.03,
        "fp8_e5m2": 0.06,
        "fp8_per_token_head": 0.03,
        "int8_per_token_head": 0.01,
        "int4_per_token_head": 0.15,
        "nvfp4": 0.11,
    }[name]
    assert allowed / 3 < error < allowed


@pytest.mark.parametrize("name", QUANTISED)
def test_numbers_of_the_format_come_back_exactly(name: str) -> None:
    table = {"fp8_e5m2": E5M2, "nvfp4": E2M1}.get(name, E4M3)
    if name.startswith("int"):
        largest = 127 if name.startswith("int8") else 7
        numbers = np.arange(-largest, largest + 1, dtype=np.float64)
    else:
        numbers = np.concatenate([table, -table])
    # The largest stands in every block of 16, so that each block's scale is 1.
    rest = np.array_split(numbers, -(-len(numbers) // 15))
    rows = np.concatenate([np.append(np.resize(part, 15), numbers.max()) for part in rest])
    assert set(numbers) <= set(rows)
    x = rows if not name.startswith("int") else np.resize(rows, -(-len(rows) // 16) * 16)
    assert torch.equal(round_trip(name, x[None]), torch.tensor(x[None], dtype=torch.float32))


@pytest.mark.parametrize("name", QUANTISED)
def test_zeros_come_back_as_zeros_whatever_the_scale(name: str) -> None:
    x = torch.zeros(3, 16)
    x[1] = -0.0
    x[2, 5] = 1.0
    for scale in (1e-30, 1.0, 1e30):
        back = round_trip(name, x, scale)
        assert torch.equal(back[:2], torch.zeros(2, 16))
        assert not back[2, :5].any()
        assert not back[2, 6:].any()


@pytest.mark.parametrize(
    ("name", "largest"), [("fp8", 448.0), ("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)]
)
def test_fp8_saturates_and_never_wraps(name: str, largest: float) -> None:
    x = [largest, largest * 1.03, largest * 1.5, 1e30, 3.4e38, math.inf]
    x = [*x, *(-y for y in x)]
    back = round_trip(name, [[y * 0.5 for y in x]], 0.5)
    assert torch.equal(back.abs(), torch.full((1, 12), largest * 0.5))
    assert torch.equal(back > 0, torch.tensor([[True] * 6 + [False] * 6]))


def test_nvfp4_saturates_at_its_largest_number_times_the_layers_scale() -> None:
    back = round_trip("nvfp4", [[math.inf, -1e30, 3000.0] + [0.0] * 13], 0.5)
    assert back[0, :3].tolist() == [6 * 448 * 0.5, -6 * 448 * 0.5, 6 * 448 * 0.5]


@pytest.mark.parametrize("name", PACKED[:3])
def test_an_infinity_becomes_the_largest_code_and_stays_finite(name: str) -> None:
    back = round_trip(name, [[math.inf, -math.inf, 1.0] + [0.0] * 13])
    assert back[0, :2].tolist() == [2.0**127, -(2.0**127)]
    assert not back[0, 2:].any()
    # So does the largest number of float32.
    back = round_trip(name, [[torch.finfo(torch.float32).max] + [0.0] * 15])
    assert back[0, 0] == 2.0**127


@pytest.mark.parametrize(("name", "tiny"), [("fp8", 2.0**-9), ("fp8_e5m2", 2.0**-16)])
def test_fp8_denormals_round_to_nearest_even(name: str, tiny: float) -> None:
    x = [[tiny, 3 * tiny, 1.4 * tiny, 1.5 * tiny, 2.5 * tiny, 0.51 * tiny, 0.5 * tiny, 1e-45]]
    wanted = [[tiny, 3 * tiny, tiny, 2 * tiny, 2 * tiny, tiny, 0.0, 0.0]]
    assert round_trip(name, x).tolist() == wanted


@pytest.mark.parametrize("name", PACKED[:3])
def test_vectors_of_denormals_have_the_least_scale(name: str) -> None:
    x = [[2.0**-126, 2.0**-125, -(2.0**-149)] + [0.0] * 13]
    back = round_trip(name, x)
    assert back[0, :2].tolist() == [2.0**-126, 2.0**-125]
    assert (back[0, 2].double() + 2.0**-149).abs() <= 2.0**-136


@pytest.mark.parametrize(("scale", "tie", "even"), [(0.3, 1.5625, 1.5), (0.007, 1.1875, 1.25)])
def test_quotients_are_divided(scale: float, tie: float, even: float) -> None:
    """A tie that multiplying with 1 / scale turns into another code."""
    step = np.float32(scale)
    x = np.float32(tie) * step
    assert x / step == tie
    assert x * (np.float32(1) / step) != tie
    code = cache_format("fp8").encode(
        torch.zeros(1, 1, 1), torch.full((1, 1, 1), float(x)), ONE, torch.tensor(scale)
    )
    assert code[..., 1].float() == even


def test_nvfp4_ties_go_to_the_even_code() -> None:
    x = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    wanted = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    both = [[*x, *(-y for y in x)]]
    assert round_trip("nvfp4", both).tolist() == [[*wanted, *(-y for y in wanted)]]


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_nan_stays_where_it_is(name: str) -> None:
    back = round_trip(name, [[math.nan, 1.0, -math.nan, 2.0]])
    assert back.isnan().tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("name", PACKED)
def test_a_nan_spreads_over_what_shares_its_scale_and_no_further(name: str) -> None:
    x = torch.ones(3, 32)
    x[1, 20] = math.nan
    lost = round_trip(name, x).isnan()
    wanted = torch.zeros(3, 32, dtype=torch.bool)
    wanted[1, 16 if name == "nvfp4" else 0 :] = True
    assert torch.equal(lost, wanted)
    data = bytes_of(name, np.zeros((3, 1, 16), dtype=np.float32), x[:, None].numpy())
    first = sum(side_bytes(name, 16))
    zero = 0x88 if name == "int4_per_token_head" else 0
    codes = data[1, 0, first : first + side_bytes(name, 32)[0]]
    assert (codes[8 if name == "nvfp4" else 0 :] == zero).all()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_input_is_widened_first(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, HEADS, 32, generator=torch.Generator().manual_seed(5)).to(dtype)
    scale = torch.tensor(0.3)
    fmt = cache_format(name)
    low, wide = fmt.encode(x, x, scale, scale), fmt.encode(x.float(), x.float(), scale, scale)
    assert torch.equal(low.view(torch.uint8), wide.view(torch.uint8))


@pytest.mark.parametrize("name", QUANTISED)
def test_offsets_say_where_codes_and_scales_lie(name: str) -> None:
    """A content written by hand at the offsets reads back as meant."""
    fmt = cache_format(name)
    layout = fmt.layout(HEAD_SIZE, HEAD_SIZE_V)
    k_bytes, v_bytes = side_bytes(name, HEAD_SIZE), side_bytes(name, HEAD_SIZE_V)
    assert layout.k_scales == k_bytes[0]
    assert layout.v_codes == sum(k_bytes)
    assert layout.v_scales == sum(k_bytes) + v_bytes[0]
    assert layout.num_bytes == sum(k_bytes) + sum(v_bytes)
    content = torch.zeros(1, 1, layout.num_bytes, dtype=torch.uint8)
    one = {
        "fp8_e5m2": 0x3C,
        "int8_per_token_head": 1,
        "int4_per_token_head": 0x99,
        "nvfp4": 0x22,
    }.get(name, 0x38)
    content[..., : layout.k_scales] = one
    content[..., layout.v_codes : layout.v_scales] = one
    if name == "nvfp4":  # 0.5 and 2 in e4m3.
        content[..., layout.k_scales : layout.v_codes] = 0x30
        content[..., layout.v_scales :] = 0x40
    elif name in PACKED:
        content[..., layout.k_scales : layout.v_codes] = torch.tensor([0, 0, 0, 0x3F])  # 0.5
        content[..., layout.v_scales :] = torch.tensor([0, 0, 0, 0x40])  # 2.0
    k_scale, v_scale = (0.5, 2.0) if name in SCALED_BY_LAYER[:3] else (1.0, 1.0)
    k, v = fmt.decode(content, HEAD_SIZE, HEAD_SIZE_V, torch.tensor(k_scale), torch.tensor(v_scale))
    assert torch.equal(k, torch.full((1, 1, HEAD_SIZE), 0.5))
    assert torch.equal(v, torch.full((1, 1, HEAD_SIZE_V), 2.0))


def test_halves_of_a_byte_hold_neighbours_low_first() -> None:
    x = np.zeros((1, 1, 16), dtype=np.float32)
    x[0, 0, :4] = [7.0, -7.0, 1.0, 0.0]
    assert bytes_of("int4_per_token_head", x, x)[0, 0, :2].tolist() == [0x1F, 0x89]
    x[0, 0, :4] = [6.0, -6.0, 0.5, -0.0]
    assert bytes_of("nvfp4", x, x)[0, 0, :2].tolist() == [0xF7, 0x81]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("sizes", [(16, 16), (64, 128), (128, 64), (80, 48)])
def test_float32_scales_are_aligned(name: str, sizes: tuple[int, int]) -> None:
    layout = cache_format(name).layout(*sizes)
    if name != "nvfp4":
        assert layout.k_scales % 4 == layout.v_scales % 4 == layout.num_bytes % 4 == 0


@pytest.mark.parametrize("name", ["auto", "float16", "bfloat16", "float32"])
def test_plain_formats_store_the_numbers(name: str) -> None:
    key = torch.randn(3, HEADS, 24, generator=torch.Generator().manual_seed(1))
    value = torch.randn(3, HEADS, 8, generator=torch.Generator().manual_seed(2))
    fmt = cache_format(name)
    contents = fmt.encode(key, value, ONE, ONE)
    assert contents.dtype is (fmt.dtype or torch.float32)
    k, v = fmt.decode(contents, 24, 8, ONE, ONE)
    assert torch.equal(k, key.to(contents.dtype).float())
    assert torch.equal(v, value.to(contents.dtype).float())
    assert not fmt.reads_layer_scales
    if name != "auto":
        assert fmt.layout(24, 8).num_bytes == 32 * contents.element_size()


def test_every_name_of_the_contract_is_a_format_but_those_of_latents() -> None:
    assert set(CACHE_DTYPES) - set(CACHE_FORMATS) == {"fp8_ds_mla", "nvfp4_ds_mla"}
    for name, fmt in CACHE_FORMATS.items():
        assert fmt.name == name
        assert (fmt.dtype, fmt.mode) == CACHE_DTYPES[name]
        assert fmt.mode is get_kv_quant_mode(name)
        assert (fmt.codec is None) == (fmt.mode is KVQuantMode.NONE)
        assert fmt.reads_layer_scales == (name in SCALED_BY_LAYER)


def test_unknown_names_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'fp9' .* use one of auto, .*nvfp4"):
        cache_format("fp9")


@pytest.mark.parametrize(
    ("name", "sizes", "granule"),
    [
        ("int8_per_token_head", (30, 32), 4),
        ("fp8_per_token_head", (32, 6), 4),
        ("int4_per_token_head", (12, 16), 8),
        ("nvfp4", (16, 24), 16),
    ],
)
def test_head_sizes_that_do_not_fit_are_named(
    name: str, sizes: tuple[int, int], granule: int
) -> None:
    key, value = (torch.ones(1, 1, size) for size in sizes)
    with pytest.raises(ConfigurationError, match=f"{name} needs head sizes that {granule} divides"):
        cache_format(name).encode(key, value, ONE, ONE)


@pytest.mark.parametrize("shape", [(3,), (1, 2), (2, 1)])
def test_scales_of_another_shape_are_named(shape: tuple[int, ...]) -> None:
    x = torch.ones(1, 2, 16)
    with pytest.raises(ConfigurationError, match=r"v_scale has shape .* 2 KV heads"):
        cache_format("fp8").encode(x, x, ONE, torch.ones(shape))


def test_contents_of_another_format_are_named() -> None:
    with pytest.raises(CacheError, match=r"has 32 bytes, but nvfp4 needs 18"):
        cache_format("nvfp4").decode(torch.zeros(1, 1, 32, dtype=torch.uint8), 16, 16, ONE, ONE)
