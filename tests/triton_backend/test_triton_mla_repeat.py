"""Repeated launches over latents, of prefills over them and of an indexer are what whole ones would be,
argument for argument; and compute the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from launches import Started, Step, check_repeats, note_whole, rows_of, stand_in
from triton_problem import DEVICE

from attnkit import MLAAttention, PagedKVCache, make_batch
from attnkit.backends.triton import cache_launch, index_launch, launch, mla_launch
from attnkit.backends.triton.indexer import TritonIndexKernels
from attnkit.backends.triton.mla import TritonMLAImpl, TritonMLAMetadata, TritonMLASparseImpl
from attnkit.backends.triton.mla_prefill import TritonMLAPrefill
from attnkit.backends.triton.plan import Workspace
from attnkit.contract import CommonAttentionMetadata, MLADimensions, kFp8StaticTensorSym
from attnkit.indexer import LightningIndexer
from attnkit.kvcache.formats import latent_format
from attnkit.mla.plan import DecodePart
from attnkit.output_quant import QuantizedOutput

KERNELS = {
    mla_launch: ("mla_decode_kernel", "merge_kernel", "tiled_write_kernel", "choose_rows_kernel"),
    cache_launch: ("write_kernel", "encode_kernel"),
    index_launch: (
        "index_write_kernel",
        "index_score_kernel",
        "index_count_kernel",
        "index_sift_kernel",
        "index_list_kernel",
    ),
    launch: ("attention_kernel",),
}
SPACE = ("scores_ptr", "best_ptr", "counts_ptr", "sifted_ptr", "plans_ptr")
"""Memory of one choice."""
ROWS = st.sampled_from(["own", "packed", "unaligned", "wide", "heads first"])
DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
INTEGERS = st.sampled_from([torch.int32, torch.int64])


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    return stand_in(monkeypatch, KERNELS)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels whose launches are whole."""
    return note_whole(monkeypatch, KERNELS)


def latent_layer(
    draw: Callable[..., Any], impl_cls: type[TritonMLAImpl], formats: list[str]
) -> tuple[Callable[[], TritonMLAImpl], Callable[..., Step]]:
    """A layer over latents, and decodes of it."""
    stored = latent_format(draw(st.sampled_from(formats)))
    heads = draw(st.sampled_from([3, 16, 20, 128]))
    rank, rope = draw(st.sampled_from([(512, 64), (256, 32)]))
    lists = draw(st.sampled_from([1, 40, 2100]))
    told = SimpleNamespace(topk_indices_buffer=torch.zeros(300, lists, dtype=torch.int32))
    projection = torch.nn.Linear(rank, heads * 32, bias=False, device="meta")
    dtype, row = stored.dtype or torch.bfloat16, rank + rope
    if stored.codec is not None or stored.has_own_scales:
        row = stored.layout(rank, rope).num_bytes // dtype.itemsize
    pool = torch.empty(2, 4, 16, row, dtype=dtype)
    # Two layers' blocks after one another, smaller blocks, and rows of two layers side by side.
    beside = torch.empty(4, 16, 2 * row, dtype=dtype)[..., row:]
    caches = [pool[0], pool[1], pool.view(2, 8, 8, row)[0], beside]
    one, other, many = torch.ones(()), torch.ones(()), torch.ones(2)
    scales = [one, other, many[1], one.double()]
    workspace = Workspace(torch.device("cpu"))

    def make() -> TritonMLAImpl:
        sizes = {
            "q_lora_rank": None,
            "kv_lora_rank": rank,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": rope,
            "qk_head_dim": 16 + rope,
            "v_head_dim": 16,
        }
        return impl_cls(
            heads, rank + rope, 0.1, 1, None, None, stored.name, None, "decoder", None,
            **sizes, kv_b_proj=projection, indexer=told if impl_cls.is_sparse else None,
        )  # fmt: skip

    def step_of(**c: Any) -> Step:
        num_reqs, longest = c["num_reqs"], c["longest"]
        tokens = num_reqs * longest
        decode = DecodePart(
            query_start_loc=torch.zeros(num_reqs + 1, dtype=torch.int32),
            seq_lens=torch.zeros(num_reqs + 1, dtype=c["lens"])[1:],
            block_table=torch.zeros(num_reqs, c["table_stride"], dtype=torch.int32)[
                :, : c["width"]
            ],
            max_query_len=longest,
            max_seq_len=c["max_seq_len"],
        )
        plan = TritonMLAMetadata(
            num_actual_tokens=tokens,
            slot_mapping=torch.zeros(tokens, dtype=c["slots"]),
            block_size=None,
            views=(),
            num_decodes=num_reqs,
            num_decode_tokens=tokens,
            num_prefills=0,
            num_prefill_tokens=0,
            decode=decode,
            prefill=None,
            longest_to_mean=c["longest_to_mean"],
            is_captured=c["is_captured"],
            workspace=workspace,
        )
        query = rows_of(c["query"], tokens, heads, rank + rope, c["dtype"])
        latent = rows_of(c["latent"], tokens, 1, rank, c["dtype"])[:, 0]
        rotated = rows_of(c["rotated"], tokens, 1, rope, c["dtype"])
        cache, k_scale = caches[c["cache"]], scales[c["scale"]]
        caller: Any = SimpleNamespace(_k_scale=k_scale)

        def run(impl: TritonMLAImpl) -> None:
            impl.need_to_return_lse_for_decode = c["wants_lse"]
            slots, name = plan.slot_mapping, stored.name
            impl.do_kv_cache_update(latent, rotated, cache, slots, name, k_scale)
            impl.forward_mqa(query, cache, plan, caller)

        return run

    return make, step_of


