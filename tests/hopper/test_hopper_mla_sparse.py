"""Chosen keys over the kernels over latents: the gather in the interpreter, the decode in the emulator,
judged by the kit; and what the backend says of itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnkit.backends.hopper import latent_gather, latent_gather_launch, tuning
from attnkit.backends.hopper.mla import HopperMLABackend
from attnkit.backends.hopper.mla_sparse import HopperMLASparseBackend
from attnkit.backends.hopper.mla_sparse_plan import Lists
from attnkit.conformance.checks import check_case, run_and_judge
from attnkit.conformance.kit import claimed_checks, outcome_of
from attnkit.conformance.mla.laws import lists_may_name_anything
from attnkit.conformance.mla.subject import MLASubject
from attnkit.conformance.subject import LawBroken, Subject
from attnkit.contract import DeviceCapability, MLADimensions
from attnkit.errors import CacheError
from attnkit.mla.hisparse import HiSparseCache
from attnkit.selection import AttentionRequest, decide, reasons_against

SPARSE_LAYER: dict[str, Any] = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "num_heads": 128,
    "num_kv_heads": 1,
    "block_size": 64,
    "use_mla": True,
    "use_sparse": True,
    "mla": MLADimensions(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    "device_capability": DeviceCapability(9, 0),
}

LENS = {"query_lens": (1, 2, 0, 5, 1), "seq_lens": (300, 2, 0, 140, 67)}

CASES = {
    "all of them": {"num_heads": 4},
    "few": {"num_heads": 4, "told": 20},
    "128 heads": {"num_heads": 128, "told": 150, "query_lens": (1, 1), "seq_lens": (300, 70)},
    "40 heads": {"num_heads": 40, "told": 200, "query_lens": (3,), "seq_lens": (210,)},
    "codes": {"num_heads": 4, "told": 150, "kv_cache_dtype": "fp8"},
    "codes, 20 heads": {"num_heads": 20, "told": 90, "kv_cache_dtype": "fp8"},
    "rows of codes": {"num_heads": 4, "told": 150, "kv_cache_dtype": "fp8_ds_mla"},
    "rows of codes, 20 heads": {"num_heads": 20, "told": 90, "kv_cache_dtype": "fp8_ds_mla"},
}


@pytest.mark.parametrize("name", CASES)
def test_chosen_keys_are_attended_to(
    emulated_sparse: type[HopperMLASparseBackend], name: str
) -> None:
    subject = MLASubject.of(emulated_sparse)
    fields = {"return_lse": True, "block_size": 16, **LENS, **CASES[name]}
    check_case(subject, subject.plain_case(name, **fields))


WANTED = (
    "claim:",
    "law:captured_steps_replay",
    "law:lists_may_name_anything",
    "law:padding_rows_are_zero",
    "law:runs_are_repeatable",
    "law:unread_memory_does_not_matter",
    "law:states_of_several_tokens",
)


def test_the_kit_passes(emulated_sparse: type[HopperMLASparseBackend]) -> None:
    checks = [
        c for c in claimed_checks(MLASubject.of(emulated_sparse)) if c.name.startswith(WANTED)
    ]
    assert len(checks) > len(WANTED)
    failed = [o for o in map(outcome_of, checks) if o.status == "failed"]
    assert not failed, failed


def _told(lists: torch.Tensor, **facts: bool) -> Any:
    """An indexer that has been given its lists."""
    return SimpleNamespace(topk_indices_buffer=lists, **facts)


def _layer(subject: Subject, indexer: object, **fields: object) -> tuple[Any, Any]:
    case = subject.plain_case("chosen", **{"return_lse": True, "num_heads": 4, **fields})
    layer = subject.layer(case, indexer=indexer)
    return layer, subject.inputs(layer, case)


def test_many_queries_are_gathered_some_at_a_time(
    emulated_sparse: type[HopperMLASparseBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit as at once, in prompts and decodes, in less memory."""
    subject = MLASubject.of(emulated_sparse)
    lists = torch.stack(
        [torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(13)]
    )
    lists = lists[:, :24].int()
    results = []
    for at_once in (64, 4):
        monkeypatch.setattr(tuning, "MAX_CHOSEN_TOKENS", at_once)
        layer, inputs = _layer(subject, _told(lists), query_lens=(1, 11, 1), seq_lens=(40, 30, 3))
        results.append(subject.run(layer, inputs))
        rows, _ = layer._builder._planner.rows(24, torch.bfloat16)
        assert rows.shape[0] == at_once
    one, other = results
    assert torch.equal(one.out, other.out)
    assert torch.equal(one.lse, other.lse)


