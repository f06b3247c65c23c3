"""Quantised caches on both paths, number by number: what every code reads as, what every number is
written as. The formats' own bytes are judged in tests/kvcache; here the kernels equal them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from attnkit.backends.cpu.backend import CpuImpl
from attnkit.batch import make_batch
from attnkit.conformance.case import Case
from attnkit.conformance.checks import bits, run_and_judge
from attnkit.conformance.subject import Subject
from attnkit.errors import BatchError, ConfigurationError, UnsupportedConfiguration
from attnkit.kvcache.formats import CACHE_FORMATS, cache_format
from attnkit.kvcache.pool import PagedKVCache
from attnkit.layer import Attention
from hard_numbers import hard_numbers

CODED = [name for name, stored in CACHE_FORMATS.items() if stored.codec is not None]
HEADS = 3


def layer_of(subject: Subject, name: str, *sizes: int, **fields: object) -> Attention:
    """A layer of `HEADS` KV heads whose scales differ per head where the format reads them."""
    head_size, head_size_v = sizes
    per_head = cache_format(name).reads_layer_scales
    layer = Attention(
        HEADS,
        head_size,
        1.0,
        head_size_v=head_size_v,
        kv_cache_dtype=name,
        backend=subject.backend,
        use_per_head_quant_scales=per_head,
        block_size=4,
        **fields,  # type: ignore[arg-type]
    )
    if per_head:
        layer._k_scale.copy_(torch.tensor([0.3, 1.0, 0.007]))
        layer._v_scale.copy_(torch.tensor([1.0, 0.25, 3.0]))
    return layer


def cache_of(layer: Attention, num_blocks: int = 8) -> torch.Tensor:
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    return PagedKVCache({"a": spec}, num_blocks)["a"]


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("sizes", [(256, 256), (80, 16)])
def test_every_code_reads_as_its_number(
    subject: Subject, name: str, sizes: tuple[int, int]
) -> None:
    """Pages of random bytes, most of them without NaN and infinity. One key: the output is its value,
    and the LSE of a query that is one in one channel is that channel of the key."""
    layer = layer_of(subject, name, *sizes, return_lse=True)
    cache = cache_of(layer, 40)
    raw = cache.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(7)))
    raw[12] = torch.arange(raw[12].numel()).to(torch.uint8).view_as(raw[12])
    raw[12:] -= 4 * ((raw[12:] & 0x7F) >= (0x7C if name == "fp8_e5m2" else 0x7F)).to(torch.uint8)
    if name.endswith("per_token_head"):  # The scales beside the codes: ordinary ones, and a NaN.
        layout = cache_format(name).layout(*sizes)
        raw[12:, ..., [layout.v_codes - 1, layout.num_bytes - 1]] = 0x3E
        raw[1, ..., [layout.v_codes - 2, layout.v_codes - 1]] = 0x7F
    num_reqs, channels = 36, sizes[0]
    query = torch.zeros(num_reqs, HEADS, channels)
    picked = torch.arange(num_reqs) * 7 % channels
    query[torch.arange(num_reqs), :, picked] = 1.0
    batch = make_batch([1] * num_reqs, [1] * num_reqs, [[r + 1] for r in range(num_reqs)], 4)
    plan = layer.build(batch)
    out = torch.empty(num_reqs, HEADS, sizes[1])
    out, lse = layer.impl.forward(layer, query, query, query, cache, plan, out)
    k, v = cache_format(name).decode(
        cache[1 : num_reqs + 1, :, 0], *sizes, layer._k_scale, layer._v_scale
    )
    score = k[torch.arange(num_reqs), :, picked]
    seen = torch.isfinite(score) & ~k.isnan().any(-1) & ~k.isinf().any(-1)
    assert bool(seen[11:].all())
    assert not bool(seen.all())
    torch.testing.assert_close(lse[seen], score[seen], rtol=2e-6, atol=1e-37)
    assert bool(lse[k.isnan().any(-1)].isnan().all())
    torch.testing.assert_close(out[seen], v[seen], rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((272, 48), torch.float32), ((16, 160), torch.bfloat16), ((32, 32), torch.float16)],
)
def test_every_number_is_written_as_its_code(
    native_subject: Subject, name: str, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    layer = layer_of(native_subject, name, *sizes, dtype=dtype)
    key, value = (hard_numbers((64, HEADS, n), dtype, n) for n in sizes)
    slots = torch.randperm(31 * 4, generator=torch.Generator().manual_seed(1))[:64] + 4
    slots[::9] = -1
    got, want = cache_of(layer, 32), cache_of(layer, 32)
    layer.impl.do_kv_cache_update(layer, key, value, got, slots)
    cache_format(name).write(key, value, want, slots, layer._k_scale, layer._v_scale)
    assert torch.equal(bits(got), bits(want))
    assert bool(bits(got).any())


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_per_token_head"])
def test_head_sizes_that_fill_no_vector(subject: Subject, name: str) -> None:
    """Decodes and a prompt; the padding of a row must be nothing, not the next bytes of the page."""
    for sizes in ((12, 20), (4, 100)):
        case = Case(
            name=f"{name}-{sizes}",
            query_lens=(1, 40),
            seq_lens=(70, 40),
            head_size=sizes[0],
            head_size_v=sizes[1],
            dtype=torch.bfloat16,
            kv_cache_dtype=name,
            return_lse=True,
        )
        layer = subject.layer(case)
        run_and_judge(subject, layer, subject.inputs(layer, case))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_of_codes_match_float64(
    subject: Subject, name: str, dtype: torch.dtype
) -> None:
    """Splits, merges and more rows than a unit has; threads share the work."""
    case = Case(
        name="long-codes",
        query_lens=(1, 5, 1, 40),
        seq_lens=(513, 512, 1030, 1060),
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        head_size_v=64,
        dtype=dtype,
        kv_cache_dtype=name,
        per_head_scales=cache_format(name).reads_layer_scales,
        sliding_window=700,
        sinks=True,
        return_lse=True,
    )
    layer = subject.layer(case)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run_and_judge(subject, layer, subject.inputs(layer, case))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", [(64, 64), (128, 192), (512, 64)])
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 40}, {"logits_soft_cap": 3.0}])
def test_few_rows_over_integers_match_float64(
    native_subject: Subject, sizes: tuple[int, int], fields: dict[str, object]
) -> None:
    """In bfloat16, and of whole vectors of bytes: what products of bytes serve where there are any."""
    case = Case(
        name="integers",
        query_lens=(1, 2, 3, 5),
        seq_lens=(1500, 70, 3, 100),
        num_heads=6,
        num_kv_heads=2,
        head_size=sizes[0],
        head_size_v=sizes[1],
        dtype=torch.bfloat16,
        kv_cache_dtype="int8_per_token_head",
        return_lse=True,
    )
    case = replace(case, **fields)  # type: ignore[arg-type]
    layer = native_subject.layer(case)
    run_and_judge(native_subject, layer, native_subject.inputs(layer, case))


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30, torch.inf, torch.nan])
def test_a_query_of_any_size_meets_integers(native_subject: Subject, factor: float) -> None:
    """Its integers are relative to its largest magnitude; the other queries do not see it."""
    case = Case(
        name="integers",
        query_lens=(1, 1),
        seq_lens=(50, 50),
        head_size=64,
        dtype=torch.bfloat16,
        kv_cache_dtype="int8_per_token_head",
        return_lse=True,
    )
    layer = native_subject.layer(case)
    inputs = native_subject.inputs(layer, case)
    run_and_judge(native_subject, layer, inputs)
    plan = layer.build(inputs.batch)
    arguments = inputs.key, inputs.value, inputs.kv_cache, plan
    before, _ = layer(inputs.query, *arguments)
    query = inputs.query.clone()
    query[0] *= factor
    after, lse = layer(query, *arguments)
    assert torch.equal(before[1], after[1])
    assert bool(after[0].isfinite().all()) == (abs(factor) < torch.inf)
    if factor < 1e-3:  # all scores are 0
        torch.testing.assert_close(lse[0], torch.full_like(lse[0], 50.0).log())


def test_a_large_write_of_codes_is_the_same_on_every_thread(native_subject: Subject) -> None:
    layer = layer_of(native_subject, "fp8_per_token_head", 32, 32)
    key, value = (torch.randn(1000, HEADS, 32) for _ in "kv")
    slots = torch.randperm(1200)[:1000] + 4
    caches = [cache_of(layer, 301) for _ in range(2)]
    before = torch.get_num_threads()
    try:
        for threads, cache in zip((1, 2), caches, strict=True):
            torch.set_num_threads(threads)
            layer.impl.do_kv_cache_update(layer, key, value, cache, slots)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(caches[0]), bits(caches[1]))


def test_scales_of_any_float_dtype_and_shape_of_one_are_read(subject: Subject) -> None:
    """A checkpoint's own tensor may be assigned before anything is processed."""
    case = Case(name="scales", query_lens=(2,), seq_lens=(9,), kv_cache_dtype="fp8")
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    right = subject.run(layer, inputs).out
    k, v = layer._k_scale.item(), layer._v_scale.item()
    for shape, dtype in itertools.product(((), (1,)), (torch.float32, torch.float64)):
        layer._k_scale = torch.full(shape, k, dtype=dtype)
        layer._v_scale = torch.full(shape, v, dtype=dtype)
        assert torch.equal(subject.run(layer, inputs).out, right)


