"""Laws of batches: mates, order, pieces, padding and earlier batches do not matter.

In: a `Subject`. Out: as of any law.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from attnkit.batch import make_batch
from attnkit.conformance.checks import CacheWatch, expect_same_bits, judge, run_and_judge
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.laws.law import base_case, claimed, expect_logical, expect_same
from attnkit.conformance.parts import one_request
from attnkit.conformance.subject import LawBroken, NotClaimed, Result, Subject
from attnkit.paged_layer import PagedLayer


def runs_are_repeatable(subject: Subject) -> None:
    """The same step twice gives the same bits."""
    for layer, case in claimed(subject):
        first = subject.run(layer, subject.inputs(layer, case))
        for _ in range(3):
            again = subject.run(layer, subject.inputs(layer, case))
            expect_same(again, first, case, "on a second run")


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
                expect_same(alone, part, case, f"when request {request} is alone")


def order_of_requests_does_not_matter(subject: Subject) -> None:
    """Requests in another order, decodes last, between or first, answer the same."""
    lens = [(1, 49), (9, 25), (1, 16), (21, 21), (0, 0)]
    for order in ([0, 1, 2, 3, 4], [3, 4, 1, 2, 0], [4, 1, 0, 3, 2]):
        base = base_case(
            subject,
            query_lens=tuple(lens[i][0] for i in order),
            seq_lens=tuple(lens[i][1] for i in order),
        )
        for layer, case in claimed(subject, base):
            run_and_judge(subject, layer, subject.inputs(layer, case))


def splitting_a_prompt_does_not_matter(subject: Subject) -> None:
    """A prompt in pieces ends in the same cache bytes and answers as in one."""
    length = 45
    base = base_case(subject, query_lens=(length,), seq_lens=(length,))
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
    if subject.backend.own_score is not None:
        raise NotClaimed("the backend has a score of its own, so equal ones need not stay equal")
    lens = (1, 2, 16, 17, 40)
    base = base_case(subject, query_lens=(1,) * len(lens), seq_lens=lens)
    for layer, case in claimed(subject, base):
        masked = case.sliding_window is not None or case.chunk_pages is not None
        if case.alibi or case.sinks or masked or not case.causal:
            continue
        inputs = subject.inputs(layer, case)
        expect_logical(inputs)
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


def causality_is_per_request(subject: Subject) -> None:
    """A batch whose `causal` is a tensor answers as separate batches with its entries; a window is
    two-sided exactly where a request is not causal."""
    for window in (None, 6):
        case = base_case(subject, causal=(True, False, True, False), sliding_window=window)
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


def the_device_has_the_last_word_on_lengths(subject: Subject) -> None:
    """Where drafts are moved between requests on the device, its `query_start_loc` counts, not the
    host's: totals agree, rows may not."""
    if not subject.backend.supports_device_cpu_query_lens_mismatch():
        raise NotClaimed("the backend says supports_device_cpu_query_lens_mismatch = False")
    base = base_case(subject, query_lens=(1, 4, 3, 4), seq_lens=(41, 36, 50, 19))
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
