"""The kernels in the emulator: long and ragged batches judged by the kit's oracle, and its own cases.

Free pages, tails, and keys left of every window are NaN (`attnkit.conformance.inputs`), copies finish
in any order, and a deadlock or an access outside a tensor is an error (`emulator`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit.backends.hopper.backend import HopperBackend
from attnkit.backends.hopper.plan import Planner
from attnkit.conformance import verify
from attnkit.conformance.cases import plain_case
from attnkit.conformance.checks import check_case, run_and_judge
from attnkit.conformance.inputs import make_inputs
from attnkit.conformance.subject import LawBroken, Subject
from conftest import emulate

RAGGED = {"query_lens": (140, 1, 150, 5), "seq_lens": (140, 333, 415, 700)}
"""Whole prompts, chunks, a decode and a verification; several row tiles for each of four programs."""

CASES: dict[str, dict[str, Any]] = {
    "grouped": {"num_heads": 8, "num_kv_heads": 2},
    "window": {
        "num_heads": 8,
        "num_kv_heads": 2,
        "sliding_window": 100,
        "freed_window": True,
    },
    "head_size_128": {"num_heads": 4, "num_kv_heads": 1, "head_size": 128},
    "head_size_256": {"num_heads": 2, "num_kv_heads": 2, "head_size": 256},
    "group_of_7": {"num_heads": 7, "num_kv_heads": 1, "sinks": True},
    "group_of_6_window": {"num_heads": 6, "num_kv_heads": 1, "sliding_window": 70},
    "page_256": {"block_size": 256, "num_heads": 4, "num_kv_heads": 2},
    "page_48": {"block_size": 48, "num_heads": 4, "num_kv_heads": 2},
    "page_160_window": {
        "block_size": 160,
        "sliding_window": 90,
        "freed_window": True,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "non_causal": {"num_heads": 4, "num_kv_heads": 2, "causal": False},
    "non_causal_window": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "causal": False,
        "sliding_window": 90,
    },
    "causal_per_request": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "causal": (True, False, False, True),
        "sliding_window": 77,
    },
    "cap_and_alibi": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "logits_soft_cap": 5.0,
        "query_gain": 4.0,
        "alibi": True,
    },
    "negative_scale": {"num_heads": 2, "num_kv_heads": 2, "scale": -0.2},
    "verify_16_group_8": {
        "num_heads": 16,
        "num_kv_heads": 2,
        "query_lens": (16, 9, 16, 3),
        "seq_lens": (300, 700, 16, 1100),
    },
    "verify_window": {
        "num_heads": 16,
        "num_kv_heads": 2,
        "sliding_window": 130,
        "freed_window": True,
        "query_lens": (16, 9, 16, 3),
        "seq_lens": (300, 700, 16, 1100),
    },
    "rows_16_window_cap": {
        "num_heads": 8,
        "num_kv_heads": 2,
        "sliding_window": 130,
        "freed_window": True,
        "logits_soft_cap": 5.0,
        "query_gain": 4.0,
        "query_lens": (1, 4, 0, 3),
        "seq_lens": (300, 700, 0, 1100),
    },
    "rows_16_alibi_sinks": {
        "num_heads": 7,
        "num_kv_heads": 1,
        "head_size": 128,
        "alibi": True,
        "sinks": True,
        "block_size": 48,
        "query_lens": (1, 2, 1),
        "seq_lens": (300, 2, 1100),
    },
    "rows_16_alike": {
        "num_heads": 4,
        "num_kv_heads": 4,
        "query_lens": (1, 1),
        "seq_lens": (500, 500),
    },
    "codes": {"num_heads": 8, "num_kv_heads": 2, "kv_cache_dtype": "fp8"},
    "codes_128_window_cap": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 128,
        "kv_cache_dtype": "fp8",
        "sliding_window": 130,
        "freed_window": True,
        "logits_soft_cap": 5.0,
        "query_gain": 4.0,
    },
    "codes_256_page_48": {
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 256,
        "block_size": 48,
        "kv_cache_dtype": "fp8",
        "sinks": True,
        "query_lens": (1, 16, 40),
        "seq_lens": (300, 400, 90),
    },
    "group_of_64": {
        "num_heads": 64,
        "num_kv_heads": 1,
        "query_lens": (1, 3, 2),
        "seq_lens": (600, 33, 100),
    },
    "splits": {
        "num_heads": 8,
        "num_kv_heads": 2,
        "query_lens": (40, 1),
        "seq_lens": (1500, 333),
    },
    "splits_window_sinks": {
        "num_heads": 7,
        "num_kv_heads": 1,
        "sinks": True,
        "sliding_window": 500,
        "freed_window": True,
        "query_lens": (30, 17),
        "seq_lens": (1100, 900),
    },
    "splits_codes_128_cap": {
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 128,
        "kv_cache_dtype": "fp8",
        "logits_soft_cap": 5.0,
        "query_gain": 4.0,
        "query_lens": (50,),
        "seq_lens": (900,),
    },
    "splits_non_causal_256": {
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 256,
        "causal": False,
        "query_lens": (0, 20),
        "seq_lens": (0, 700),
    },
    "more_queries_than_keys": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "query_lens": (300, 40, 20),
        "seq_lens": (150, 0, 20),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_long_and_ragged_batches_are_right(emulated: type[HopperBackend], name: str) -> None:
    subject = Subject.of(emulated)
    fields = {"return_lse": True, **RAGGED, **CASES[name]}
    check_case(subject, plain_case(name, subject.basis(), **fields))


@pytest.mark.parametrize("part", ["lse-", "mixed_causal", "law:plan_follows", "law:captured"])
def test_the_kit_passes(emulated: type[HopperBackend], part: str) -> None:
    report = verify(emulated, filter=part)
    assert report.ok or part.startswith("law"), report
    assert not report.failed, report


@pytest.mark.parametrize("num_sms", [1, 5, 40])
def test_shared_contexts_fold_to_the_same_bits_whoever_comes_last(
    emulated: type[HopperBackend], monkeypatch: pytest.MonkeyPatch, num_sms: int
) -> None:
    """40 multiprocessors cut a context into up to 80 pieces: three levels of states."""
    init = Planner.__init__

    def resized(self: Planner, device: torch.device, max_num_reqs: int) -> None:
        init(self, device, max_num_reqs)
        self._num_sms = num_sms

    monkeypatch.setattr(Planner, "__init__", resized)
    subject = Subject.of(emulated)
    case = plain_case(
        "folded",
        subject.basis(),
        num_heads=4,
        num_kv_heads=1,
        query_lens=(1, 3, 0),
        seq_lens=(12_000, 500, 0),
        return_lse=True,
    )
    layer = subject.layer(case)
    first = None
    # The emulator runs programs in another order each time.
    for _ in range(2):
        inputs = make_inputs(case, subject.spec(layer, case))
        result, _ = run_and_judge(subject, layer, inputs)
        if first is not None:
            assert torch.equal(result.out[:4], first.out[:4])
            assert torch.equal(result.lse[:4], first.lse[:4])
        first = result


def test_counters_are_left_zero(emulated: type[HopperBackend]) -> None:
    subject = Subject.of(emulated)
    lens = {"query_lens": (1, 1), "seq_lens": (3000, 70)}
    case = plain_case("counters", subject.basis(), num_heads=2, num_kv_heads=1, **lens)
    layer = subject.layer(case)
    inputs = make_inputs(case, subject.spec(layer, case))
    plan = subject.plan(layer, inputs, inputs.batch)
    subject.run(layer, inputs, plan=plan)
    (made,) = plan.plans.values()
    assert made.decode.states.counters.shape[1] == 8 * 2
    assert not made.decode.states.counters.any()


FAULTS: dict[str, tuple[str, str, str]] = {
    "tail is not zeroed": (
        "prefill",
        "zero_past_end(v_rows, slot, tile, num_keys, VALUES)",
        "pass",
    ),
    "window edge is not zeroed": (
        "prefill",
        "zero_before_window(v_rows, slot, first_tile, first_key, VALUES)",
        "pass",
    ),
    "Q is overwritten early": ("prefill_copies", "pred=i > first,", "pred=False,"),
    "K is released before it is read": (
        "prefill_tile",
        "    take_turn(step, ME, CONFIG)\n    s = start_scores(",
        "    mbarrier.arrive(empty.index(slot), count=1)\n    s = start_scores(",
    ),
    "decode tail is not zeroed": (
        "decode",
        "zero_past_end(v_boxes, slot, tile, num_keys, CONFIG)",
        "pass",
    ),
    "parts are folded unscaled": (
        "states",
        "acc = accs[0] * gl.expand_dims(fade, 1)",
        "acc = accs[0]",
    ),
    "a table cell past the end is read": ("tile", "& (key < end_key)", ""),
    "codes: scores stay multiplied": ("decode", "s = s * gl.expand_dims(inverse, 1)", "pass"),
    "codes: Q is taken for another's": ("decode", "(num_done & 1) ^ 1", "num_done & 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(
    emulated: type[HopperBackend], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, old, new = FAULTS[name]

    def edit(at: str, source: str) -> str:
        if at != module:
            return source
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module}"
        return source.replace(old, new)

    emulate(monkeypatch, edit)
    subject = Subject.of(emulated)
    of_codes = name.startswith("codes") or name == "parts are folded unscaled"
    layer = "codes" if of_codes else "window"
    case = plain_case("fault", subject.basis(), **{**RAGGED, **CASES[layer]})
    with pytest.raises((LawBroken, AssertionError, TimeoutError, IndexError)):
        check_case(subject, case)
