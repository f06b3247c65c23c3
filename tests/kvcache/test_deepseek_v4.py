"""Rows and pages of DeepSeek-V4 and V4.1: every byte as documented."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from stored_numbers import E4M3, F32, nearest, value_of

from attnkit.errors import CacheError, ConfigurationError
from attnkit.kvcache.deepseek_v4 import V4_ROWS, V41Codec, v4_page_bytes, v4_parts

SIZES = (448, 64)
ONE = torch.ones(())
numbers = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.sampled_from([0.0, -0.0, 2.0**-149, 448.0, 449.0, 3e38]),
)


def v4_bytes(latent: Any, rotated: Any) -> Any:
    parts = (torch.from_numpy(np.asarray(x, F32))[:, None] for x in (latent, rotated))
    return V4_ROWS.encode(*parts, ONE, ONE)[:, 0]


def tiles_of(x: Any, size: int) -> tuple[Any, Any, Any]:
    """Codes, bytes of scales, and numbers, by search among the powers of two."""
    tiles = x.reshape(len(x), -1, size)
    powers = 2.0 ** np.arange(-126, 128)
    least = np.minimum(np.abs(tiles).max(-1), F32(2.0**127)) / F32(448)
    which = np.searchsorted(powers, least)
    scales = powers[which]
    codes = nearest(E4M3, np.clip(tiles / scales[..., None], -448, 448))
    back = value_of(E4M3, codes) * scales[..., None]
    return codes.reshape(x.shape), (which + 1).astype(np.uint8), back.reshape(x.shape)


@settings(max_examples=25, deadline=None)
@given(
    latent=arrays(np.float32, (2, 448), elements=numbers),
    rotated=arrays(np.float32, (2, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
)
def test_rows_are_584_and_528_bytes_as_documented(latent: Any, rotated: Any) -> None:
    """448 codes, 64 bfloat16, 7 powers, a zero; or 512 codes and 16 powers."""
    data = v4_bytes(latent, rotated)
    assert data.shape == (2, 584)
    codes, powers, back = tiles_of(latent, 64)
    row = data.numpy()
    assert np.array_equal(row[:, :448], codes)
    rounded = torch.from_numpy(rotated).bfloat16()
    assert torch.equal(data[:, 448:576], rounded.view(torch.uint8))
    assert np.array_equal(row[:, 576:583], powers)
    assert not row[:, 583].any()
    read = V4_ROWS.decode(data[:, None], *SIZES, ONE, ONE)
    assert np.array_equal(read[0][:, 0].numpy(), back.astype(F32))
    assert torch.equal(read[1][:, 0], rounded.float())

    whole = np.concatenate([latent, rotated], -1)
    data = V41Codec().encode(torch.from_numpy(whole), ONE)
    assert data.shape == (2, 528)
    codes, powers, back = tiles_of(whole, 32)
    assert np.array_equal(data[:, :512].numpy(), codes)
    assert np.array_equal(data[:, 512:].numpy(), powers)
    assert np.array_equal(V41Codec().decode(data, 512, ONE).numpy(), back.astype(F32))


def test_a_nan_stays_in_its_tile() -> None:
    latent = np.ones((1, 448), F32)
    latent[0, 70] = np.nan
    data = v4_bytes(latent, np.zeros((1, 64)))
    assert data[0, 576:].tolist() == [119, 255, 119, 119, 119, 119, 119, 0]  # 2 ** -8 * 256 is 1
    back = V4_ROWS.decode(data[:, None], *SIZES, ONE, ONE)[0][0, 0]
    assert torch.equal(back.isnan().nonzero()[:, 0], torch.arange(64, 128))


def test_a_page_has_its_scales_behind_all_codes() -> None:
    assert [v4_page_bytes(n) for n in (1, 64, 72)] == [1152, 65 * 576, 73 * 576]
    pages = torch.full((3, v4_page_bytes(4)), 0xAB, dtype=torch.uint8)
    data = v4_bytes(torch.randn(2, 448).numpy(), torch.randn(2, 64).numpy())
    codes, scales = v4_parts(pages, 4)
    slots = torch.tensor([6, 1])
    codes[slots // 4, slots % 4], scales[slots // 4, slots % 4] = data.split([576, 8], dim=-1)
    flat = pages.flatten()
    page = pages.shape[1]
    for row, first, behind in (
        (0, page + 2 * 576, page + 4 * 576 + 2 * 8),
        (1, 576, 4 * 576 + 8),
    ):
        assert torch.equal(flat[first : first + 576], data[row, :576])
        assert torch.equal(flat[behind : behind + 8], data[row, 576:])
    assert int((pages == 0xAB).sum()) >= pages.numel() - 2 * 584
    with pytest.raises(CacheError, match=r"give uint8 \(num_blocks, 2880\) for 4 tokens"):
        v4_parts(pages[:, :-1], 4)
    with pytest.raises(ConfigurationError, match="block_size"):
        v4_page_bytes(0)
