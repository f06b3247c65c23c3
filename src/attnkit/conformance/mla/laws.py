"""Laws of attention over latents: those of dense attention that fit, and its own.

In: an `MLASubject`. Out: as in `conformance.laws`. `MLA_LAWS` is the table.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attnkit.batch import make_batch
from attnkit.compiled import forward_context
from attnkit.conformance.checks import CacheWatch, bits, judge, run_and_judge
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.laws import Law, batches, calls, captured, pages
from attnkit.conformance.laws.law import claimed
from attnkit.conformance.mla.case import MLACase
from attnkit.conformance.mla.subject import MLASubject
from attnkit.conformance.sequences import WholeSequence
from attnkit.conformance.subject import LawBroken, NotClaimed, Result, Subject
from attnkit.kvcache.pool import PagedKVCache

_LENS = {"query_lens": (1, 2, 5, 18), "seq_lens": (49, 33, 5, 70)}
"""A decode, a verification, a prompt, a chunk."""


def absorbed_is_expanded(subject: Subject) -> None:
    """The same batch answers alike whether its requests count as decodes or as prefills."""
    for decode_query_len in (None, 1, 2, 5, 30):
        case = _base(subject, decode_query_len=decode_query_len)
        layer = subject.layer(case)
        run_and_judge(subject, layer, subject.inputs(layer, case))


def workspace_does_not_matter(subject: Subject) -> None:
    """Contexts that are expanded a page at a time, a few, or all at once answer alike."""
    for workspace_pages in (1, 2, 3, 7, 1000):
        case = _base(
            subject,
            query_lens=(3, 8, 4, 2),
            seq_lens=(3 + 80, 8, 4 + 33, 2 + 16),
            decode_query_len=1,
            workspace_pages=workspace_pages,
        )
        layer = subject.layer(case)
        run_and_judge(subject, layer, subject.inputs(layer, case))


def strides_do_not_matter(subject: Subject) -> None:
    """Latent and rotated part may be slices of one projection, heads of q of another."""
    for layer, case in claimed(subject, _base(subject)):
        assert isinstance(case, MLACase)
        inputs = subject.inputs(layer, case)
        rows, rank = inputs.key.shape[0], case.head_size
        fused = torch.full(
            (rows, 1, case.dimensions.latent_size + 3),
            math.nan,
            dtype=case.dtype,
            device=subject.device,
        )
        heads = inputs.query.new_full((rows, case.num_heads + 1, case.query_size + 5), math.nan)
        latent, rotated = fused[..., :rank], fused[..., rank : case.dimensions.latent_size]
        query = heads[:, : case.num_heads, : case.query_size]
        strided = replace(
            inputs,
            query=query.copy_(inputs.query),
            key=latent.copy_(inputs.key),
            value=rotated.copy_(inputs.value),
        )
        run_and_judge(subject, layer, strided)


def lse_is_float32_per_token_and_head(subject: Subject) -> None:
    """What the impl itself returns from both forwards: an LSE of float32 (num_tokens, num_heads)."""
    case = _base(subject, decode_query_len=2)
    assert isinstance(subject, MLASubject)
    layer = subject.layer(case)
    if not layer.return_lse:
        raise NotClaimed("the backend returns no LSE")
    inputs = subject.inputs(layer, case)
    plan = subject.plan(layer, inputs, inputs.batch)
    subject.run(layer, inputs, plan=plan)  # The tokens are in the cache now.
    d, cache = layer.dimensions, inputs.kv_cache[:, 0]
    split = plan.num_decode_tokens
    query = inputs.query.new_zeros(split, case.num_heads, d.latent_size)
    out, lse = layer.impl.forward_mqa(query, cache, plan, layer)  # type: ignore[arg-type]
    if out.shape != (split, case.num_heads, d.kv_lora_rank):
        raise LawBroken(f"forward_mqa gave an output of shape {tuple(out.shape)}")
    _expect_lse(lse, split, case, "forward_mqa")
    rest = slice(split, case.num_tokens)
    output = inputs.query.new_empty(case.num_tokens - split, case.num_heads * d.v_head_dim)
    lse = layer.impl.forward_mha(
        inputs.query[rest],
        inputs.key[rest, 0],
        inputs.value[rest],
        cache,
        plan,
        layer._k_scale,
        output,
    )
    _expect_lse(lse, case.num_tokens - split, case, "forward_mha")


def profiling_writes_zeros(subject: Subject) -> None:
    """Without a plan a layer returns zeros and touches no cache."""
    for layer, case in claimed(subject, _base(subject)):
        inputs = subject.inputs(layer, case)
        before = bits(inputs.kv_cache)
        with forward_context({}, {layer.cache_name: inputs.kv_cache}):
            answer = layer(inputs.query, inputs.key, inputs.value)
        out = answer[0] if isinstance(answer, tuple) else answer
        if bool((out != 0).any()):
            raise LawBroken("the output of a profiling run is not zero")
        if not torch.equal(bits(inputs.kv_cache), before):
            raise LawBroken("a profiling run wrote to the cache")


def unwritten_slots_stay(subject: Subject) -> None:
    """Slot -1 writes nothing, wherever in the batch it stands; a prefill sees this step's latents even
    so."""
    for layer, case in claimed(subject, _base(subject)):
        inputs = subject.inputs(layer, case)
        run_and_judge(subject, layer, inputs)  # The tokens are in the cache now.
        nowhere = torch.full_like(inputs.batch.slot_mapping, -1)
        again = replace(inputs, batch=inputs.batch.replace(slot_mapping=nowhere))
        cache = CacheWatch(again)
        judge(inputs.sequences, subject.run(layer, again))
        other = replace(again, key=again.key + 1, value=again.value - 1)
        subject.run(layer, other)
        cache.expect_only_new_tokens_written()


def the_device_has_the_last_word_on_lengths(subject: Subject) -> None:
    """Where drafts are moved between requests on the device, its `query_start_loc` counts, not the
    host's: totals agree, rows of decodes may not."""
    if not subject.backend.supports_device_cpu_query_lens_mismatch():
        raise NotClaimed("the backend says supports_device_cpu_query_lens_mismatch = False")
    lens = {"query_lens": (1, 4, 3, 4), "seq_lens": (41, 36, 50, 19)}
    for layer, case in claimed(subject, _base(subject, num_drafts=3, **lens)):
        if getattr(case, "decode_query_len", None) == 1:
            continue  # Lengths of prefills are the host's too.
        inputs = subject.inputs(layer, case)
        bound = inputs.batch.seq_lens.cpu() + 3
        moved = inputs.batch.replace(
            query_start_loc_cpu=torch.tensor([0, 4, 8, 11, 12], dtype=torch.int32),
            seq_lens_cpu_upper_bound=bound,
            max_seq_len=int(bound.max()),
            is_prefilling=torch.zeros(case.num_reqs, dtype=torch.bool),
        )
        run_and_judge(subject, layer, replace(inputs, batch=moved))