@pytest.mark.parametrize("distinct", [True, False])
def test_lists_that_name_nothing_twice_are_planned_as_long_as_their_context(
    emulated_sparse: type[HopperMLASparseBackend], distinct: bool
) -> None:
    """The answer is the same; a step of short contexts has less to do."""
    subject = MLASubject.of(emulated_sparse)
    lists = torch.full((3, 600), -1, dtype=torch.int32)
    for row, length in enumerate((1, 70, 300)):
        lists[row, :length] = torch.arange(length)
    indexer = _told(lists, lists_are_distinct=distinct)
    layer, inputs = _layer(subject, indexer, query_lens=(1, 1, 1), seq_lens=(1, 70, 300))
    run_and_judge(subject, layer, inputs)
    (chosen,) = subject.plan(layer, inputs, inputs.batch).work(Lists(4, 600, distinct))
    num_tiles = int(chosen.work.share[1])
    assert num_tiles == (1 + 2 + 5 if distinct else 3 * 10)


def test_a_replayed_step_of_fewer_queries_runs_no_older_plan(
    emulated_sparse: type[HopperMLASparseBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of five queries, two at a time; a step of one query is planned for all three parts."""
    monkeypatch.setattr(tuning, "MAX_CHOSEN_TOKENS", 2)
    subject = MLASubject.of(emulated_sparse)
    lists = torch.arange(6, dtype=torch.int32).expand(5, -1)
    layer, inputs = _layer(subject, _told(lists), query_lens=(1,) * 5, seq_lens=(6,) * 5)
    builder = layer._builder
    plan = builder.build_for_cudagraph_capture(inputs.batch)
    kind = Lists(4, 6, False)
    assert [c.first_token for c in plan.work(kind)] == [0, 2, 4]
    starts = torch.tensor([0, 1, 1, 1, 1, 1], dtype=torch.int32)
    fewer = inputs.batch.replace(query_start_loc=starts, query_start_loc_cpu=starts)
    works = builder.build(0, fewer).work(kind)
    # Of parts without a query, one that is nobody's and sees nothing.
    assert [int(c.work.share[2]) for c in works] == [1, 1, 1]
    assert [c.owners[:, 1].tolist() for c in works] == [[6, 0], [0, 0], [0, 0]]
    before = [c.work.share.data_ptr() for c in plan.work(kind)]
    assert [c.work.share.data_ptr() for c in works] == before


@pytest.mark.parametrize("stored", ["auto", "fp8", "fp8_ds_mla"])
def test_rows_of_the_host_are_to_the_bit_those_of_the_device(
    emulated_sparse: type[HopperMLASparseBackend], stored: str
) -> None:
    """With a `hisparse_cache` what is listed comes into hot rows first."""
    subject = MLASubject.of(emulated_sparse)
    lists = torch.tensor([[5, 0, -1, 39], [7, 7, 12, 9], [1, 0, 2, -1]], dtype=torch.int32)
    results = []
    for hot in (None, HiSparseCache(12)):
        layer, inputs = _layer(
            subject,
            _told(lists),
            query_lens=(1, 2),
            seq_lens=(40, 10),
            kv_cache_dtype=stored,
        )
        layer.impl.hisparse_cache = hot
        results.append(subject.run(layer, inputs))
    assert hot is not None
    assert hot.traffic.moved == 7
    one, other = results
    assert torch.equal(one.out, other.out)
    assert torch.equal(one.lse, other.lse)


FAULTS = {
    "keys after the query are named": ("(position < num_seen)", "(position < num_seen + 1)"),
    "gaps are left": ("tl.cumsum(named.to(tl.int32), 0) - 1", "tl.arange(0, ROWS)"),
    "what stands before is not counted": ("tl.where(j == 0, 0, num_named) +", "j * ROWS +"),
    "the plan is not told": ("if t < num_units:", "if t < 0:"),
    "only one head tile's plan is told": ("tl.static_range(GROUPS)", "tl.static_range(1)"),
    "offsets in a page are left out": ("(position % PAGE_SIZE) * row_units", "0"),
    "rope columns are not copied": (
        "rotated, mask=there)\n    if j",
        "rotated, mask=there & False)\n    if j",
    ),
    "scales of tiles are left out": ("if scales is not None:", "if False:"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_the_gather_is_found(
    emulated_sparse: type[HopperMLASparseBackend],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
) -> None:
    old, new = FAULTS[name]
    source = Path(latent_gather.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times"
    path = tmp_path / "faulty_gather.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("faulty_gather", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(latent_gather_launch, "gather_latents_kernel", module.gather_latents_kernel)
    subject = MLASubject.of(emulated_sparse)
    stored = "fp8_ds_mla" if "tiles" in name else "auto"
    heads = 80 if "head tile" in name else 4
    fields = {"num_heads": heads, "kv_cache_dtype": stored, "told": 30}
    case = subject.plain_case(name, return_lse=True, query_lens=(1, 2), seq_lens=(70, 2), **fields)

    def judge() -> None:
        check_case(subject, case)
        lists_may_name_anything(subject)

    with pytest.raises((LawBroken, AssertionError, IndexError)):
        judge()


def test_a_cache_that_cannot_be_gathered_is_named(
    emulated_sparse: type[HopperMLASparseBackend],
) -> None:
    subject = MLASubject.of(emulated_sparse)
    lists = torch.zeros(1, 4, dtype=torch.int32)
    layer, inputs = _layer(subject, _told(lists), query_lens=(1,), seq_lens=(5,))
    blocks, heads, size, width = inputs.kv_cache.shape
    for given, named in (
        (torch.zeros(blocks, heads, size, width + 4, dtype=torch.bfloat16)[..., :width], "strides"),
        (torch.zeros(blocks, heads, size, width), "kv_cache is torch.float32"),
    ):
        with pytest.raises(CacheError, match=named):
            layer.impl.forward_mqa(
                inputs.query.new_zeros(1, 4, width), given[:, 0], layer.build(inputs.batch), layer
            )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, None),
        ({"kv_cache_dtype": "fp8_ds_mla"}, None),
        ({"block_size": 1}, None),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "nvfp4_ds_mla"),
        ({"device_capability": DeviceCapability(10, 0)}, "sm_100"),
        ({"use_sparse": False}, "sparse"),
    ],
)
def test_what_the_kernels_do_not_do_is_a_reason(fields: dict, words: str | None) -> None:
    request = AttentionRequest(**{**SPARSE_LAYER, **fields})
    reasons = reasons_against(HopperMLASparseBackend, request, here=False)
    assert len(reasons) == (words is not None), reasons
    assert words is None or words in reasons[0]


def test_it_is_chosen_before_the_portable_kernels() -> None:
    costs = {d.name: d.cost for d in decide(AttentionRequest(**SPARSE_LAYER), here=False)}
    assert costs["hopper_mla_sparse"] < costs["triton_mla_sparse"]  # type: ignore[operator]


def test_plans_of_the_dense_backend_are_not_its_own() -> None:
    """Their works are of other kinds, and layers refuse what is not of the class."""
    plans = [b.get_builder_cls().get_plan_cls() for b in (HopperMLABackend, HopperMLASparseBackend)]
    assert not any(issubclass(a, b) for a, b in (plans, plans[::-1]))  # type: ignore[arg-type]