def test_a_scale_of_another_shape_is_named(subject: Subject) -> None:
    case = Case(name="shape", query_lens=(2,), seq_lens=(2,), kv_cache_dtype="fp8")
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    before = bits(inputs.kv_cache)
    layer._v_scale = torch.ones(3)
    with pytest.raises(ConfigurationError, match="v_scale has shape"):
        subject.run(layer, inputs)
    assert torch.equal(bits(inputs.kv_cache), before)


def test_rows_of_codes_must_be_dense_and_keys_of_a_dtype_that_is_read(subject: Subject) -> None:
    case = Case(name="dense", query_lens=(2,), seq_lens=(2,), kv_cache_dtype="int8_per_token_head")
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    cache = torch.zeros(*inputs.kv_cache.shape[:3], 144, dtype=torch.int8)[..., ::2]
    plan = layer.build(inputs.batch)
    slots = inputs.batch.slot_mapping
    with pytest.raises(BatchError, match="stride 2 in its last dimension"):
        layer.impl.do_kv_cache_update(layer, inputs.key, inputs.value, cache, slots)
    with pytest.raises(BatchError, match="last dimension has stride 2"):
        subject.run(layer, replace(inputs, kv_cache=cache), plan=plan)
    with pytest.raises(BatchError, match=r"key is torch\.float64"):
        layer.impl.do_kv_cache_update(
            layer, inputs.key.double(), inputs.value.double(), inputs.kv_cache, slots
        )
    assert not bool(cache.any())


def test_sizes_that_a_format_cannot_hold_are_refused_by_the_impl() -> None:
    with pytest.raises(ConfigurationError, match="nvfp4 needs head sizes that 16 divides, not 24"):
        cache_format("nvfp4").layout(32, 24)
    with pytest.raises(
        UnsupportedConfiguration, match=r"cpu: KV cache dtype nvfp4 needs .* 16 divides, not 24"
    ):
        CpuImpl(4, 32, 1.0, kv_cache_dtype="nvfp4", head_size_v=24)