def padding_rows_are_zero(subject: Subject) -> None:
    """Rows that the batch counts and no request owns come out zero: an
    engine that looks at the whole output of a captured graph must not find NaN there."""
    for decode_query_len in (None,) if subject.backend.is_sparse() else (1, 30):
        case = _base(subject, decode_query_len=decode_query_len, padding_tokens=5, padding_reqs=3)
        layer = subject.layer(case)
        inputs = subject.inputs(layer, case)
        counted = replace(
            inputs,
            batch=inputs.batch.replace(num_actual_tokens=inputs.query.shape[0]),
            query=torch.nan_to_num(inputs.query),
        )
        result = subject.run(layer, counted)
        judge(counted.sequences, result)
        _expect_zero_padding(counted, result)


def lists_may_name_anything(subject: Subject) -> None:
    """-1 in any place, positions after the query, beyond the request and beyond any table name no key; a
    position named twice weighs twice; a list without a key gives zeros and an LSE of -inf. Nothing else
    is read: pages of nobody hold NaN."""
    assert isinstance(subject, MLASubject)
    if not subject.backend.is_sparse():
        raise NotClaimed("the backend attends to all keys")
    lens = {"query_lens": (1, 3, 2, 1), "seq_lens": (40, 23, 1, 9)}
    case = _base(subject, padding_tokens=1, padding_reqs=1, **lens)
    lists = torch.tensor(
        [
            [-1, -1, -1, -1, -1, -1],
            [0, -1, -1, -1, -1, -1],
            [-1, 22, 21, -1, 3, 16],
            [22, 22, 23, 2**31 - 1, 0, -(2**31)],
            [0, 0, 1, 5, -2, -1],
            [0, 0, 0, 0, 0, 0],
            [8, 1, 1, 1, 4, 1000],
            [0, 1, 2, 3, 4, 5],
        ],
        dtype=torch.int32,
        device=subject.device,
    )
    # Named ones far apart too, whatever a kernel looks at together.
    gap = torch.full_like(lists[:, :1], -1).expand(-1, 40)
    for told in (lists, torch.cat([lists[:, :2], gap, lists[:, 2:4], gap, lists[:, 4:]], dim=1)):
        layer = subject.layer(case, indexer=_Lists(told))
        inputs = subject.inputs(layer, case)
        plan = subject.plan(layer, inputs, inputs.batch)
        result = subject.run(layer, inputs, plan=plan)
        row = 0
        for sequence, length in zip(inputs.sequences, case.query_lens, strict=True):
            for i in range(length):
                position = len(sequence.k) - length + i
                named = [j for j in told[row].tolist() if 0 <= j <= position]
                _judge_alone(sequence, i, named, result, row)
                row += 1


