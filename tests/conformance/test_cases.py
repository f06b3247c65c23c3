"""The table of cases: enough of them, of everything, and inputs that hold what they promise."""

from __future__ import annotations

import math

import pytest
import torch

from attnkit.conformance.case import Case
from attnkit.conformance.cases import all_cases
from attnkit.conformance.checks import bits
from attnkit.conformance.subject import Subject
from attnkit.contract import AttentionType, KVCacheLayout

CASES = all_cases()
REFERENCE = Subject.of("reference")


def inputs_of(case: Case, **how):
    return REFERENCE.inputs(REFERENCE.layer(case), case, **how)


def test_there_are_five_hundred_cases_and_more() -> None:
    assert len(CASES) >= 500


def test_every_feature_occurs() -> None:
    assert {c.head_size for c in CASES} >= set(range(8, 513, 8))
    assert {c.block_size for c in CASES} >= {1, 3, 16, 100, 256}
    assert {c.layout for c in CASES} == set(KVCacheLayout)
    assert {c.attn_type for c in CASES} == set(AttentionType)
    assert {c.num_heads // c.num_kv_heads for c in CASES} >= {1, 2, 7, 71}
    assert any(isinstance(c.causal, tuple) for c in CASES)
    assert any(q > s for c in CASES for q, s in zip(c.query_lens, c.seq_lens, strict=True))
    assert any(c.first_block > 65_535 for c in CASES)
    assert any(not c.query_lens for c in CASES)
    for field in ("sinks", "alibi", "alibi_sqrt", "return_lse", "freed_window", "shared_blocks"):
        assert any(getattr(c, field) for c in CASES), field


@pytest.mark.parametrize("case", CASES[::7], ids=lambda c: c.name)
def test_a_case_is_reproducible(case: Case) -> None:
    first, second = inputs_of(case), inputs_of(case)
    for name in ("query", "key", "value"):
        assert torch.equal(bits(getattr(first, name)), bits(getattr(second, name)))
    assert torch.equal(first.batch.slot_mapping, second.batch.slot_mapping)


MIXED = Case(name="here", query_lens=(1, 0, 9), seq_lens=(40, 0, 25), sliding_window=6)


def test_what_no_query_sees_is_poison_and_what_one_sees_is_not() -> None:
    inputs = inputs_of(MIXED)
    table = inputs.batch.block_table_tensor
    for request, (q_len, kv_len) in enumerate(zip(MIXED.query_lens, MIXED.seq_lens, strict=True)):
        if q_len == 0:
            continue
        pages = inputs.kv_cache[table[request, : -(-kv_len // 16)].long()]
        tokens = pages.permute(0, 2, 1, 3).flatten(0, 1)
        poisoned = tokens.isnan().all(-1).all(-1)
        assert torch.equal(poisoned, tokens.isnan().any(-1).any(-1))
        first_seen = max(0, kv_len - q_len - 5)
        seen = torch.zeros_like(poisoned)
        seen[first_seen : kv_len - q_len] = True
        assert torch.equal(~poisoned, seen)


def test_the_null_block_is_poison_and_nobody_owns_it() -> None:
    inputs = inputs_of(MIXED)
    assert inputs.kv_cache[0].isnan().all()
    assert 0 not in inputs.batch.block_table_tensor[[0, 2]].tolist()[0]
    assert (inputs.batch.slot_mapping >= 16).all()


def test_poison_can_be_any_number() -> None:
    inputs = inputs_of(MIXED, poison=1e30)
    assert inputs.kv_cache[0].eq(1e30).all()
    half = inputs_of(
        Case(name="half", query_lens=(1,), seq_lens=(5,), dtype=torch.float16), poison=1e30
    )
    assert half.kv_cache[0].eq(torch.finfo(torch.float16).max).all()


def test_pages_are_scattered_and_owned_once() -> None:
    case = Case(name="scattered", query_lens=(1, 1, 1), seq_lens=(100, 80, 64))
    inputs = inputs_of(case)
    rows = [
        inputs.batch.block_table_tensor[r, : math.ceil(s / 16)].tolist()
        for r, s in enumerate(case.seq_lens)
    ]
    owned = [block for row in rows for block in row]
    assert len(set(owned)) == len(owned)
    assert any(row != sorted(row) for row in rows)
    assert all(row[0] != 1 for row in rows[:1]) or owned != list(range(1, len(owned) + 1))


def test_other_seeds_move_pages_and_keep_numbers() -> None:
    here, there = inputs_of(MIXED), inputs_of(MIXED, page_seed=1)
    assert not torch.equal(here.batch.slot_mapping, there.batch.slot_mapping)
    assert torch.equal(here.query, there.query)
    assert torch.equal(here.sequences[2].k, there.sequences[2].k)


def test_shared_pages_are_shared() -> None:
    case = Case(name="shared", query_lens=(1, 3), seq_lens=(40, 35), shared_blocks=2)
    inputs = inputs_of(case)
    table = inputs.batch.block_table_tensor
    assert torch.equal(table[0, :2], table[1, :2])
    assert table[0, 2] != table[1, 2]
    assert torch.equal(inputs.sequences[0].k[:32], inputs.sequences[1].k[:32])


def test_freed_pages_are_the_null_block() -> None:
    case = Case(name="freed", query_lens=(1,), seq_lens=(70,), sliding_window=5, freed_window=True)
    table = inputs_of(case).batch.block_table_tensor[0].tolist()
    assert table[:4] == [0, 0, 0, 0]
    assert table[4] != 0
