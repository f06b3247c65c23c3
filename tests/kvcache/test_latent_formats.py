"""Rows of latents: every byte as documented, and as DeepSeek's kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from stored_numbers import E2M1, E4M3, F32, LAYER_TABLES, nearest, value_of

from attnkit.errors import ConfigurationError
from attnkit.kvcache.formats import LATENT_FORMATS, cache_format, latent_format

RANK, ROPE = 512, 64
ONE = torch.ones(())
numbers = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 2.0**-149, 448.0, 3e38]),
)


def encoded(name: str, latent: Any, rotated: Any, scale: float = 1.0) -> Any:
    contents = latent_format(name).encode(
        torch.from_numpy(latent)[:, None],
        torch.from_numpy(rotated)[:, None],
        torch.tensor(scale),
        torch.tensor(scale),
    )
    return contents[:, 0].view(torch.uint8).numpy()


def read_back(name: str, data: Any, rank: int, rope: int, scale: float = 1.0) -> Any:
    parts = latent_format(name).decode(
        torch.from_numpy(data.copy())[:, None], rank, rope, torch.tensor(scale), torch.tensor(scale)
    )
    return [part[:, 0].numpy() for part in parts]


def bfloat16_bytes(x: Any) -> Any:
    """Rounded to nearest, ties to even, little-endian."""
    bits = x.astype(F32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").view(np.uint8).reshape(*x.shape[:-1], -1)


@settings(max_examples=25, deadline=None)
@given(
    latent=arrays(np.float32, (2, RANK), elements=numbers),
    rotated=arrays(np.float32, (2, ROPE), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
)
def test_a_deepseek_row_is_656_bytes_as_documented(latent: Any, rotated: Any) -> None:
    """512 codes, four float32 scales, one per 128 of them, 64 bfloat16."""
    data = encoded("fp8_ds_mla", latent, rotated)
    assert data.shape == (2, 656)
    tiles = latent.reshape(2, 4, 128)
    largest = np.minimum(np.abs(tiles).max(-1), F32(2.0**127))
    scales = np.maximum(largest / F32(448), F32(2.0**-126))
    codes = nearest(E4M3, np.clip(tiles / scales[..., None], -448, 448))
    assert np.array_equal(data[:, :512], codes.reshape(2, 512))
    assert np.array_equal(data[:, 512:528], scales.astype("<f4").view(np.uint8).reshape(2, 16))
    assert np.array_equal(data[:, 528:], bfloat16_bytes(rotated))
    latent_back, rotated_back = read_back("fp8_ds_mla", data, RANK, ROPE)
    values = (value_of(E4M3, codes) * scales[..., None].astype(np.float64)).reshape(2, RANK)
    np.testing.assert_allclose(latent_back, values, rtol=1e-7)
    assert np.array_equal(bfloat16_bytes(rotated_back), data[:, 528:])


@settings(max_examples=25, deadline=None)
@given(
    latent=arrays(np.float32, (2, RANK), elements=numbers),
    rotated=arrays(np.float32, (2, ROPE), elements=numbers),
)
def test_a_row_of_four_bit_floats_is_352_bytes_as_documented(latent: Any, rotated: Any) -> None:
    """512 codes in halves, 64 fp8, 32 fp8 scales, that of block s at byte 8 * (s % 4) + s // 4."""
    data = encoded("nvfp4_ds_mla", latent, rotated, 7.0)  # The layer's scale has no part.
    assert data.shape == (2, 352)
    with np.errstate(over="ignore"):
        blocks = latent.reshape(2, 32, 16)
        scale_codes = nearest(E4M3, np.clip(np.abs(blocks).max(-1) / F32(6), 2.0**-9, 448))
        scales = value_of(E4M3, scale_codes).astype(F32)
        codes = nearest(E2M1, np.clip(blocks / scales[..., None], -6, 6)).reshape(2, RANK)
    assert np.array_equal(data[:, :256], codes[:, ::2] | codes[:, 1::2] << 4)
    assert np.array_equal(data[:, 256:320], nearest(E4M3, np.clip(rotated, -448, 448)))
    for s in range(32):
        assert np.array_equal(data[:, 320 + 8 * (s & 3) + (s >> 2)], scale_codes[:, s])
    latent_back, rotated_back = read_back("nvfp4_ds_mla", data, RANK, ROPE, 7.0)
    values = value_of(E2M1, codes).reshape(2, 32, 16) * scales[..., None].astype(np.float64)
    np.testing.assert_allclose(latent_back, values.reshape(2, RANK), rtol=1e-7)
    np.testing.assert_allclose(rotated_back, value_of(E4M3, data[:, 256:320]))


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head"])
def test_latent_and_rotated_part_have_a_scale_each(name: str) -> None:
    rng = np.random.default_rng(3)
    latent = rng.standard_normal((3, RANK)).astype(F32) * 100
    rotated = rng.standard_normal((3, ROPE)).astype(F32)
    data = encoded(name, latent, rotated)
    largest = F32(127 if name.startswith("int8") else 448)
    for x, first in ((latent, 0), (rotated, RANK + 4)):
        scale = np.abs(x).max(-1) / largest
        behind = slice(first + x.shape[1], first + x.shape[1] + 4)
        assert np.array_equal(data[:, behind], scale.astype("<f4")[:, None].view(np.uint8))
        quotients = x / scale[:, None]
        codes = np.rint(quotients).astype(np.int8).view(np.uint8)
        if name.startswith("fp8"):
            codes = nearest(E4M3, quotients)
        assert np.array_equal(data[:, first : behind.start], codes)


