"""Laws that need more than one run to be seen: what must not matter, does not.

In: a `Subject`. Out: nothing, or `LawBroken`; `NotClaimed` where the backend refuses what the law is
about. Each law is one function of the table `LAWS`, and its first line says what it demands. Single
runs are judged on the way (`checks`), so a law also fails when one of its runs is simply wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attnkit.batch import make_batch
from attnkit.compiled import forward_context
from attnkit.conformance.captured import captured_steps_replay
from attnkit.conformance.case import DTYPES, Case
from attnkit.conformance.checks import (
    BatchWatch,
    CacheWatch,
    bits,
    expect_padding_untouched,
    expect_same_bits,
    judge,
    run_and_judge,
)
from attnkit.conformance.inputs import UNWRITTEN, Inputs
from attnkit.conformance.oracle import merge
from attnkit.conformance.parts import key_pages, one_request, smaller_pages
from attnkit.conformance.subject import LawBroken, NotClaimed, Result, Subject
from attnkit.contract import kFp8StaticTensorSym, kNvfp4Dynamic
from attnkit.errors import UnsupportedConfiguration
from attnkit.layer import Attention
from attnkit.output_quant import OUTPUT_KEYS, QuantizedOutput
from attnkit.paged_layer import PagedLayer

Law = Callable[[Subject], None]

_MIXED = {"query_lens": (1, 9, 1, 21), "seq_lens": (49, 25, 16, 21)}
"""Decodes, a chunk and a whole prompt."""


def _base(subject: Subject, **fields: Any) -> Case:
    """The plain case of a law; LSE where the backend can."""
    lse = subject.basis().lse
    return subject.plain_case("law", **{**_MIXED, "return_lse": lse, **fields})


def claimed(
    subject: Subject, base: Case | None = None, *, coded: bool = False
) -> Iterator[tuple[PagedLayer, Case]]:
    """Layers of the base case in every variant and dtype the backend takes.

    Args:
        subject: the backend.
        base: the case; None: `_base`.
        coded: over caches of codes too.

    Raises:
        NotClaimed: not even the plain one is taken.
    """
    base = _base(subject) if base is None else base
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


def pages_do_not_matter(subject: Subject) -> None:
    """The same tokens on other pages give the same answer, bit for bit."""
    for layer, case in claimed(subject, coded=True):
        first, _ = run_and_judge(subject, layer, subject.inputs(layer, case))
        for page_seed in (1, 2):
            other, _ = run_and_judge(
                subject, layer, subject.inputs(layer, case, page_seed=page_seed)
            )
            _expect_same(other, first, case, "with its pages elsewhere")


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
            _expect_same(result, results[0][1], case, f"with {poison} instead of NaN unread")


def runs_are_repeatable(subject: Subject) -> None:
    """The same step twice gives the same bits."""
    for layer, case in claimed(subject):
        first = subject.run(layer, subject.inputs(layer, case))
        for _ in range(3):
            again = subject.run(layer, subject.inputs(layer, case))
            _expect_same(again, first, case, "on a second run")


def batch_mates_do_not_matter(subject: Subject) -> None:
    """A request alone answers as in a batch; to the bit if the backend claims batch invariance."""
    invariant = subject.backend.supports_batch_invariance()
    for layer, case in claimed(subject, coded=True):
        inputs = subject.inputs(layer, case)
        together, _ = run_and_judge(subject, layer, inputs)
        starts = np.cumsum([0, *case.query_lens])
        for request in range(case.num_reqs):
            rows = slice(int(starts[request]), int(starts[request + 1]))
            alone = subject.run(layer, one_request(inputs, request, rows))
            judge(inputs.sequences[request : request + 1], alone)
            if invariant:
                part = Result(
                    out=together.out[rows],
                    lse=None if together.lse is None else together.lse[rows],
                )
                _expect_same(alone, part, case, f"when request {request} is alone")


def order_of_requests_does_not_matter(subject: Subject) -> None:
    """Requests in another order, decodes last, between or first, answer the same."""
    lens = [(1, 49), (9, 25), (1, 16), (21, 21), (0, 0)]
    for order in ([0, 1, 2, 3, 4], [3, 4, 1, 2, 0], [4, 1, 0, 3, 2]):
        base = _base(
            subject,
            query_lens=tuple(lens[i][0] for i in order),
            seq_lens=tuple(lens[i][1] for i in order),
        )
        for layer, case in claimed(subject, base):
            run_and_judge(subject, layer, subject.inputs(layer, case))


def splitting_a_prompt_does_not_matter(subject: Subject) -> None:
    """A prompt in pieces ends in the same cache bytes and answers as in one."""
    length = 45
    base = _base(subject, query_lens=(length,), seq_lens=(length,))
    for layer, case in claimed(subject, base, coded=True):
        if case.causal is not True or case.tree:
            continue  # Without causality earlier pieces cannot see later ones; a tree comes whole.
        whole = subject.inputs(layer, case)
        run_and_judge(subject, layer, whole)
        cuts: tuple[tuple[int, ...], ...] = (
            (44, 1),
            (1, 44),
            (16, 16, 13),
            (7, 7, 7, 7, 7, 7, 3),
            (33, 12),
        )
        if case.mm_prefix:
            cuts = ((16, 29), (22, 23), (17, 5, 23))  # Ranges are not cut.
        for pieces in cuts:
            inputs = subject.inputs(layer, case)
            _run_in_pieces(subject, layer, inputs, pieces)
            expect_same_bits(
                inputs.kv_cache, whole.kv_cache, f"the cache after pieces {pieces} ({case})"
            )


def padding_does_not_matter(subject: Subject) -> None:
    """Padding requests and tokens change nothing and nothing is written for them, whether the batch
    counts them (a captured graph's batch) or not."""
    for layer, case in claimed(subject):
        padded_case = replace(case, padding_tokens=5, padding_reqs=3)
        run_and_judge(subject, layer, subject.inputs(layer, padded_case))
        inputs = subject.inputs(layer, padded_case)
        counted = replace(
            inputs,
            batch=inputs.batch.replace(num_actual_tokens=inputs.query.shape[0]),
            query=torch.nan_to_num(inputs.query),
        )
        cache = CacheWatch(counted)
        result = subject.run(layer, counted)
        cache.expect_only_new_tokens_written()
        judge(counted.sequences, result)


def new_tokens_are_seen_once(subject: Subject) -> None:
    """With equal scores and value j at key j, a decode averages all keys, its own included."""
    lens = (1, 2, 16, 17, 40)
    base = _base(subject, query_lens=(1,) * len(lens), seq_lens=lens)
    for layer, case in claimed(subject, base):
        masked = case.sliding_window is not None or case.chunk_pages is not None
        if case.alibi or case.sinks or masked or not case.causal:
            continue
        inputs = subject.inputs(layer, case)
        _expect_logical(inputs)
        inputs.query.zero_()
        inputs.value.copy_(
            torch.tensor([n - 1.0 for n in lens], dtype=case.dtype)[:, None, None].to(
                subject.device
            )
        )
        for request, n in enumerate(lens):
            for position in range(n - 1):
                block = int(inputs.batch.block_table_tensor[request, position // case.block_size])
                slot = inputs.kv_cache[block, :, position % case.block_size]
                slot[:, case.head_size :] = float(position)
        result = subject.run(layer, inputs)
        for request, n in enumerate(lens):
            _expect_close(result.out[request], (n - 1) / 2, f"the mean of keys 0 to {n - 1}")
            if result.lse is not None:
                _expect_close(result.lse[request], math.log(n), f"the LSE of {n} equal scores")


def plans_are_not_remembered(subject: Subject) -> None:
    """One layer and its builder serve batch after batch, large and small."""
    shapes = [((80,), (80,)), ((4,), (84,)), ((1, 3), (90, 3)), ((1,) * 9, tuple(range(1, 10)))]
    for layer, case in claimed(subject):
        for query_lens, seq_lens in [*shapes, *shapes[::-1]]:
            step = replace(case, query_lens=query_lens, seq_lens=seq_lens)
            run_and_judge(subject, layer, subject.inputs(layer, step))


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


def block_size_does_not_matter(subject: Subject) -> None:
    """An engine's page read as several kernel pages answers as the page itself."""
    smallest = subject.basis().block_size
    big = 4 * smallest
    base = _base(subject, block_size=big, query_lens=(1, 9), seq_lens=(200, 75))
    num_read = 0
    for small in (smallest, 2 * smallest):
        for layer, case in claimed(subject, base):
            try:
                chunk = case.chunk_pages and case.chunk_pages * (big // small)
                small_layer = subject.layer(replace(case, block_size=small, chunk_pages=chunk))
            except NotClaimed:
                continue
            inputs = subject.inputs(layer, case)
            _expect_logical(inputs)
            run_and_judge(subject, layer, inputs)
            split = smaller_pages(subject.inputs(layer, case), small)
            judge(inputs.sequences, subject.run(small_layer, split))
            num_read += 1
    if not num_read:
        raise NotClaimed(f"of the page sizes {smallest} to {big} no two are taken")


def parts_merge_by_their_lse(subject: Subject) -> None:
    """Attention over any partition of the keys, merged by LSE, is attention over all of them; only
    one part is given the sink."""
    refusals: list[NotClaimed] = []
    num_merged = 0
    page = subject.basis().block_size
    last_dtype = DTYPES[subject.basis().dtypes[-1]]
    for variant in ({}, {"sinks": True}, {"logits_soft_cap": 2.0}, {"dtype": last_dtype}):
        case = replace(
            _base(subject, query_lens=(1, 1), seq_lens=(3 * page, 4 * page)),
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


def causality_is_per_request(subject: Subject) -> None:
    """A batch whose `causal` is a tensor answers as separate batches with its entries; a window is
    two-sided exactly where a request is not causal."""
    for window in (None, 6):
        case = _base(subject, causal=(True, False, True, False), sliding_window=window)
        try:
            layer = subject.layer(case)
        except NotClaimed:
            if window is None:
                raise
            continue
        run_and_judge(subject, layer, subject.inputs(layer, case))
        for flag in (True, False):
            uniform = replace(case, causal=flag)
            run_and_judge(subject, layer, subject.inputs(layer, uniform))


def a_tree_is_its_paths(subject: Subject) -> None:
    """A token of a tree answers as the last of its path: the context, what it follows, itself. A tree
    that does not branch answers as a plain chunk."""
    base = _base(subject, tree=True)
    for layer, case in claimed(subject, base):
        inputs = subject.inputs(layer, case)
        tree, _ = run_and_judge(subject, layer, inputs)
        row = 0
        for request, whole in enumerate(inputs.sequences):
            context = len(whole.k) - len(whole.q)
            plain = replace(whole.meaning, parents=None)
            for token, _ in enumerate(case.parents_of(request)):
                path = _path(case.parents_of(request), token)
                keys = [*range(context), *(context + i for i in path)]
                one = replace(
                    whole, q=whole.q[path[-1:]], k=whole.k[keys], v=whole.v[keys], meaning=plain
                )
                rows = slice(row + token, row + token + 1)
                lse = None if tree.lse is None else tree.lse[rows]
                judge((one,), Result(out=tree.out[rows], lse=lse))
            row += len(whole.q)
        words = inputs.batch.tree_mask
        assert words is not None
        chains = [(2 << i) - 1 for n in case.query_lens for i in range(n)]
        again = subject.inputs(layer, case)
        batch = again.batch.replace(tree_mask=torch.tensor(chains, device=words.device))
        plain_sequences = tuple(
            replace(s, meaning=replace(s.meaning, parents=None, causal=True))
            for s in again.sequences
        )
        judge(plain_sequences, subject.run(layer, again, batch=batch))


def _path(parents: Sequence[int], token: int) -> list[int]:
    """What a token of a tree follows, first to last, and itself."""
    path = [token]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def strides_do_not_matter(subject: Subject) -> None:
    """q, k and v may be slices of one projection: rows further apart than they are long."""
    for layer, case in claimed(subject, coded=True):
        inputs = subject.inputs(layer, case)
        heads, kv_heads, size = case.num_heads, case.num_kv_heads, case.head_size
        fused = torch.full(
            (inputs.query.shape[0], heads + 2 * kv_heads + 1, size),
            math.nan,
            dtype=case.dtype,
            device=subject.device,
        )
        q, k, v, _ = fused.split([heads, kv_heads, kv_heads, 1], dim=1)
        strided = replace(
            inputs,
            query=q.copy_(inputs.query),
            key=k.copy_(inputs.key),
            value=v.copy_(inputs.value),
        )
        run_and_judge(subject, layer, strided)


def codes_of_outputs_are_those_of_numbers(subject: Subject) -> None:
    """A quantised output is what quantising the output gives, to the bit, in every format the impl says
    it writes; others are refused."""
    case = _base(subject, padding_tokens=2, padding_reqs=1, num_heads=16)
    layer = subject.layer(case)
    inputs = subject.inputs(layer, case)
    want, _ = run_and_judge(subject, layer, inputs)
    plan = subject.plan(layer, inputs, inputs.batch)
    num_rows, written = inputs.query.shape[0], case.num_tokens
    width = case.num_heads * layer.head_size_v
    for key in OUTPUT_KEYS:
        scale = None
        if key in (kFp8StaticTensorSym, kNvfp4Dynamic):
            scale = torch.full((), 0.03, device=subject.device)
        made, expected = (
            QuantizedOutput.empty(key, num_rows, width, scale=scale, device=subject.device)
            for _ in range(2)
        )
        step: Any = (inputs.query, inputs.key, inputs.value, inputs.kv_cache, plan)
        if not layer.impl.fused_output_quant_supported(key):  # type: ignore[attr-defined]
            _expect_refused(lambda step=step, made=made: layer(*step, quantized=made))
            continue
        layer(*step, quantized=made)
        expected.write(want.out)
        for name in ("codes", "block_scale"):
            got, right = (getattr(x, name) for x in (made, expected))
            if got is not None and not torch.equal(bits(got[:written]), bits(right[:written])):
                raise LawBroken(f"{name} of {key} are not those of the output ({case})")


def _expect_refused(call: Callable[[], object]) -> None:
    try:
        call()
    except UnsupportedConfiguration:
        return
    raise LawBroken("memory for codes was taken from an impl that says it writes none")


def lse_is_float32_per_token_and_head(subject: Subject) -> None:
    """What the impl itself returns: its output buffer, and an LSE of float32 (num_tokens, num_heads)."""
    for layer, case in claimed(subject):
        if not layer.return_lse:
            raise NotClaimed("the backend returns no LSE")
        assert isinstance(layer, Attention)
        inputs = subject.inputs(layer, case)
        subject.run(layer, inputs)  # The tokens are in the cache now.
        out = torch.empty_like(inputs.query[..., :1]).expand(-1, -1, layer.head_size_v).clone()
        returned = layer.impl.forward(
            layer,
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.kv_cache,
            subject.plan(layer, inputs, inputs.batch),
            out,
        )
        if not isinstance(returned, tuple):
            raise LawBroken("forward returned no LSE although need_to_return_lse_for_decode is set")
        shape, dtype = tuple(returned[1].shape), returned[1].dtype
        if shape != (case.num_tokens, case.num_heads) or dtype != torch.float32:
            raise LawBroken(
                f"the LSE is {dtype} {shape}, not float32 {(case.num_tokens, case.num_heads)}"
            )


def the_users_path_is_the_same(subject: Subject) -> None:
    """`make_batch` and a call of the layer give what the kit's own batch and buffers gave."""
    for layer, case in claimed(subject):
        if case.freed_window:
            continue
        by_kit = subject.inputs(layer, case)
        kit, _ = run_and_judge(subject, layer, by_kit)
        inputs = subject.inputs(layer, case)
        num_pages = [-(-s // case.block_size) for s in case.seq_lens]
        table = inputs.batch.block_table_tensor.tolist()
        batch = make_batch(
            case.query_lens,
            case.seq_lens,
            [row[:n] for row, n in zip(table, num_pages, strict=True)],
            case.block_size,
            device=subject.device,
            causal=inputs.batch.causal,
            mm_req_doc_ranges=inputs.batch.mm_req_doc_ranges,
            rswa_prefix_lens=_prefixes(case),
            tree_parents=_parents(case),
        )
        answer = layer(inputs.query, inputs.key, inputs.value, inputs.kv_cache, layer.build(batch))
        out, lse = answer if isinstance(answer, tuple) else (answer, None)
        _expect_same(Result(out=out, lse=lse), kit, case, "through Attention.forward")
        expect_same_bits(inputs.kv_cache, by_kit.kv_cache, "the cache after Attention.forward")


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


def profiling_writes_zeros(subject: Subject) -> None:
    """Without a plan a layer returns zeros and touches no cache."""
    for layer, case in claimed(subject):
        inputs = subject.inputs(layer, case)
        before = bits(inputs.kv_cache)
        with forward_context({}, {layer.cache_name: inputs.kv_cache}):
            answer = layer(inputs.query, inputs.key, inputs.value)
        out = answer[0] if isinstance(answer, tuple) else answer
        if bool((out != 0).any()):
            raise LawBroken("the output of a profiling run is not zero")
        result = torch.full_like(out, math.nan)
        assert isinstance(layer, Attention)
        if layer._passes_output:
            layer.impl.forward(
                layer,
                inputs.query,
                inputs.key,
                inputs.value,
                inputs.kv_cache,
                None,
                result,
            )
            if bool((result != 0).any()):
                raise LawBroken(
                    "the impl did not fill output with zeros when attn_metadata is None"
                )
        if not torch.equal(bits(inputs.kv_cache), before):
            raise LawBroken("a profiling run wrote to the cache")


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


def scales_of_what_is_not_quantised_do_not_matter(subject: Subject) -> None:
    """`_q_scale` belongs to queries that come as codes, `_prob_scale` to kernels that make codes of
    their weights: over queries that are numbers the answer is right whatever they are."""
    refusals: list[NotClaimed] = []
    for name in ("auto", "fp8"):
        case = _base(subject, kv_cache_dtype=name)
        try:
            layer = subject.layer(case)
        except NotClaimed as refusal:
            refusals.append(refusal)
            continue
        layer._q_scale.fill_(3.0)
        layer._prob_scale.fill_(1 / 448)
        layer.process_weights_after_loading(case.dtype)
        run_and_judge(subject, layer, subject.inputs(layer, case))
    if len(refusals) == 2:
        raise refusals[0]


def the_device_has_the_last_word_on_lengths(subject: Subject) -> None:
    """Where drafts are moved between requests on the device, its `query_start_loc` counts, not the
    host's: totals agree, rows may not."""
    if not subject.backend.supports_device_cpu_query_lens_mismatch():
        raise NotClaimed("the backend says supports_device_cpu_query_lens_mismatch = False")
    base = _base(subject, query_lens=(1, 4, 3, 4), seq_lens=(41, 36, 50, 19))
    for layer, case in claimed(subject, base):
        if case.mm_prefix:
            continue  # Ranges are of prompts, whose lengths both sides know.
        if case.chunk_pages is not None:
            continue  # Chunks are cut on the host.
        inputs = subject.inputs(layer, case)
        host = torch.tensor([0, 4, 8, 11, 12], dtype=torch.int32)
        bound = inputs.batch.seq_lens.cpu() + 3
        moved = inputs.batch.replace(
            query_start_loc_cpu=host,
            seq_lens_cpu_upper_bound=bound,
            max_seq_len=int(bound.max()),
            # More tokens than one were asked of every request, so none of them is a plain decode.
            is_prefilling=torch.zeros(case.num_reqs, dtype=torch.bool),
        )
        run_and_judge(subject, layer, replace(inputs, batch=moved))


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        pages_do_not_matter,
        unread_memory_does_not_matter,
        runs_are_repeatable,
        batch_mates_do_not_matter,
        order_of_requests_does_not_matter,
        splitting_a_prompt_does_not_matter,
        padding_does_not_matter,
        new_tokens_are_seen_once,
        plans_are_not_remembered,
        plan_follows_another_block_table,
        block_size_does_not_matter,
        parts_merge_by_their_lse,
        causality_is_per_request,
        a_tree_is_its_paths,
        strides_do_not_matter,
        lse_is_float32_per_token_and_head,
        codes_of_outputs_are_those_of_numbers,
        the_users_path_is_the_same,
        shared_cache_is_only_read,
        profiling_writes_zeros,
        unwritten_slots_stay,
        scales_of_what_is_not_quantised_do_not_matter,
        the_device_has_the_last_word_on_lengths,
        captured_steps_replay,
    )
}
"""Name -> law, in the order they are checked."""


def _prefixes(case: Case) -> list[int] | None:
    """`rswa_prefix_lens` for `make_batch`."""
    return [case.prefix_of(r) for r in range(case.num_reqs)] if case.rswa else None


def _parents(case: Case) -> dict[int, tuple[int, ...]] | None:
    """`tree_parents` for `make_batch`."""
    if not case.tree:
        return None
    return {r: case.parents_of(r) for r in range(case.num_reqs) if case.parents_of(r)}


def _expect_logical(inputs: Inputs) -> None:
    if not inputs.is_logical:
        raise NotClaimed("the law writes into the cache, which has a shape of the backend's own")


def _expect_same(got: Result, want: Result, case: Case, when: str) -> None:
    expect_same_bits(got.out, want.out, f"the output {when} ({case})")
    if got.lse is not None and want.lse is not None:
        expect_same_bits(got.lse, want.lse, f"the LSE {when} ({case})")


def _expect_close(got: torch.Tensor, want: float, what: str) -> None:
    """Within a few roundings of the tensor's dtype: for answers known in closed form."""
    allowed = 4 * float(torch.finfo(got.dtype).eps) * max(1.0, abs(want))
    off = (got.double() - want).abs().nan_to_num(math.inf)
    if float(off.max()) > allowed:
        raise LawBroken(f"{what} is {got.flatten()[int(off.argmax())].item():.9g}, not {want:.9g}")


def _run_in_pieces(
    subject: Subject, layer: PagedLayer, inputs: Inputs, pieces: tuple[int, ...]
) -> None:
    """One prompt in several steps through `make_batch`, every step judged."""
    case, whole = inputs.case, inputs.sequences[0]
    num_pages = -(-case.seq_lens[0] // case.block_size)
    table = inputs.batch.block_table_tensor[0, :num_pages].tolist()
    done = 0
    for piece in pieces:
        rows = slice(done, done + piece)
        done = rows.stop
        ranges = [r for r in case.ranges_of(0) if r[1] < done]
        batch = make_batch(
            [piece],
            [done],
            [table],
            case.block_size,
            device=subject.device,
            mm_req_doc_ranges={0: ranges} if case.mm_prefix else None,
            rswa_prefix_lens=[min(done, case.prefix_of(0))] if case.rswa else None,
        )
        part = replace(
            inputs,
            query=inputs.query[rows],
            key=inputs.key[rows],
            value=inputs.value[rows],
            batch=batch,
        )
        seen = replace(whole, q=whole.q[rows], k=whole.k[:done], v=whole.v[:done])
        judge((seen,), subject.run(layer, part))
