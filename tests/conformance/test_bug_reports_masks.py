"""Public bug reports, replayed: ranges that are seen in both directions, chunks.

Each test is named by its report in the list of replays (BR-nnn) and by the law that was broken, and
runs on every backend that can run here. The oracle judges every run (`replay`); numbers in a test
are answers worked out by hand. A backend that refuses the feature by name has answered.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from replays import InputsOf, Replay, probe, seen_keys

from attnkit.batch import make_batch
from attnkit.conformance.case import Case
from attnkit.conformance.checks import bits, judge
from attnkit.conformance.sequences import WholeSequence
from attnkit.conformance.subject import Subject
from attnkit.errors import BatchError

IMAGES = Case(
    name="br106",
    query_lens=(8,),
    seq_lens=(8,),
    head_size=8,
    return_lse=True,
    mm_prefix=True,
    mm_ranges=(((1, 3), (5, 6)),),
)


@pytest.mark.parametrize("context", [0, 4], ids=["prompt", "cached_between_the_images"])
def test_br106_tokens_see_their_own_image_and_no_later_one(replay: Replay, context: int) -> None:
    case = replace(IMAGES, query_lens=(8 - context,))
    seen = seen_keys(replay(case, probe(case)).out)
    right = [{0}, {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    right += [set(range(5)), set(range(7)), set(range(7)), set(range(8))]
    assert seen == right[context:]


CUT = replace(
    IMAGES,
    name="br108",
    query_lens=(12,),
    seq_lens=(12,),
    head_size=16,
    mm_ranges=(((4, 9),),),
)


@pytest.mark.parametrize(("window", "right"), [(None, range(10)), (4, range(1, 10))])
@pytest.mark.parametrize("pieces", [(12,), (4, 8), (10, 2)], ids=str)
def test_br108_an_image_computed_in_one_piece_is_seen_whole(
    subject: Subject,
    inputs_of: InputsOf,
    pieces: tuple[int, ...],
    window: int | None,
    right: range,
) -> None:
    case = replace(CUT, sliding_window=window)
    layer, inputs = inputs_of(case, probe(case))
    whole, table = inputs.sequences[0], inputs.batch.block_table_tensor.tolist()
    outs, done = [], 0
    for piece in pieces:
        rows = slice(done, done + piece)
        done = rows.stop
        ranges = {0: [r for r in case.ranges_of(0) if r[1] < done]}
        batch = make_batch(
            [piece], [done], table, 16, device=subject.device, mm_req_doc_ranges=ranges
        )
        part = replace(
            inputs,
            query=inputs.query[rows],
            key=inputs.key[rows],
            value=inputs.value[rows],
            batch=batch,
        )
        result = subject.run(layer, part)
        sequence = WholeSequence(
            q=whole.q[rows], k=whole.k[:done], v=whole.v[:done], meaning=whole.meaning
        )
        judge((sequence,), result)
        outs.append(result.out.cpu())
    assert seen_keys(torch.cat(outs)[4:5]) == [set(right)]


def test_br108_an_image_cut_by_a_chunk_is_refused(subject: Subject, inputs_of: InputsOf) -> None:
    layer, inputs = inputs_of(CUT, probe(CUT))
    before = bits(inputs.kv_cache)
    table = inputs.batch.block_table_tensor.tolist()
    with pytest.raises(BatchError, match=r"\(4, 9\) is not inside the request's 7 tokens"):
        make_batch([7], [7], table, 16, mm_req_doc_ranges={0: [(4, 9)]})
    batch = make_batch([7], [7], table, 16, device=subject.device)
    batch = batch.replace(mm_req_doc_ranges={0: [(4, 9)]})
    for build in (layer.build, lambda batch: layer.make_builder().build(0, batch)):
        with pytest.raises(BatchError, match=r"\(4, 9\) is not inside the request's 7 tokens"):
            build(batch)
    assert torch.equal(bits(inputs.kv_cache), before)


# Chunked local attention.


@pytest.mark.parametrize(
    ("length", "right"), [(4, {0, 1, 2, 3}), (5, {4}), (8, {4, 5, 6, 7})], ids=str
)
def test_br099_position_4_begins_a_chunk_of_4(replay: Replay, length: int, right: set[int]) -> None:
    case = Case(name="br099", query_lens=(1,), seq_lens=(length,), block_size=2, chunk_pages=2)
    assert seen_keys(replay(case, probe(case)).out) == [right]


@pytest.mark.parametrize("pieces", [(6, *(1,) * 7), (3, 5, 5), (13,)], ids=str)
def test_br101_chunks_begin_at_absolute_positions(
    subject: Subject, inputs_of: InputsOf, pieces: tuple[int, ...]
) -> None:
    case = Case(
        name="br101",
        query_lens=(13,),
        seq_lens=(13,),
        block_size=4,
        head_size=16,
        chunk_pages=1,
    )
    layer, inputs = inputs_of(case, probe(case))
    table = inputs.batch.block_table_tensor.tolist()
    outs, done = [], 0
    for piece in pieces:
        rows = slice(done, done + piece)
        done = rows.stop
        part = replace(
            inputs,
            query=inputs.query[rows],
            key=inputs.key[rows],
            value=inputs.value[rows],
            batch=make_batch([piece], [done], table, 4, device=subject.device),
        )
        outs.append(subject.run(layer, part).out.cpu())
    seen = seen_keys(torch.cat(outs))
    assert seen == [set(range(p // 4 * 4, p + 1)) for p in range(13)]