LATENT_CHOICES = {
    "dtype": (torch.bfloat16, DTYPES),
    "query": ("own", ROWS),
    "latent": ("packed", ROWS),
    "rotated": ("packed", ROWS),
    "slots": (torch.int64, INTEGERS),
    "lens": (torch.int32, INTEGERS),
    "wants_lse": (False, st.booleans()),
    "is_captured": (False, st.booleans()),
    "cache": (0, st.integers(0, 3)),
    "scale": (0, st.integers(0, 3)),
}
LATENT_COUNTS = {
    "num_reqs": st.sampled_from([1, 2, 3, 16, 40]),
    "longest": st.sampled_from([1, 2, 5]),
    "width": st.sampled_from([1, 4, 16, 17]),
    "table_stride": st.sampled_from([17, 32]),
    "max_seq_len": st.sampled_from([1, 300, 3000, 40000]),
    "longest_to_mean": st.sampled_from([1.0, 5.0]),
}


@pytest.mark.parametrize("formats", [["auto", "float16"], ["fp8", "fp8_e5m2"], ["fp8_ds_mla"]])
def test_decodes_over_latents(log: list[Started], formats: list[str]) -> None:
    repeated = check_repeats(
        log,
        lambda draw: latent_layer(draw, TritonMLAImpl, formats),
        LATENT_CHOICES,
        LATENT_COUNTS,
        ("out_ptr", "lse_ptr"),
    )
    write = {"auto": "write_kernel", "fp8": "encode_kernel"}.get(formats[0], "tiled_write_kernel")
    assert repeated.keys() == {write, "mla_decode_kernel", "merge_kernel"}
    assert min(repeated.values()) >= 10, repeated


@pytest.mark.parametrize("formats", [["auto"], ["fp8"], ["fp8_ds_mla"]])
def test_decodes_over_chosen_latents(log: list[Started], formats: list[str]) -> None:
    of_lists = ("rows_ptr", "num_chosen_ptr", "table_ptr", "kv_lens_ptr", "query_start_loc_ptr")
    repeated = check_repeats(
        log,
        lambda draw: latent_layer(draw, TritonMLASparseImpl, formats),
        LATENT_CHOICES,
        LATENT_COUNTS,
        ("out_ptr", "lse_ptr", *of_lists),
    )
    assert {"mla_decode_kernel", "merge_kernel", "choose_rows_kernel"} <= repeated.keys()
    assert min(repeated.values()) >= 10, repeated


