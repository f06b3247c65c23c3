"""Public bug reports, replayed: padding, windows, page sizes, huge offsets.

Each test is named by its report in the list of replays (BR-nnn) and by the law that was broken, and
runs on every backend that can run here. The oracle judges every run (`replay`); numbers in a test
are answers worked out by hand. A backend that refuses the feature by name has answered.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from replays import InputsOf, LayerOf, Replay, close, mean, rand

from attnkit.batch import make_batch
from attnkit.conformance.case import Case
from attnkit.conformance.checks import judge, run_and_judge
from attnkit.conformance.subject import Subject
from attnkit.contract import AttentionCGSupport, KVCacheLayout
from attnkit.errors import BatchError
from attnkit.kvcache.write import write_kv

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
both_dtypes = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)


# Padding, graph capture and replay.


def test_br009_a_padding_request_is_finite_and_changes_nobody(
    subject: Subject, inputs_of: InputsOf
) -> None:
    case = Case(name="br009", query_lens=(1, 1, 1), seq_lens=(5, 9, 2), return_lse=True)
    layer, inputs = inputs_of(case)
    plain = subject.run(layer, inputs)
    padded = replace(case, padding_tokens=1, padding_reqs=1)
    layer, inputs = inputs_of(padded)
    batch = inputs.batch
    # The padded batch counts its padding row as a decode, as a captured graph of size 4 does.
    start = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    graph = replace(
        inputs,
        query=torch.nan_to_num(inputs.query),
        batch=batch.replace(
            query_start_loc=start.to(subject.device), query_start_loc_cpu=start, num_actual_tokens=4
        ),
    )
    result = subject.run(layer, graph)
    judge(inputs.sequences, result)
    assert torch.isfinite(result.out).all()
    assert result.lse is not None
    assert plain.lse is not None
    assert (result.out[3] == 0).all()
    assert torch.isneginf(result.lse[3]).all()
    assert torch.equal(result.out[:3], plain.out[:3])
    assert torch.equal(result.lse[:3], plain.lse[:3])


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_br011_slot_minus_one_is_not_the_last_slot(index: torch.dtype) -> None:
    cache = torch.zeros(4, 1, 4, 16)
    key = torch.tensor([1.0, 2.0, 3.0])[:, None, None].expand(3, 1, 8)
    write_kv(key, key, cache, torch.tensor([5, -1, -1], dtype=index))
    assert (cache[1, :, 1] == 1).all()
    cache[1, :, 1] = 0
    assert (cache == 0).all()


def test_br011_slot_minus_one_is_skipped_by_backends(subject: Subject, inputs_of: InputsOf) -> None:
    case = Case(
        name="br011",
        query_lens=(1,),
        seq_lens=(2,),
        num_heads=1,
        num_kv_heads=1,
        head_size=8 if subject.backend.supports_head_size(8) else 32,
        block_size=4 if subject.backend.supports_block_size(4) else 16,
        padding_tokens=2,
    )
    layer, inputs = inputs_of(case)
    run_and_judge(subject, layer, inputs)  # The cache is watched byte by byte.


def test_br013_padding_does_not_reach_the_null_block(subject: Subject, inputs_of: InputsOf) -> None:
    case = Case(name="br013", query_lens=(1, 9), seq_lens=(20, 9), padding_tokens=5, padding_reqs=2)
    layer, inputs = inputs_of(case, poison=3.25)
    inputs.key[case.num_tokens :] = math.nan
    inputs.value[case.num_tokens :] = math.nan
    subject.run(layer, inputs)
    assert (inputs.kv_cache[0] == 3.25).all()


def test_br015_a_plan_said_to_replay_any_batch_does(subject: Subject, layer_of: LayerOf) -> None:
    case = Case(name="br015", query_lens=(1, 1, 1, 1), seq_lens=(9, 5, 7, 3))
    layer = layer_of(case)
    builder = layer.make_builder()
    level = builder.get_cudagraph_support(layer.vllm_config, builder.kv_cache_spec)
    if level is not AttentionCGSupport.ALWAYS:
        pytest.skip(f"says {level.name}, so another batch is planned anew, which is an answer")
    a, b = case, replace(case, query_lens=(3, 1, 0, 0), seq_lens=(11, 6, 0, 0))
    first = subject.inputs(layer, a)
    second = subject.inputs(layer, b)
    # A graph is captured for as many tokens as one request may have, not for this batch's lengths.
    bound = first.batch.replace(max_query_len=4, max_seq_len=32)
    plan = builder.build_for_cudagraph_capture(bound)
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        getattr(first.batch, name).copy_(getattr(second.batch, name))
    width = second.batch.block_table_tensor.shape[1]
    first.batch.block_table_tensor.zero_()[:, :width] = second.batch.block_table_tensor[
        :, : first.batch.block_table_tensor.shape[1]
    ]
    judge(second.sequences, subject.run(layer, second, plan=plan))


# Sliding window.


def test_br018_a_packed_window_is_each_requests_own(replay: Replay) -> None:
    case = Case(name="br018", query_lens=(16, 4), seq_lens=(16, 20), sliding_window=4)
    result = replay(case, mean(case))
    close(result.out[9], 7.5)
    for row, want in enumerate((14.5, 15.5, 16.5, 17.5)):
        close(result.out[16 + row], want)
    shifted = replay(case, mean(case, start=(0, 1000)))
    assert torch.equal(shifted.out[:16], result.out[:16])
    close(shifted.out[16:] - result.out[16:], 1000, 1e-4)


@pytest.mark.parametrize("query_len", [1, 40])
def test_br020_blocks_left_of_the_window_are_not_read(
    subject: Subject, inputs_of: InputsOf, query_len: int
) -> None:
    case = Case(
        name="br020",
        query_lens=(query_len,),
        seq_lens=(1000,),
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        sliding_window=128,
        freed_window=True,
    )
    tokens = rand(case, 3)
    results = []
    for poison in (math.nan, 0.0):
        layer, inputs = inputs_of(case, tokens, poison=poison)
        freed = (1000 - query_len - 127) // 16
        assert (inputs.batch.block_table_tensor[0, :freed] == 0).all()
        results.append(run_and_judge(subject, layer, inputs)[0])
    assert torch.isfinite(results[0].out).all()
    assert torch.equal(results[0].out, results[1].out)


def test_br022_interleaved_requests_keep_their_windows(
    subject: Subject, inputs_of: InputsOf
) -> None:
    block_size = 4 if subject.backend.supports_block_size(4) else 16
    case = Case(
        name="br022",
        query_lens=(1,) * 4,
        seq_lens=(60, 61, 62, 63),
        block_size=block_size,
        sliding_window=20,
    )
    layer, inputs = inputs_of(case, mean(case))
    # Request r owns physical blocks r + 1, r + 5, r + 9, ...
    num_pages = -(-63 // block_size)
    wide = torch.zeros(1 + 4 * num_pages, *inputs.kv_cache.shape[1:], device=subject.device)
    table = torch.zeros_like(inputs.batch.block_table_tensor)
    slots = []
    for r, length in enumerate(case.seq_lens):
        for page in range(-(-length // block_size)):
            table[r, page] = 1 + r + 4 * page
            wide[1 + r + 4 * page] = inputs.kv_cache[int(inputs.batch.block_table_tensor[r, page])]
        last = length - 1
        slots.append(int(table[r, last // block_size]) * block_size + last % block_size)
    batch = inputs.batch.replace(
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=subject.device),
    )
    result = subject.run(layer, replace(inputs, kv_cache=wide, batch=batch))
    for row, want in enumerate((49.5, 50.5, 51.5, 52.5)):
        close(result.out[row], want)


# Pages.


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 18, 31, 32, 33, 34, 48, 49, 63, 64, 65, 70])
def test_br048_pages_of_32(replay: Replay, kv_len: int) -> None:
    case = Case(
        name="br048",
        query_lens=(1,),
        seq_lens=(kv_len,),
        num_heads=8,
        num_kv_heads=2,
        head_size=128,
        block_size=32,
    )
    tokens = rand(case, 14)
    pages_of_32 = replay(case, tokens)
    pages_of_16 = replay(replace(case, block_size=16), tokens)
    assert torch.allclose(pages_of_32.out, pages_of_16.out, atol=1e-5)


@pytest.mark.parametrize("seq_lens", [(48, 49), (16, 33)])
def test_br050_a_length_past_its_block_table_is_named(seq_lens: tuple[int, int]) -> None:
    tables = [list(range(2, 2 + -(-seq_lens[0] // 16))), list(range(9, 9 + seq_lens[1] // 16))]
    with pytest.raises(BatchError, match=rf"request 1 .*{seq_lens[1]}.*{len(tables[1])}"):
        make_batch([1, 1], seq_lens, tables, 16)


def with_memory(subject: Subject, num_bytes: float) -> torch.device:
    """Its device; skips where a GPU has less memory free. Of a CPU only touched pages are taken."""
    if subject.device.type == "cuda" and torch.cuda.mem_get_info(subject.device)[0] < num_bytes:
        pytest.skip(f"needs {num_bytes / 1e9} GB of GPU memory")
    return subject.device


@pytest.mark.parametrize(
    ("name", "elements"), [("auto", 2**31), ("fp8", 2**31), ("fp8", 2**32)], ids=str
)
def test_br051_offsets_past_what_32_bits_hold(
    subject: Subject, layer_of: LayerOf, name: str, elements: int
) -> None:
    """Of a cache in the layer's dtype and of one of codes. Untouched pages cost no memory."""
    device = with_memory(subject, 4.3e9)
    case = Case(
        name="br051",
        query_lens=(1,),
        seq_lens=(40,),
        num_heads=8,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype=name,
        layout=KVCacheLayout.LBHNC,
    )
    layer = layer_of(case)
    layer._k_scale.fill_(1.0)
    layer._v_scale.fill_(1.0)
    layer.process_weights_after_loading(layer.dtype)
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    first = elements // 32_768
    cache = torch.empty(first + 64, 8, 16, 256, dtype=spec.dtype, device=device)
    assert cache[first].storage_offset() == elements
    table = [first - 1, first, first + 63]
    wide = torch.float8_e4m3fn if name == "fp8" else cache.dtype
    for block in (0, *table):
        cache[block].view(wide).copy_(torch.full((8, 16, 256), math.nan))
    for position in range(39):
        cache[table[position // 16]].view(wide)[:, position % 16].copy_(torch.full((8, 256), 0.75))
    batch = make_batch([1], [40], [table], 16, device=device)
    q = torch.zeros(1, 8, 128, dtype=torch.bfloat16, device=device)
    kv = torch.full((1, 8, 128), 0.75, dtype=torch.bfloat16, device=device)
    out = layer(q, kv, kv, cache, layer.build(batch))
    assert isinstance(out, torch.Tensor)
    close(out, 0.75)
    assert (cache[table[2]].view(wide)[:, 7].float() == 0.75).all()
    assert cache[0].view(wide).float().isnan().all()


def test_br053_a_huge_block_stride(subject: Subject, layer_of: LayerOf) -> None:
    """A layer's view into memory shared by all layers: other layers' bytes stay."""
    device = with_memory(subject, 4.6e9)
    head_size, stride = 64, 1_039_680
    case = Case(
        name="br053",
        query_lens=(1,),
        seq_lens=(40,),
        num_heads=2,
        num_kv_heads=1,
        head_size=head_size,
        dtype=torch.bfloat16,
    )
    layer = layer_of(case)
    storage = torch.empty(2200 * stride, dtype=torch.bfloat16, device=device)
    page = 16 * 2 * head_size
    cache = storage.as_strided((2200, 1, 16, 2 * head_size), (stride, page, 2 * head_size, 1))
    table = [2065, 2066, 2199]
    for block in (0, *table):
        cache[block] = math.nan
        storage[block * stride + page : block * stride + 2 * page] = 5.0
    for position in range(39):
        cache[table[position // 16], :, position % 16] = 0.75
    q = torch.zeros(1, 2, head_size, dtype=torch.bfloat16, device=device)
    kv = torch.full((1, 1, head_size), 0.75, dtype=torch.bfloat16, device=device)
    out = layer(q, kv, kv, cache, layer.build(make_batch([1], [40], [table], 16, device=device)))
    assert isinstance(out, torch.Tensor)
    close(out, 0.75)
    for block in (0, *table):
        assert (storage[block * stride + page : block * stride + 2 * page] == 5.0).all()
