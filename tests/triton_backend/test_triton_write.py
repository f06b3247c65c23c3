"""The write kernel: slots get their tokens bit for bit, and nothing else in memory changes."""

from __future__ import annotations

import pytest
import torch
from triton_problem import DEVICE

from attnkit.backends.stored import Stored
from attnkit.backends.triton.cache_launch import launch_write
from attnkit.kvcache.write import write_kv


def plain(cache: torch.Tensor, head_size: int) -> Stored:
    return Stored(key=cache[..., :head_size], value=cache[..., head_size:])


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("page", "head_size", "head_size_v", "dtype", "cache_dtype"),
    [
        (16, 64, 64, torch.bfloat16, torch.bfloat16),
        (5, 40, 24, torch.float32, torch.bfloat16),
        (1, 8, 8, torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize("heads_first", [False, True])
def test_writes_what_the_definition_writes(
    page: int,
    head_size: int,
    head_size_v: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads_first: bool,
    slot_dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, heads, num_blocks = 21, 3, 64
    # Wider than a head: the row's neighbours must survive. Slices of a fused projection as input.
    shape = (num_blocks, heads, page) if heads_first else (num_blocks, page, heads)
    memory = torch.randn(*shape, head_size + head_size_v + 8, generator=generator).to(cache_dtype)
    wide = memory.to(DEVICE) if heads_first else memory.to(DEVICE).transpose(1, 2)
    cache = wide[..., : head_size + head_size_v]
    expected = wide.clone()
    qkv = torch.randn(num_tokens + 2, 9, max(head_size, head_size_v), generator=generator)
    qkv = qkv.to(dtype).to(DEVICE)
    key, value = qkv[:, 3:6, :head_size], qkv[:, 6:, :head_size_v]
    slots = 1 + torch.randperm(num_blocks * page - 1, generator=generator)[:num_tokens]
    slots[[0, 7, 20]] = -1
    slots = slots.to(slot_dtype).to(DEVICE)
    write_kv(key, value, expected[..., : head_size + head_size_v], slots)
    launch_write(key, value, plain(cache, head_size), slots)
    assert torch.equal(wide, expected)


def test_no_token_is_no_launch() -> None:
    cache = torch.zeros(2, 1, 4, 16, device=DEVICE)
    empty = torch.zeros(0, 1, 8, device=DEVICE)
    launch_write(empty, empty, plain(cache, 8), torch.zeros(0, dtype=torch.int64).to(DEVICE))
    assert not cache.any()