@pytest.mark.parametrize("pages", [False, True], ids=["own tokens", "pages"])
def test_prefills_over_latents(log: list[Started], pages: bool) -> None:
    def prepare(
        draw: Callable[..., Any],
    ) -> tuple[Callable[[], TritonMLAPrefill], Callable[..., Step]]:
        heads, (nope, rope, v) = draw(st.sampled_from([(3, (16, 8, 16)), (16, (128, 64, 128))]))
        d = MLADimensions(
            kv_lora_rank=64, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v
        )

        def step_of(**c: Any) -> Step:
            tokens, num_reqs, dtype = c["tokens"], c["num_reqs"], c["dtype"]
            query = rows_of(c["query"], tokens, heads, nope + rope, dtype)
            output = rows_of(c["output"], tokens, heads, v, dtype)
            lse = torch.empty(tokens, heads)
            starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
            rows = 8 * 64 if pages else tokens
            both = torch.empty(rows, heads, nope + rope + v, dtype=dtype)
            other = torch.empty_like(both) if c["keys_with_values"] == "apart" else both
            key, value = both[..., : nope + rope], other[..., nope + rope :]
            if not c["keys_with_values"]:
                key = rows_of(c["key"], rows, heads, nope + rope, dtype)
                value = rows_of(c["value"], rows, heads, v, dtype)
            given = (query, key, value)
            if not pages:
                plan: Any = SimpleNamespace(query_start_loc=starts)
                codes = QuantizedOutput.empty(
                    kFp8StaticTensorSym, tokens, heads * v, scale=torch.ones(1)
                )
                if c["codes"]:
                    return lambda one: one.run_prefill_to_codes(*given, plan, codes, lse)
                return lambda one: one.run_prefill_new_tokens(*given, plan, output, lse)
            chunk: Any = SimpleNamespace(
                query_start_loc=starts,
                kv_lens=torch.zeros(num_reqs, dtype=torch.int32),
                block_table=torch.zeros(num_reqs, c["width"], dtype=torch.int32),
            )
            blocks = (x.unflatten(0, (8, 64))[:, : c["block_size"]] for x in (key, value))
            given = (query, *blocks)
            return lambda one: one.run_prefill_context_chunk(*given, chunk, output, lse)

        return lambda: TritonMLAPrefill(heads, 0.1, d), step_of

    choices = {
        "dtype": (torch.bfloat16, DTYPES),
        "query": ("own", ROWS),
        "key": ("own", ROWS),
        "value": ("packed", ROWS),
        "output": ("own", ROWS),
        "keys_with_values": (True, st.sampled_from([False, True, "apart"])),
        "block_size": (64, st.sampled_from([64, 16])),
        "codes": (False, st.booleans()),
    }
    counts = {
        "tokens": st.sampled_from([1, 17, 300]),
        "num_reqs": st.sampled_from([1, 3, 16]),
        "width": st.sampled_from([1, 4, 16, 17]),
    }
    repeated = check_repeats(log, prepare, choices, counts, ())
    assert repeated.keys() == {"attention_kernel"}
    assert min(repeated.values()) >= 10, repeated


def test_the_choice_of_keys(log: list[Started]) -> None:
    def prepare(
        draw: Callable[..., Any],
    ) -> tuple[Callable[[], TritonIndexKernels], Callable[..., Step]]:
        heads, size, k = draw(st.sampled_from([(3, 16, 4), (64, 128, 2048)]))
        dtype, row = draw(st.sampled_from([(torch.uint8, size + 4), (torch.bfloat16, size)]))
        pool = torch.empty(2, 8, 16, row, dtype=dtype)
        caches = [pool[0], pool[1], pool.view(2, 16, 8, row)[0]]
        buffer = torch.empty(300, k + 1, dtype=torch.int32)

        def step_of(**c: Any) -> Step:
            tokens, num_reqs, cache = c["tokens"], c["num_reqs"], caches[c["cache"]]
            batch: Any = SimpleNamespace(
                query_start_loc=torch.zeros(num_reqs + 1, dtype=torch.int32),
                seq_lens=torch.zeros(num_reqs, dtype=c["lens"]),
                block_table_tensor=torch.zeros(num_reqs, c["width"], dtype=torch.int32),
                max_seq_len=c["max_seq_len"],
            )
            q = rows_of(c["q"], tokens, heads, size, c["dtype"])
            key = rows_of(c["k"], tokens, 1, size, c["dtype"])[:, 0]
            weights = rows_of(c["weights"], tokens, 1, heads, c["weights_dtype"])[:, 0]
            lists = (buffer[:, 1:] if c["lists"] else buffer[:, :-1])[:tokens]
            slots = torch.zeros(tokens, dtype=c["slots"])

            def run(kernels: TritonIndexKernels) -> None:
                kernels.write(key, cache, slots)
                kernels.choose(q, weights, cache, batch, lists)

            return run

        return TritonIndexKernels, step_of

    choices = {
        "dtype": (torch.bfloat16, DTYPES),
        "weights_dtype": (torch.float32, DTYPES),
        "q": ("own", ROWS),
        "k": ("packed", ROWS),
        "weights": ("own", ROWS),
        "lists": (False, st.booleans()),
        "slots": (torch.int64, INTEGERS),
        "lens": (torch.int32, INTEGERS),
        "cache": (0, st.integers(0, 2)),
    }
    counts = {
        "tokens": st.sampled_from([1, 16, 300]),
        "num_reqs": st.sampled_from([1, 3, 16]),
        "width": st.sampled_from([1, 4, 16, 17]),
        "max_seq_len": st.sampled_from([1, 300, 3000]),
    }
    repeated = check_repeats(log, prepare, choices, counts, SPACE)
    assert repeated.keys() == set(KERNELS[index_launch])
    assert min(repeated.values()) >= 10, repeated