def states_of_several_tokens(subject: Subject) -> None:
    """With `tokens_per_state` a query sees the states that are whole at its position, the one it
    completes included: prompts in chunks that end inside a state, decodes that complete one and that do
    not. Rows of tokens that complete none are NaN, and so are pages at first."""
    every, lens = 4, (21, 3, 38)
    case = _base(subject, query_lens=lens, seq_lens=lens)
    inputs = subject.inputs(subject.layer(case), case)
    block_size = every * case.block_size
    layer = subject.layer(case, tokens_per_state=every, block_size=block_size)
    name = layer.layer_name
    cache = PagedKVCache(
        {name: layer.get_kv_cache_spec()},  # type: ignore[dict-item]
        8,
        device=subject.device,
        layout=case.layout,
        backends={name: layer.backend},
        kv_cache_dtype=case.kv_cache_dtype,
        poison=True,
    )[name]
    position = torch.cat([torch.arange(n) for n in lens])
    in_between = (position % every != every - 1).to(subject.device)[:, None, None]
    num_rows = len(position)
    key = inputs.key[:num_rows].masked_fill(in_between, math.nan)
    value = inputs.value[:num_rows].masked_fill(in_between, math.nan)
    first_row, done = (0, 21, 24), [0, 0, 0]
    for ends in ((14, 3, 34), (20, 3, 37), (21, 3, 38)):
        query_lens = [end - begin for begin, end in zip(done, ends, strict=True)]
        rows = [
            row + i
            for row, begin, end in zip(first_row, done, ends, strict=True)
            for i in range(begin, end)
        ]
        tables = [[5, 1], [2, 4], [7, 3]]
        tables = [t[: -(-n // block_size)] for t, n in zip(tables, ends, strict=True)]
        step = replace(
            inputs,
            query=inputs.query[rows],
            key=key[rows],
            value=value[rows],
            kv_cache=cache,
            batch=make_batch(query_lens, ends, tables, block_size, device=subject.device),
        )
        result = subject.run(layer, step)
        for place, row in enumerate(rows):
            request = max(r for r in range(3) if first_row[r] <= row)
            sequence, i = inputs.sequences[request], row - first_row[request]
            whole = [every * j + every - 1 for j in range((i + 1) // every)]
            _judge_alone(sequence, i, whole, result, place)
        done = list(ends)


class _Lists:
    """An indexer that has been given its lists."""

    def __init__(self, lists: torch.Tensor) -> None:
        self.topk_indices_buffer = lists


def _judge_alone(
    sequence: WholeSequence, query: int, keys: list[int], result: Result, row: int
) -> None:
    """One query against what it sees, a key as often as it is named, none of them after it."""
    alone = replace(
        sequence,
        q=sequence.q[query : query + 1],
        k=sequence.k[keys],
        v=sequence.v[keys],
        meaning=replace(sequence.meaning, causal=False, told=None),
    )
    part = slice(row, row + 1)
    lse = None if result.lse is None else result.lse[part]
    judge((alone,), Result(out=result.out[part], lse=lse))


def _expect_zero_padding(inputs: Inputs, result: Result) -> None:
    padding = result.out[inputs.case.num_tokens :]
    if bool((padding != 0).any()):
        raise LawBroken("output rows of padding tokens that the batch counts are not zero")


def _expect_lse(lse: torch.Tensor | None, num_rows: int, case: MLACase, of: str) -> None:
    shape = (num_rows, case.num_heads)
    if lse is None or lse.shape != shape or lse.dtype != torch.float32:
        what = "none" if lse is None else f"{lse.dtype} {tuple(lse.shape)}"
        raise LawBroken(f"the LSE of {of} is {what}, not float32 {shape}")


def _base(subject: Subject, **fields: object) -> MLACase:
    lse = subject.basis().lse
    case = subject.plain_case("law", **{**_LENS, "return_lse": lse, **fields})
    assert isinstance(case, MLACase)
    return case


MLA_LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        pages.pages_do_not_matter,
        pages.unread_memory_does_not_matter,
        batches.runs_are_repeatable,
        batches.batch_mates_do_not_matter,
        batches.order_of_requests_does_not_matter,
        batches.splitting_a_prompt_does_not_matter,
        batches.padding_does_not_matter,
        batches.plans_are_not_remembered,
        pages.plan_follows_another_block_table,
        pages.block_size_does_not_matter,
        pages.parts_merge_by_their_lse,
        calls.the_users_path_is_the_same,
        unwritten_slots_stay,
        absorbed_is_expanded,
        workspace_does_not_matter,
        strides_do_not_matter,
        lse_is_float32_per_token_and_head,
        calls.codes_of_outputs_are_those_of_numbers,
        profiling_writes_zeros,
        the_device_has_the_last_word_on_lengths,
        padding_rows_are_zero,
        lists_may_name_anything,
        states_of_several_tokens,
        captured.captured_steps_replay,
    )
}
"""Name -> law, in the order they are checked."""
