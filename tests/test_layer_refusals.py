"""Attention: what it refuses, before anything is planned or written, and by what words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnkit import Attention, MLAAttention, PagedKVCache, forward_context, make_batch
from attnkit.backends.reference import ReferenceBackend, ReferenceImpl
from attnkit.contract import (
    CommonAttentionMetadata,
    MLADimensions,
    ParallelConfig,
    VllmConfig,
)
from attnkit.errors import BatchError, ConfigurationError, UnsupportedConfiguration
from small_layers import (
    BLOCK,
    BOTH,
    HEADS,
    KV_HEADS,
    SIZE,
    Recording,
    ints,
    make_cache,
    make_layer,
    make_tokens,
)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ({"q": torch.zeros(5, HEADS, SIZE + 1)}, r"query .*\(5, 4, 9\); give \(num_tokens, 4, 8\)"),
        ({"q": torch.zeros(5, HEADS + 1, SIZE)}, r"query .*\(5, 5, 8\)"),
        ({"q": torch.zeros(1, 5, HEADS, SIZE)}, r"query .*\(1, 5, 4, 8\)"),
        ({"q": torch.zeros(5, HEADS * SIZE + 1)}, r"query .*\(5, 33\); .*or \(num_tokens, 32\)"),
        ({"q": torch.zeros(HEADS * SIZE)}, r"query .*\(32,\)"),
        ({"k": torch.zeros(5, HEADS, SIZE)}, r"key .*\(5, 4, 8\); give \(num_tokens, 2, 8\)"),
        ({"k": torch.zeros(5, 1, SIZE)}, r"key .*\(5, 1, 8\)"),
        ({"v": torch.zeros(5, KV_HEADS, SIZE - 1)}, r"value .*\(5, 2, 7\)"),
        ({"q": torch.zeros(5, HEADS, SIZE).half()}, "query .* is torch.float16 on cpu, .*float32"),
        ({"k": torch.zeros(5, KV_HEADS, SIZE).double()}, "key .* is torch.float64"),
        ({"v": torch.zeros(5, KV_HEADS, SIZE, device="meta")}, "value .* on meta, .* on cpu"),
        ({"q": torch.zeros(4, HEADS, SIZE)}, "4 query rows for a plan of 5 tokens"),
        ({"k": torch.zeros(4, KV_HEADS, SIZE)}, "4 keys and 5 values"),
        ({"k": None}, "got no key"),
        ({"v": None}, "got no value"),
        ({"k": None, "v": None}, "got no key"),
        ({"kv_cache": None}, r"plan but no cache; pass cache\['a'\]"),
        ({"kv_cache": make_cache(num_kv_heads=1)}, r"cache of shape \(9, 1, 4, 16\).*\(2, 4, 16\)"),
        ({"kv_cache": make_cache(block_size=8)}, r"cache of shape \(9, 2, 8, 16\)"),
        ({"kv_cache": make_cache(head_size_v=4)}, r"cache of shape \(9, 2, 4, 12\)"),
        (
            {"kv_cache": make_cache(dtype=torch.bfloat16)},
            "and torch.bfloat16; its blocks .*float32",
        ),
        ({"kv_cache": torch.empty(0)}, r"cache of shape \(0,\)"),
        ({"kv_cache": make_cache().to("meta")}, "cache on meta, and was built for cpu"),
        (
            {"kv_cache": make_cache().mT.contiguous().mT},
            "last dimension has stride 4; give one where it is 1",
        ),
        (
            {"kv_cache": make_cache()[:1].expand(9, -1, -1, -1)},
            r"strides \(0, 64, 16, 1\), whose blocks or tokens lie in each other's memory",
        ),
        (
            {"kv_cache": make_cache().as_strided((8, KV_HEADS, BLOCK, 2 * SIZE), (64, 64, 16, 1))},
            "in each other's memory",
        ),
        ({"k": torch.zeros(4, KV_HEADS, SIZE), "v": torch.zeros(4, KV_HEADS, SIZE)}, "4 keys for"),
    ],
)
@BOTH
def test_what_does_not_fit_is_refused_before_anything_is_written(
    backend: Any, tokens: dict[str, Any], named: str
) -> None:
    layer, kv_cache = make_layer(backend, layer_name="a"), make_cache()
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    q, k, v = make_tokens(5)
    step = {"q": q, "k": k, "v": v, "kv_cache": kv_cache, **tokens}
    with pytest.raises(BatchError, match=named):
        layer(step["q"], step["k"], step["v"], step["kv_cache"], plan)
    assert kv_cache.isnan().all()
    if tokens.get("kv_cache") is not None and not tokens["kv_cache"].is_meta:
        assert tokens["kv_cache"].isnan().all()


@BOTH
def test_keys_must_reach_as_far_as_the_slots(backend: Any) -> None:
    layer, kv_cache = make_layer(backend, layer_name="a"), make_cache()
    batch = make_batch([5], [5], [[3, 8]], BLOCK)
    padded = batch.replace(slot_mapping=torch.cat([batch.slot_mapping, torch.tensor([-1, -1])]))
    with pytest.raises(BatchError, match="5 keys for a plan that writes 7"):
        layer(*make_tokens(5), kv_cache, layer.build(padded))
    assert kv_cache.isnan().all()
    assert layer(*make_tokens(7), kv_cache, layer.build(padded)).shape == (7, HEADS, SIZE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"slot_mapping": torch.zeros(5, dtype=torch.int64)},
            "5 entries of .* in slot_mapping; give 6",
        ),
        ({"seq_lens": torch.ones(1, dtype=torch.int32)}, "1 entries .* in seq_lens; give 2"),
        (
            {"block_table_tensor": torch.ones(1, 2, dtype=torch.int32)},
            "in block_table_tensor; give 2",
        ),
        ({"query_start_loc": torch.tensor([0, 6], dtype=torch.int32)}, "query_start_loc; give 3"),
        ({"seq_lens": torch.tensor([5, 1])}, "torch.int64 in seq_lens; give 2 of torch.int32"),
        (
            {"slot_mapping": torch.zeros(6, dtype=torch.int32)},
            "slot_mapping; give 6 of torch.int64",
        ),
        ({"block_table_tensor": torch.ones(2, 2)}, "torch.float32 in block_table_tensor"),
        (
            {"query_start_loc_cpu": ints(0, 7, 6)},
            r"\[0, 7, 6\]; give offsets from 0 that do not fall",
        ),
        ({"query_start_loc_cpu": ints(1, 5, 6)}, r"\[1, 5, 6\]; give offsets from 0"),
        ({"num_actual_tokens": 5}, "num_actual_tokens of the batch is 5, .* 6 at least"),
        ({"max_query_len": 4}, "max_query_len of the batch is 4, .* 5 at least"),
        ({"max_seq_len": 4}, "request 0 of the batch has 5 tokens, beside a max_seq_len of 4"),
        ({"seq_lens": ints(5, -1)}, "request 1 of the batch has -1 tokens"),
        (
            {"seq_lens": ints(5, 9), "max_seq_len": 9},
            "request 1 of the batch has 9 tokens, .* 2 blocks of 4",
        ),
    ],
)
def test_batches_that_contradict_themselves_are_not_planned(
    changes: dict[str, Any], named: str
) -> None:
    """BR-050 and BR-116, where a batch was not made by `make_batch`."""
    batch = make_batch([5, 1], [5, 1], [[3, 8], [1]], BLOCK).replace(**changes)
    with pytest.raises(BatchError, match=named):
        make_layer().build(batch)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_cache_and_plan_are_named_where_something_else_is_passed(backend: str) -> None:
    layer = make_layer(backend, layer_name="a")
    pages = PagedKVCache({"a": layer.get_kv_cache_spec()}, 9)  # type: ignore[dict-item]
    batch, tokens = make_batch([5], [5], [[3, 8]], BLOCK), make_tokens(5)
    plan = layer.build(batch)
    for step, named in [
        ((pages["a"],), r"a cache and no plan; pass layer.build\(batch\)"),
        ((pages, plan), r"got PagedKVCache as its cache; pass its tensor, cache\['a'\]"),
        ((plan, pages["a"]), "got a tensor as its plan; the cache comes first"),
        (
            (pages["a"], layer.build(make_batch([5], [5], [[3, 99]], BLOCK))),
            "outside",
        ),
        *([] if backend == "reference" else [((pages["a"], batch), "a batch as its plan")]),
    ]:
        with pytest.raises(BatchError, match=named):
            layer(*tokens, *step)
    for wrong in (None, plan if backend == "cpu" else pages):
        with pytest.raises(BatchError, match=r"build got .*; give a CommonAttentionMetadata"):
            layer.build(wrong)  # type: ignore[arg-type]


def _wide(count: int) -> tuple[torch.Tensor, ...]:
    """Tokens with heads that flex takes too."""
    return tuple(torch.cat([x, x], dim=-1) for x in make_tokens(count))


@pytest.mark.parametrize("attn_type", ["decoder", "encoder_only", "encoder_decoder"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "flex"])
def test_what_is_no_plan_is_named_and_nothing_is_written(backend: str, attn_type: str) -> None:
    layer = make_layer(backend, head_size=2 * SIZE, attn_type=attn_type)
    cache = torch.zeros(9, KV_HEADS, BLOCK, 4 * SIZE)
    batch = make_batch([5], [5], [[3, 8]], BLOCK)
    other = make_layer("reference" if backend == "cpu" else "cpu").build(batch)
    for plan in (3, {}, "plan", layer, other, *([] if backend == "reference" else [batch])):
        is_batch = isinstance(plan, CommonAttentionMetadata)
        given = "a batch" if is_batch else type(plan).__name__
        named = (
            f"got {given} as its plan, and plans of backend {backend} are .*; pass what layer.build"
        )
        with pytest.raises(BatchError, match=named):
            layer(*_wide(5), cache, plan)
        plans: Any = {layer.layer_name: plan}
        with (
            pytest.raises(BatchError, match=named),
            forward_context(plans, {layer.layer_name: cache}),
        ):
            layer(*_wide(5))
    assert not cache.any()
    plan = layer.build(batch)
    with pytest.raises(BatchError, match="got dict as its cache"):
        layer(*_wide(5), {}, plan)
    with pytest.raises(BatchError, match="got int as `quantized`"):
        layer(*_wide(5), cache, plan, quantized=3)
    for given in ((plan, {}), ({}, cache)):
        with (
            pytest.raises(BatchError, match="give a mapping from layer names"),
            forward_context(*given),
        ):
            pass


class Careless(ReferenceImpl):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return [][0]


class CarelessBackend(ReferenceBackend):
    @staticmethod
    def get_impl_cls() -> type[ReferenceImpl]:
        return Careless


def test_only_block_ids_past_the_cache_are_called_that() -> None:
    cache = torch.zeros(9, KV_HEADS, BLOCK, 4 * SIZE)
    layer = make_layer(CarelessBackend, head_size=2 * SIZE)
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    with pytest.raises(IndexError, match="list index"):
        layer(*_wide(5), cache, plan)
    for backend in ("reference", "cpu", "flex", "triton"):
        layer = make_layer(backend, head_size=2 * SIZE)
        for tables, context, named in (
            ([[3, 9]], 0, "slot"),  # Of the last new token.
            ([[9, 8]], 4, "block"),
        ):
            plan = layer.build(make_batch([5 - context], [5], tables, BLOCK))
            with pytest.raises(BatchError, match=f"{named}.* (outside|0 to 8)"):
                layer(*_wide(5 - context), cache, plan)


def test_rows_past_the_plan_are_zero() -> None:
    layer = make_layer("cpu", return_lse=True)
    cache = PagedKVCache({"a": layer.get_kv_cache_spec()}, 9)["a"]  # type: ignore[dict-item]
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    torch.empty(8, HEADS, SIZE).fill_(math.nan)  # What the allocator is likely to hand out next.
    out, lse = layer(*make_tokens(8), cache, plan)
    assert out[:5].all()
    assert not out[5:].any()
    assert (lse[5:] == -math.inf).all()


def test_a_freed_page_is_refused_where_a_query_looks() -> None:
    """Positions 4 to 7 are in the null block; the first query stands at 12."""
    batch = make_batch([2], [14], [[3, 0, 5, 6]], BLOCK)
    assert batch.freed_cpu is not None
    assert batch.freed_cpu.tolist() == [[4, 8]]
    with pytest.raises(BatchError, match="null block for positions 4 to 7, and layer a looks"):
        make_layer("cpu", layer_name="a").build(batch)
    for window, chunk, is_seen in [
        (5, None, False),
        (6, None, True),
        (None, 4, False),
        (None, 8, False),
    ]:
        layer = make_layer("reference", sliding_window=window, attention_chunk_size=chunk)
        if is_seen:
            with pytest.raises(BatchError, match="null block"):
                layer.build(batch)
        else:
            layer.build(batch)
    ranged = batch.replace(mm_req_doc_ranges={0: [(7, 12)]})
    layer = make_layer("reference", sliding_window=5, use_mm_prefix=True)
    with pytest.raises(BatchError, match="null block"):
        layer.build(ranged)
    layer = make_layer("reference", sliding_window=5, use_rswa=True)
    layer.build(make_batch([2], [14], [[3, 0, 5, 6]], BLOCK, rswa_prefix_lens=[4]))
    with pytest.raises(BatchError, match="null block"):
        layer.build(make_batch([2], [14], [[3, 0, 5, 6]], BLOCK, rswa_prefix_lens=[5]))
    assert make_batch([2], [14], [[3, 9, 5, 6]], BLOCK).freed_cpu is None


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "tables", "is_refused"),
    [
        ([1], [8], [[3, 3]], True),
        ([1], [9], [[3, 4, 3]], True),
        ([3], [12], [[5, 4, 4]], True),
        ([1, 1], [8, 8], [[3, 4], [3, 5]], False),  # a common prefix
        ([4, 1], [8, 9], [[3, 4], [3, 4, 5]], False),  # the second reads what the first writes
        ([1], [9], [[3, 3, 4]], False),  # read twice, as if it held equal tokens
        ([0, 1], [8, 1], [[3, 3], [5]], False),  # padding
    ],
)
def test_a_block_that_is_written_stands_once_where_its_request_looks(
    query_lens: list[int], seq_lens: list[int], tables: list[list[int]], is_refused: bool
) -> None:
    batch = make_batch(query_lens, seq_lens, tables, BLOCK)
    for backend in ("cpu", "reference"):
        layer = make_layer(backend, layer_name="a")
        if is_refused:
            with pytest.raises(BatchError, match=r"writes to block \d, which stands twice"):
                layer.build(batch)
        else:
            layer.build(batch)


def test_stale_ids_may_name_a_block_of_now() -> None:
    """A page before the window was freed and given to the same request again."""
    batch = make_batch([1], [12], [[6, 5, 6]], BLOCK)
    make_layer("cpu", sliding_window=8).build(batch)
    with pytest.raises(BatchError, match="block 6, which stands twice"):
        make_layer("cpu", sliding_window=9).build(batch)
    make_layer("cpu", attention_chunk_size=4).build(batch)
    for prefix, is_seen in ((0, False), (1, True)):
        layer = make_layer("reference", sliding_window=2, use_rswa=True)
        batch = make_batch([1], [12], [[6, 5, 6]], BLOCK, rswa_prefix_lens=[prefix])
        if is_seen:
            with pytest.raises(BatchError, match="block 6, which stands twice"):
                layer.build(batch)
        else:
            layer.build(batch)


def test_two_tokens_in_one_slot_are_not_planned() -> None:
    batch = make_batch([3], [3], [[3]], BLOCK)
    twice = batch.replace(slot_mapping=torch.tensor([12, 13, 12]))
    with pytest.raises(BatchError, match="two tokens of the batch have slot 12"):
        make_layer().build(twice)
    make_layer().build(batch.replace(slot_mapping=torch.tensor([-1, 13, -1])))


def test_a_batch_with_a_mask_that_the_layer_was_not_built_for_is_not_planned() -> None:
    batch = make_batch([5], [5], [[3, 8]], BLOCK, mm_req_doc_ranges={0: [(1, 3)]})
    with pytest.raises(BatchError, match="use_mm_prefix=True"):
        make_layer().build(batch)
    make_layer("reference", use_mm_prefix=True).build(batch)
    plain = make_batch([5], [5], [[3, 8]], BLOCK)
    batch = make_batch([5], [5], [[3, 8]], BLOCK, rswa_prefix_lens=[2])
    with pytest.raises(BatchError, match=r"has rswa_prefix_lens, and .* built without use_rswa"):
        make_layer("reference", sliding_window=3).build(batch)
    layer = make_layer("reference", sliding_window=3, use_rswa=True)
    with pytest.raises(BatchError, match=r"no rswa_prefix_lens, and .* built with use_rswa"):
        layer.build(plain)
    layer.build(batch)
    make_layer("reference").build(batch)  # Without a window there is nothing to except it from.
    batch = make_batch([5], [5], [[3, 8]], BLOCK, tree_parents={0: [-1, 0, 0, 1, -1]})
    with pytest.raises(BatchError, match="use_tree_mask=True"):
        make_layer("reference").build(batch)
    make_layer("reference", use_tree_mask=True).build(batch)
    for causal in (False, torch.tensor([True])):
        batch = make_batch([5], [5], [[3, 8]], BLOCK, causal=causal)
        with pytest.raises(BatchError, match=r"causal=.* use_non_causal=True"):
            make_layer("reference").build(batch)
        make_layer("reference", use_non_causal=True).build(batch)
        make_layer("reference", attn_type="encoder_only").build(batch)  # Never causal anyway.


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([1, 3, 5, 0, 17], "row 0: token 3 has no word, and others of its request have one"),
        ([1, 1, 5, 9, 17], "row 0: token 1 does not see itself"),
        ([1, 3, 13, 9, 17], "row 0: token 2 sees a later token"),
        ([1, 3, 5, 9], r"torch.int64 of shape \(4,\); give torch.int64 of shape \(5,\)"),
        ([1.0, 3, 5, 9, 17], "torch.float32 of shape"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_words_that_are_no_tree_are_not_planned(
    backend: str, words: list[float], named: str
) -> None:
    layer = make_layer(backend, use_tree_mask=True)
    batch = make_batch([5], [5], [[3, 8]], BLOCK).replace(tree_mask=torch.tensor(words))
    with pytest.raises(BatchError, match=named):
        layer.build(batch)


def test_a_tree_of_more_than_64_tokens_is_not_planned() -> None:
    batch = make_batch([65], [65], [list(range(1, 66))], BLOCK)
    layer = make_layer("reference", use_tree_mask=True)
    with pytest.raises(BatchError, match="row 0: it has 65 tokens; give at most 64"):
        layer.build(batch.replace(tree_mask=torch.ones(65, dtype=torch.int64)))
    layer.build(batch.replace(tree_mask=torch.zeros(65, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("prefix_lens", "named"),
    [
        (torch.tensor([6], dtype=torch.int32), "row 0 is 6, and the request has 5 tokens"),
        (torch.tensor([-1], dtype=torch.int32), "row 0 is -1"),
        (
            torch.tensor([2, 2], dtype=torch.int32),
            r"of shape \(2,\); give torch.int32 of shape \(1,\)",
        ),
        (torch.tensor([2]), "torch.int64 of shape"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_prefix_that_is_no_part_of_its_request_is_not_planned(
    backend: str, prefix_lens: torch.Tensor, named: str
) -> None:
    layer = make_layer(backend, sliding_window=3, use_rswa=True)
    batch = make_batch([5], [5], [[3, 8]], BLOCK).replace(rswa_prefix_lens=prefix_lens)
    with pytest.raises(BatchError, match=named):
        layer.build(batch)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_kv_heads": 3}, "4 query heads do not divide over 3 KV heads"),
        ({"num_kv_heads": 0}, "num_kv_heads 0 is not allowed"),
        ({"num_heads": 4.0}, "num_heads 4.0 is not allowed"),
        ({"head_size": "8"}, "head_size '8' is not allowed"),
        ({"sliding_window": (128, 0)}, r"sliding_window \(128, 0\) is not allowed"),
        ({"dtype": "float32"}, "dtype 'float32' .* give a torch.dtype"),
        ({"kv_cache_dtype": ["fp8"]}, r"\['fp8'\] is not known"),
        ({"alibi_slopes": ["a"] * 4}, "alibi_slopes .* give 4 numbers"),
        ({"return_lse": "no"}, "return_lse 'no' is not allowed; give True or False"),
        ({"num_kv_heads": 8}, "over 8 KV heads"),
        ({"head_size_v": 0}, "head_size_v 0"),
        ({"block_size": 0}, "block_size 0"),
        ({"scale": math.nan}, "scale nan"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"logits_soft_cap": -2.0}, "logits_soft_cap -2"),
        ({"alibi_slopes": [1.0]}, r"alibi_slopes has shape \(1,\), but the layer has 4 heads"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\)"),
        ({"use_alibi_sqrt": True}, "needs alibi_slopes"),
        ({"attn_type": "sideways"}, "'sideways' is not known"),
        ({"kv_cache_dtype": "fp9"}, "'fp9' is not known"),
        ({"device": "gpu"}, "'gpu' is not known"),
        ({"layer_name": "a", "kv_sharing_target_layer_name": "a"}, "layer a .*cannot share"),
        (
            {"attn_type": "encoder_only", "kv_sharing_target_layer_name": "a"},
            r"\(encoder_only\) cannot share the cache of a",
        ),
        (
            {"attn_type": "encoder_only", "use_mm_prefix": True},
            "use_mm_prefix is for decoder layers",
        ),
        (
            {"attn_type": "encoder_only", "use_rswa": True, "sliding_window": 4},
            "use_rswa is for decoder layers",
        ),
        ({"use_rswa": True}, "use_rswa is about a window beside a prefix"),
        ({"use_tree_mask": True, "sliding_window": 4}, "use_tree_mask and sliding_window exclude"),
        (
            {"use_tree_mask": True, "sliding_window": 4, "use_rswa": True},
            "use_tree_mask and sliding_window exclude",
        ),
        ({"use_tree_mask": True, "alibi_slopes": [1.0] * 4}, "and alibi_slopes exclude each other"),
        (
            {"use_tree_mask": True, "attention_chunk_size": 16},
            "chunk_size and use_tree_mask exclude",
        ),
        ({"use_tree_mask": True, "use_mm_prefix": True}, "use_tree_mask and use_mm_prefix exclude"),
        (
            {"use_tree_mask": True, "attn_type": "encoder_only"},
            "use_tree_mask and attn_type encoder_only exclude each other",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference", "cpu", Recording])
def test_layers_that_mean_nothing_are_refused_whatever_the_backend(
    backend: Any, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make_layer(backend, **arguments)


@pytest.mark.parametrize(("num_heads", "head_size"), [(0, 8), (-1, 8), (4, 0)])
def test_layers_without_size_are_refused(num_heads: int, head_size: int) -> None:
    with pytest.raises(ConfigurationError):
        Attention(num_heads, head_size)


def test_what_the_backend_lacks_is_refused_with_its_reasons() -> None:
    with pytest.raises(UnsupportedConfiguration) as refusal:
        make_layer("reference", dtype=torch.float64, kv_cache_dtype="fp8_ds_mla")
    assert any("float64" in reason for reason in refusal.value.reasons)


def test_a_layer_that_wants_batch_invariance_gets_it_or_the_reason() -> None:
    assert make_layer("auto", use_batch_invariant=True).backend.supports_batch_invariance()
    with pytest.raises(UnsupportedConfiguration, match=r"flex cannot serve .*batch invariance"):
        make_layer("flex", head_size=16, use_batch_invariant=True)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"decode_context_parallel_size": 2}, r"cpu cannot serve .*\(DCP\) is asked for"),
        ({"prefill_context_parallel_size": 4}, r"cpu cannot serve .*\(PCP\) is asked for"),
    ],
)
def test_a_configuration_with_context_parallelism_asks_the_backend_for_it(
    sizes: dict[str, int], named: str
) -> None:
    config = VllmConfig(parallel_config=ParallelConfig(**sizes))
    with pytest.raises(UnsupportedConfiguration, match=named):
        make_layer("cpu", vllm_config=config)
    dimensions = MLADimensions(
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    )
    project = torch.nn.Linear(16, 16, bias=False)
    with pytest.raises(UnsupportedConfiguration, match=named.replace("cpu", "cpu_mla")):
        MLAAttention(1, dimensions, project, backend="cpu_mla", vllm_config=config)


class Spread(ReferenceBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return type("SpreadImpl", (ReferenceImpl,), {"supports_dcp": True})


def test_a_batch_of_a_cache_spread_over_ranks_is_for_layers_that_were_asked_for_one() -> None:
    batch = make_batch([1], [1], [[3]], BLOCK)
    batch = batch.replace(dcp_local_seq_lens=batch.seq_lens)
    for layer in (make_layer("reference"), make_layer(Spread)):
        with pytest.raises(
            BatchError, match="looks for every key in its own cache; build it for a"
        ):
            layer.build(batch)
    config = VllmConfig(parallel_config=ParallelConfig(decode_context_parallel_size=2))
    make_layer(Spread, vllm_config=config).build(batch)