def test_a_tile_has_its_own_scale() -> None:
    """One large number costs precision in its own 128 alone."""
    latent = np.full((1, RANK), 0.1, dtype=np.float32)
    latent[0, 130] = 1000.0
    back, _ = read_back(
        "fp8_ds_mla", encoded("fp8_ds_mla", latent, np.zeros((1, ROPE), F32)), RANK, ROPE
    )
    off = np.abs(back - latent)[0] / np.abs(latent[0])
    assert off[:128].max() < 1e-6
    assert off[256:].max() < 1e-6
    assert off[128:256].max() > 1e-2


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_plain_codes_have_one_scale_for_both_parts(name: str) -> None:
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((3, 40)).astype(np.float32) * 50
    rotated = rng.standard_normal((3, 6)).astype(np.float32)
    scale = F32(0.037)
    data = encoded(name, latent, rotated, float(scale))
    table = LAYER_TABLES[name]
    wanted = nearest(table, np.concatenate([latent, rotated], -1) / scale)
    assert np.array_equal(data, wanted)


def test_bytes_per_token() -> None:
    bytes_of = {
        name: latent_format(name).layout(RANK, ROPE).num_bytes
        for name in LATENT_FORMATS
        if name != "auto"
    }
    assert bytes_of == {
        "float32": 2304,
        "bfloat16": 1152,
        "float16": 1152,
        "fp8": 576,
        "fp8_e4m3": 576,
        "fp8_e5m2": 576,
        "fp8_ds_mla": 656,
        "int8_per_token_head": 584,
        "fp8_per_token_head": 584,
        "nvfp4_ds_mla": 352,
    }


def test_writing_touches_its_slots_alone() -> None:
    stored = latent_format("fp8_ds_mla")
    cache = torch.full((4, 1, 3, 656), 0xAB, dtype=torch.uint8)
    latent, rotated = torch.randn(4, 1, RANK), torch.randn(4, 1, ROPE)
    slots = torch.tensor([7, -1, 3])  # Fewer than rows: the last row is padding.
    stored.write(latent, rotated, cache, slots, ONE, ONE)
    rows = cache.view(-1, 656)
    written = stored.encode(latent, rotated, ONE, ONE)[:, 0]
    assert torch.equal(rows[7], written[0])
    assert torch.equal(rows[3], written[2])
    others = [i for i in range(12) if i not in (3, 7)]
    assert bool((rows[others] == 0xAB).all())


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert latent_format("fp8_ds_mla").refusal(512, 64) is None
    assert "128 divides, not 500" in str(latent_format("fp8_ds_mla").refusal(500, 64))
    assert "2 divides, not 63" in str(latent_format("fp8_ds_mla").refusal(512, 63))
    with pytest.raises(ConfigurationError, match="128 divides"):
        latent_format("fp8_ds_mla").layout(500, 64)


def test_names_are_of_one_kind() -> None:
    with pytest.raises(ConfigurationError, match="'nvfp4' is no format for latents"):
        latent_format("nvfp4")
    with pytest.raises(ConfigurationError, match="'fp8_ds_mla' is no format for keys and values"):
        cache_format("fp8_ds_mla")