HEADS, RANK, ROPE, V, K = 3, 128, 16, 16, 12
"""`fp8_ds_mla` has tiles of 128."""


def make_layer(kv_cache_dtype: str, *, sparse: bool) -> MLAAttention:
    torch.manual_seed(0)
    indexer = None
    if sparse:
        indexer = LightningIndexer(2, 16, K, device=DEVICE, backend="triton", block_size=8)
    layer = MLAAttention(
        HEADS,
        MLADimensions(kv_lora_rank=RANK, qk_nope_head_dim=8, qk_rope_head_dim=ROPE, v_head_dim=V),
        torch.nn.Linear(RANK, HEADS * (8 + V), bias=False, device=DEVICE, dtype=torch.bfloat16),
        0.2,
        backend="triton_mla_sparse" if sparse else "triton_mla",
        kv_cache_dtype=kv_cache_dtype,
        block_size=8,
        dtype=torch.bfloat16,
        device=DEVICE,
        return_lse=True,
        indexer=indexer,
    )
    layer.process_weights_after_loading(torch.bfloat16)
    return layer


def make_caches(layer: MLAAttention) -> dict[str, torch.Tensor]:
    specs = {"layer": layer.get_kv_cache_spec()}
    if layer.indexer is not None:
        specs["indexer"] = layer.indexer.get_kv_cache_spec()
    pool = PagedKVCache(specs, 128, device=DEVICE)
    return {name: pool[name] for name in specs}


def attend(
    layer: MLAAttention,
    caches: dict[str, torch.Tensor],
    batch: CommonAttentionMetadata,
    given: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    if layer.indexer is not None:
        q, k, w = given["small q"], given["small k"], given["weights"]
        layer.indexer.choose(q, k, w, caches["indexer"], batch)
    plan = layer.make_builder().build(0, batch)
    return layer(given["q"], given["latent"], given["rotated"], caches["layer"], plan)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("sparse", [False, True], ids=["all keys", "chosen keys"])
def test_repeated_launches_compute_what_first_ones_do(
    whole: list[str], kv_cache_dtype: str, sparse: bool
) -> None:
    layer = make_layer(kv_cache_dtype, sparse=sparse)
    caches, num_whole, num_fresh = make_caches(layer), 0, 0
    g = torch.Generator().manual_seed(1)
    steps = [([30, 12], 0), ([1, 1, 1], 42), ([1, 1], 200), ([2, 9, 1], 20), ([1, 1, 1, 1], 3)]
    for lens, before in steps:
        kv_lens = [n + before for n in lens]
        tables = [[1 + 30 * i + j for j in range(-(-n // 8))] for i, n in enumerate(kv_lens)]
        batch = make_batch(lens, kv_lens, tables, 8, device=DEVICE)
        num = sum(lens)
        sizes = {
            "q": (HEADS, 8 + ROPE),
            "latent": (RANK,),
            "rotated": (ROPE,),
            "small q": (2, 16),
            "small k": (16,),
            "weights": (2,),
        }
        given = {
            name: torch.randn(num, *size, generator=g).to(DEVICE, torch.bfloat16)
            for name, size in sizes.items()
        }
        fresh = make_layer(kv_cache_dtype, sparse=sparse)
        others = make_caches(fresh)
        for name, cache in caches.items():
            others[name].copy_(cache)
        whole.clear()
        want = attend(fresh, others, batch, given)
        num_fresh += len(whole)
        whole.clear()
        got = attend(layer, caches, batch, given)
        num_whole += len(whole)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        for name, cache in caches.items():
            assert torch.equal(cache.view(torch.uint8), others[name].view(torch.uint8)), name
    assert num_whole < num_fresh / 2, (num_whole, num_fresh)
