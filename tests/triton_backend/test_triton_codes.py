"""Quantised caches in the kernels, number by number: what every code reads as, what every number is
written as, and where its bytes lie. The kit judges attention over them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton_problem import DEVICE, Problem, make_problem

from attnkit.backends import codes
from attnkit.backends.stored import Codes, Stored
from attnkit.backends.triton.cache_launch import launch_write
from attnkit.backends.triton.launch import launch_attention, launch_decode
from attnkit.conformance.checks import bits
from attnkit.contract import FullAttentionSpec, KVCacheLayout
from attnkit.errors import CacheError, ConfigurationError
from attnkit.kvcache.formats import CACHE_FORMATS, cache_format, customize_spec
from attnkit.kvcache.pool import PagedKVCache
from hard_numbers import hard_numbers

CODED = [name for name, stored in CACHE_FORMATS.items() if stored.codec is not None]
HEADS = 2
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
K_SCALE, V_SCALE = torch.tensor([0.3, 0.007]), torch.tensor([1.0, 3.0])


def cache_of(
    name: str, sizes: tuple[int, int], num_blocks: int, page: int, layout: KVCacheLayout
) -> torch.Tensor:
    stored = cache_format(name)
    spec = customize_spec(
        FullAttentionSpec(
            block_size=page,
            num_kv_heads=HEADS,
            head_size=sizes[0],
            head_size_v=sizes[1],
            dtype=stored.dtype or torch.float32,
            kv_quant_mode=stored.mode,
        )
    )
    return PagedKVCache({"a": spec}, num_blocks, device=DEVICE, layout=layout)["a"]


def stored_of(cache: torch.Tensor, name: str, sizes: tuple[int, int], **how: bool) -> Stored:
    k_scale, v_scale = K_SCALE.to(DEVICE), V_SCALE.to(DEVICE)
    return Stored.of(cache, cache_format(name), *sizes, k_scale, v_scale, **how)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize(
    ("sizes", "dtype", "layout"),
    [
        ((80, 16), torch.float32, KVCacheLayout.LBNHC),
        ((32, 48), torch.bfloat16, KVCacheLayout.LBHNC),
        ((16, 32), torch.float16, KVCacheLayout.LHBNC),
    ],
)
def test_every_number_is_written_as_its_code_and_nothing_else_is(
    name: str, sizes: tuple[int, int], dtype: torch.dtype, layout: KVCacheLayout
) -> None:
    page, num_tokens = 5, 48
    got, want = (cache_of(name, sizes, 16, page, layout) for _ in range(2))
    for cache in (got, want):
        cache.view(torch.uint8).fill_(0xA5)
    # Slices of a fused projection.
    rows = [hard_numbers((num_tokens, 3, n), dtype, n).to(DEVICE)[:, 1:] for n in sizes]
    slots = 1 + torch.randperm(16 * page - 1, generator=torch.Generator().manual_seed(1))
    slots = slots[:num_tokens].to(DEVICE)
    slots[[0, 7, 47]] = -1
    launch_write(*rows, stored_of(got, name, sizes), slots)
    scales = K_SCALE.to(DEVICE), V_SCALE.to(DEVICE)
    cache_format(name).write(*rows, want, slots, *scales)
    assert torch.equal(bits(got), bits(want))
    assert int((bits(got) != 0xA5).sum()) > 1000


@triton.jit
def numbers_kernel(codes_ptr, out_ptr, CODES: tl.constexpr, SIZE: tl.constexpr):
    """16 rows of SIZE bytes as numbers."""
    PER_BYTE: tl.constexpr = 2 if CODES > 1 else 1
    rows = tl.arange(0, 16)
    x = tl.load(codes_ptr + rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    x = codes.numbers(x, CODES, out_ptr.dtype.element_ty)
    columns = tl.arange(0, SIZE * PER_BYTE)
    places = out_ptr + rows[:, None] * SIZE * PER_BYTE + columns[None, :]
    tl.store(places, x.to(out_ptr.dtype.element_ty))


KINDS = ["e4m3", "float8_e4m3fn", "float8_e5m2", "int8", "int4"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


# Numbers of nvfp4 are float32 until the scales of their blocks are applied.
@pytest.mark.parametrize(
    ("kind", "dtype"), [*itertools.product(KINDS, DTYPES), ("nvfp4", torch.float32)]
)
def test_every_code_reads_as_its_number(kind: str, dtype: torch.dtype) -> None:
    data = torch.arange(256).to(torch.uint8)
    low, high = (data & 15).long(), (data >> 4).long()
    if kind == "int4":
        number, want = Codes.INT4, torch.stack([low - 8, high - 8], -1).flatten().float()
    elif kind == "nvfp4":
        e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        table = torch.cat([e2m1, -e2m1])
        number, want = Codes.NVFP4, torch.stack([table[low], table[high]], -1).flatten()
    else:
        number = Codes.E4M3 if kind == "e4m3" else Codes.NUMBERS
        element = torch.float8_e4m3fn if kind == "e4m3" else getattr(torch, kind)
        want = data.view(element).float()
        data = data if kind == "e4m3" else data.view(element)
    out = torch.zeros(want.shape, dtype=dtype, device=DEVICE)
    numbers_kernel[(1,)](data.to(DEVICE), out, CODES=int(number), SIZE=16)
    assert torch.equal(out.cpu().isnan(), want.isnan())
    assert torch.equal(out.cpu().nan_to_num(9.0), want.to(dtype).nan_to_num(9.0))
    if kind == "nvfp4":
        assert torch.equal(torch.signbit(out.cpu()), torch.signbit(want))


def over_codes(
    problem: Problem, name: str, sizes: tuple[int, int], *, has_e4m3: bool = True
) -> Problem:
    """The problem's pages in a format with codes; memory that no query sees stays NaN."""
    o = problem.operands
    key, value = o.stored.key, o.stored.value
    num_blocks, _, page, _ = key.shape
    cache = cache_of(name, sizes, num_blocks, page, KVCacheLayout.LBNHC)
    cache.view(torch.uint8).fill_(0xFF)
    there = ~key.isnan().any(-1).any(1)  # (B, N)
    slots = there.flatten().nonzero().flatten()
    k, v = (x.transpose(1, 2).flatten(0, 1)[slots] for x in (key, value))
    cache_format(name).write(k, v, cache, slots, K_SCALE.to(DEVICE), V_SCALE.to(DEVICE))
    stored = stored_of(cache, name, sizes, has_e4m3=has_e4m3)
    fresh = problem.fresh()
    return replace(fresh, operands=replace(fresh.operands, stored=stored))


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head"])
def test_without_a_type_for_them_e4m3_codes_give_the_same_bits(name: str) -> None:
    """Below sm_89 bytes are converted by hand, in both kernels."""
    plain = make_problem((20, 1), (70, 40), head_size=32, dtype=torch.bfloat16)
    outputs = []
    for has_e4m3 in (True, False):
        problem = over_codes(plain, name, (32, 32), has_e4m3=has_e4m3)
        o, variant = problem.operands, problem.variant
        assert o.stored.codes is (Codes.NUMBERS if has_e4m3 else Codes.E4M3)
        launch_attention(o, variant, min_query_len=2)
        launch_decode(o, variant, max_query_len=1)
        assert bool(torch.isfinite(o.output).all())
        outputs.append(torch.cat([o.output.flatten().float(), o.lse.flatten()]))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["int8_per_token_head", "nvfp4"])
