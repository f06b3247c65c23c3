"""Chosen keys over the kernels over latents: the gather in the interpreter, the decode in the emulator,
judged by the kit; and what the backend says of itself."""

from __future__ import annotations

import pytest

from attnkit.backends.hopper.mla_sparse import HopperMLASparseBackend
from attnkit.conformance.checks import check_case
from attnkit.conformance.mla.subject import MLASubject
from attnkit.conformance.verify import claimed_checks, outcome_of

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
