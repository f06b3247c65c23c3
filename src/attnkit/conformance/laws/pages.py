"""Laws of pages: where tokens stand, what stands beside them and who writes does not matter.

In: a `Subject`. Out: as of any law.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attnkit.conformance.case import DTYPES
from attnkit.conformance.checks import (
    BatchWatch,
    CacheWatch,
    bits,
    expect_padding_untouched,
    judge,
    run_and_judge,
)
from attnkit.conformance.laws.law import base_case, claimed, expect_logical, expect_same
from attnkit.conformance.oracle import merge
from attnkit.conformance.parts import key_pages, smaller_pages
from attnkit.conformance.step import UNWRITTEN
from attnkit.conformance.subject import LawBroken, NotClaimed, Result, Subject


def pages_do_not_matter(subject: Subject) -> None:
    """The same tokens on other pages give the same answer, bit for bit."""
    for layer, case in claimed(subject, coded=True):
        first, _ = run_and_judge(subject, layer, subject.inputs(layer, case))
        for page_seed in (1, 2):
            other, _ = run_and_judge(
                subject, layer, subject.inputs(layer, case, page_seed=page_seed)
            )
            expect_same(other, first, case, "with its pages elsewhere")


def unread_memory_does_not_matter(subject: Subject) -> None:
    """What stands in memory that no query sees never shows: NaN, inf, large, zero give equal bits."""
    for layer, case in claimed(subject, coded=True):
        case = replace(case, padding_tokens=3, padding_reqs=1)
        results = []
        for poison in (math.nan, math.inf, 1e30, 0.0):
            inputs = subject.inputs(layer, case, poison=poison)
            results.append((poison, subject.run(layer, inputs)))
            judge(inputs.sequences, results[-1][1])
        for poison, result in results[1:]:
            expect_same(result, results[0][1], case, f"with {poison} instead of NaN unread")


def block_size_does_not_matter(subject: Subject) -> None:
    """An engine's page read as several kernel pages answers as the page itself."""
    smallest = subject.basis().block_size
    big = 4 * smallest
    base = base_case(subject, block_size=big, query_lens=(1, 9), seq_lens=(200, 75))
    num_read = 0
    for small in (smallest, 2 * smallest):
        for layer, case in claimed(subject, base):
            try:
                chunk = case.chunk_pages and case.chunk_pages * (big // small)
                small_layer = subject.layer(replace(case, block_size=small, chunk_pages=chunk))
            except NotClaimed:
                continue
            inputs = subject.inputs(layer, case)
            expect_logical(inputs)
            run_and_judge(subject, layer, inputs)
            split = smaller_pages(subject.inputs(layer, case), small)
            judge(inputs.sequences, subject.run(small_layer, split))
            num_read += 1
    if not num_read:
        raise NotClaimed(f"of the page sizes {smallest} to {big} no two are taken")


def plan_follows_another_block_table(subject: Subject) -> None:
    """Where the builder can, a plan moved to other pages answers as one built for them."""
    for layer, case in claimed(subject):
        builder = layer.make_builder()
        if not builder.supports_update_block_table:
            if case.chunk_pages is not None:
                continue  # A wrapper's builder, not the backend's.
            raise NotClaimed("the builder says supports_update_block_table = False")
        here, there = (subject.inputs(layer, case, page_seed=seed) for seed in (0, 1))
        watch = BatchWatch(here.batch)
        plan = builder.build(0, here.batch)
        moved = builder.update_block_table(
            plan, there.batch.block_table_tensor, there.batch.slot_mapping
        )
        watch.expect_unchanged()
        judge(there.sequences, subject.run(layer, there, plan=moved))
        # The plan it came from still serves its own pages.
        judge(here.sequences, subject.run(layer, here, plan=plan))


def parts_merge_by_their_lse(subject: Subject) -> None:
    """Attention over any partition of the keys, merged by LSE, is attention over all of them; only
    one part is given the sink."""
    refusals: list[NotClaimed] = []
    num_merged = 0
    page = subject.basis().block_size
    last_dtype = DTYPES[subject.basis().dtypes[-1]]
    for variant in ({}, {"sinks": True}, {"logits_soft_cap": 2.0}, {"dtype": last_dtype}):
        case = replace(
            base_case(subject, query_lens=(1, 1), seq_lens=(3 * page, 4 * page)),
            **{"return_lse": True, **variant},
        )
        try:
            layer = subject.layer(case)
            rest = subject.layer(replace(case, sinks=False))
        except NotClaimed as refusal:
            refusals.append(refusal)
            continue
        inputs = subject.inputs(layer, case)
        run_and_judge(subject, layer, inputs)
        for cut in (0, 1, 2, 3):
            parts = [
                subject.run(rest, key_pages(inputs, 0, cut)),
                subject.run(layer, key_pages(inputs, cut, None)),
            ]
            out, lse = merge(
                [p.out.double().cpu().numpy() for p in parts],
                [p.lse.double().cpu().numpy() for p in parts if p.lse is not None],
            )
            merged = Result(out=torch.from_numpy(out), lse=torch.from_numpy(lse))
            judge(inputs.sequences, merged)
        num_merged += 1
    if not num_merged:
        raise refusals[0]


def shared_cache_is_only_read(subject: Subject) -> None:
    """A layer that shares another's cache reads that layer's tokens and writes nothing."""
    for layer, case in claimed(subject):
        inputs = subject.inputs(layer, case)
        run_and_judge(subject, layer, inputs)
        reader = subject.layer(case, kv_sharing_target_layer_name=layer.layer_name)
        before = bits(inputs.kv_cache)
        # Its own keys and values are not what the cache holds, so writing or reading them shows.
        own = replace(inputs, key=inputs.key + 1, value=inputs.value - 1)
        judge(inputs.sequences, subject.run(reader, own))
        if not torch.equal(bits(inputs.kv_cache), before):
            raise LawBroken("a layer with kv_sharing_target_layer_name wrote to the cache")


def unwritten_slots_stay(subject: Subject) -> None:
    """Slot -1 writes nothing, wherever in the batch it stands."""
    for layer, case in claimed(subject, coded=True):
        inputs = subject.inputs(layer, case)
        run_and_judge(subject, layer, inputs)  # The tokens are in the cache now.
        none = replace(
            inputs,
            key=torch.full_like(inputs.key, UNWRITTEN),
            value=torch.full_like(inputs.value, UNWRITTEN),
            batch=inputs.batch.replace(slot_mapping=torch.full_like(inputs.batch.slot_mapping, -1)),
        )
        cache = CacheWatch(none)
        result = subject.run(layer, none)
        cache.expect_only_new_tokens_written()
        judge(inputs.sequences, result)
        expect_padding_untouched(none, result)