def test_parts_of_codes_are_parts_of_the_cache(name: str) -> None:
    sizes = (32, 16)
    cache = cache_of(name, sizes, 4, 8, KVCacheLayout.BLNHC)
    stored = stored_of(cache, name, sizes)
    cache.view(torch.uint8).fill_(0)
    parts = [
        x for x in (stored.key, stored.value, stored.k_scales, stored.v_scales) if x is not None
    ]
    assert len(parts) == 4
    for i, part in enumerate(parts):
        part.view(torch.uint8 if part.dim() == 4 else torch.int32).fill_(i + 1)
    layout, data = cache_format(name).layout(*sizes), cache.view(torch.uint8)
    assert (data[..., : layout.k_scales] == 1).all()
    assert (data[..., layout.v_codes : layout.v_scales] == 2).all()
    assert (data[..., layout.k_scales] == 3).all()
    assert (data[..., layout.v_scales] == 4).all()
    assert stored.unit == (1 if name == "nvfp4" else 4)


def test_a_layers_scales_are_read_as_they_are() -> None:
    cache = cache_of("fp8", (16, 16), 2, 4, KVCacheLayout.LBHNC)
    one, two = torch.tensor(0.5), torch.tensor([0.5, 2.0])
    fp8 = cache_format("fp8")
    stored = Stored.of(cache, fp8, 16, 16, one, one)
    assert stored.k_scale is not None
    assert stored.k_scale.data_ptr() == one.data_ptr()
    assert not stored.is_scaled_per_head
    assert Stored.of(cache, fp8, 16, 16, two, two).is_scaled_per_head
    mixed = Stored.of(cache, fp8, 16, 16, one, two)
    assert mixed.k_scale is not None
    assert mixed.k_scale.tolist() == [0.5, 0.5]
    with pytest.raises(ConfigurationError, match="v_scale has shape"):
        Stored.of(cache, fp8, 16, 16, one, torch.ones(3))


def test_pages_whose_scales_are_not_aligned_are_refused() -> None:
    int8 = cache_format("int8_per_token_head")
    content = int8.layout(16, 16).num_bytes
    memory = torch.zeros(4 * 4 * content + 64, dtype=torch.int8)
    for offset, stride in ((1, 4 * content), (0, 4 * content + 2)):
        pages = memory.as_strided((4, 1, 4, content), (stride, content, content, 1), offset)
        with pytest.raises(CacheError, match="4 divides"):
            Stored.of(pages, int8, 16, 16, K_SCALE[:1], V_SCALE[:1])
