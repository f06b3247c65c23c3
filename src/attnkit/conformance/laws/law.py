"""What a law is, and what laws start from: a plain case, and layers of it in every variant taken.

In: a `Subject`. Out: `Law`, `base_case`, `claimed`, and what several laws expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from attnkit.conformance.case import DTYPES, Case
from attnkit.conformance.checks import expect_same_bits
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.subject import NotClaimed, Result, Subject
from attnkit.paged_layer import PagedLayer

Law = Callable[[Subject], None]
"""Returns, or raises `LawBroken`; `NotClaimed` where the backend refuses what the law is about."""

_MIXED = {"query_lens": (1, 9, 1, 21), "seq_lens": (49, 25, 16, 21)}
"""Decodes, a chunk and a whole prompt."""


def base_case(subject: Subject, **fields: Any) -> Case:
    """The plain case of a law; LSE where the backend can."""
    lse = subject.basis().lse
    return subject.plain_case("law", **{**_MIXED, "return_lse": lse, **fields})


def claimed(
    subject: Subject, base: Case | None = None, *, coded: bool = False
) -> Iterator[tuple[PagedLayer, Case]]:
    """Layers of the base case in every variant and dtype the backend takes.

    Args:
        subject: the backend.
        base: the case; None: `base_case`.
        coded: over caches of codes too.

    Raises:
        NotClaimed: not even the plain one is taken.
    """
    base = base_case(subject) if base is None else base
    dtypes = [{"dtype": DTYPES[name]} for name in subject.basis().dtypes[1:2]]
    refusals: list[NotClaimed] = []
    num_taken = 0
    for i, variant in enumerate(
        (*subject.law_variants, *dtypes, *(subject.coded_variants if coded else ()))
    ):
        case = replace(base, name=f"{base.name}-{i}", **variant)
        try:
            layer = subject.layer(case)
        except NotClaimed as refusal:
            refusals.append(refusal)
            continue
        num_taken += 1
        yield layer, case
    if not num_taken:
        raise refusals[0]


def expect_same(got: Result, want: Result, case: Case, when: str) -> None:
    """Equal bits of two results.

    Args:
        got: of the run that is judged.
        want: of the one it must equal.
        case: of both.
        when: what was different, for the message.
    """
    expect_same_bits(got.out, want.out, f"the output {when} ({case})")
    if got.lse is not None and want.lse is not None:
        expect_same_bits(got.lse, want.lse, f"the LSE {when} ({case})")


def expect_logical(inputs: Inputs) -> None:
    """The law writes into the cache itself.

    Raises:
        NotClaimed: the cache has a shape of the backend's own.
    """
    if not inputs.is_logical:
        raise NotClaimed("the law writes into the cache, which has a shape of the backend's own")
