"""Random schedules: whatever arrives, is cancelled or preempted, tokens are right and no page leaks."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from paged_model import PagedModel, generate, make_request, make_scheduler

from attnkit.kvcache.blocks import NULL_BLOCK
from attnkit.kvcache.retention import Retention
from attnkit.kvcache.tables import TokenRange
from attnkit.runner.request import FinishReason, Request, RequestStatus
from attnkit.runner.scheduled import SchedulerOutput
from attnkit.runner.scheduler import Scheduler

GROUPS = st.sampled_from(
    [
        (Retention(block_size=4),),
        (Retention(block_size=1),),
        (Retention(block_size=4, sliding_window=7),),
        (Retention(block_size=4), Retention(block_size=4, sliding_window=6)),
        (Retention(block_size=8), Retention(block_size=4, sliding_window=1)),
        (Retention(block_size=4), Retention(block_size=4, attention_chunk_size=8)),
        (
            Retention(block_size=2, sliding_window=3),
            Retention(block_size=4, sliding_window=11),
            Retention(block_size=4, attention_chunk_size=6),
        ),
    ]
)


def check_step(scheduler: Scheduler, output: SchedulerOutput, live: list[Request]) -> None:
    """What holds between schedule and commit."""
    pool = scheduler.manager.pool
    held: Counter[int] = Counter()
    for request in live:
        if request.blocks is None:
            continue
        held.update(b for t in request.blocks.tables for b in t if b != NULL_BLOCK)
        bound = scheduler.manager.max_blocks(request.num_tokens, scheduler.max_chunk_tokens)
        assert scheduler.manager.num_held(request.blocks) <= bound
    assert [pool.num_refs(b) for b in range(1, pool.num_blocks)] == [
        held[b] for b in range(1, pool.num_blocks)
    ]
    assert pool.num_used == len(held)
    assert output.num_tokens == sum(i.num_new_tokens for i in output.scheduled)
    assert output.num_tokens <= scheduler.max_num_batched_tokens
    num_running = sum(request.status is RequestStatus.RUNNING for request in live)
    assert len(output.scheduled) <= num_running <= scheduler.max_num_seqs
    assert all(1 <= i.num_new_tokens <= scheduler.max_chunk_tokens for i in output.scheduled)
    for item in output.scheduled:
        start = item.request.num_computed_tokens
        for cut in (start, start + item.num_new_tokens):
            assert not any(r.first < cut <= r.last for r in item.request.ranges), "a range is split"
    assert output.scheduled, "all requests fit, so each step gets somewhere"
    assert len({i.request.request_id for i in output.scheduled}) == len(output.scheduled)
    if scheduler.reorder_batch_threshold is not None:
        fresh = [i.request.num_computed_tokens == 0 for i in output.scheduled]
        assert fresh == sorted(fresh)


def some_ranges(rng: random.Random, token_ids: list[int], longest: int) -> list[TokenRange]:
    """Where images might stand: at places that many requests have in common."""
    ranges, end = [], rng.choice([0, 2, 7])
    while (first := end) < len(token_ids) and rng.random() < 0.6:
        last = min(first + rng.randrange(longest), len(token_ids) - 1)
        key = (tuple(token_ids[first : last + 1]), rng.choice(["cat", "dog"]))
        ranges.append(TokenRange(first, last, key))
        end = last + rng.choice([1, 4])
    return ranges


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups=GROUPS,
    enable_prefix_caching=st.booleans(),
    max_num_batched_tokens=st.sampled_from([4, 7, 16, 64]),
    max_chunk_tokens=st.sampled_from([None, 3, 7]),
    max_num_seqs=st.integers(1, 4).map(lambda n: 5 - n),
    spare_blocks=st.integers(0, 9),
    threshold=st.sampled_from([None, 1, 4]),
    num_requests=st.integers(1, 10).map(lambda n: 11 - n),
    has_ranges=st.booleans(),
)
def test_random_schedules_give_right_tokens_and_leak_no_page(
    seed,
    groups,
    enable_prefix_caching,
    max_num_batched_tokens,
    max_chunk_tokens,
    max_num_seqs,
    spare_blocks,
    threshold,
    num_requests,
    has_ranges,
):
    rng = random.Random(seed)
    # Some schedules are one family, so that prefixes are shared, and caches worth evicting.
    families = [[rng.randrange(1000) for _ in range(30)] for _ in range(rng.randint(1, 2))]
    chunk = min(max_chunk_tokens or max_num_batched_tokens, max_num_batched_tokens)
    arriving = []
    for i in range(num_requests):
        shared = rng.choice(families)[: rng.choice([0, 5, 16, 30])]
        own = [rng.randrange(1000) for _ in range(rng.randint(1, 12))]
        prompt = shared + own if rng.random() < 0.8 else (shared or own)
        arriving.append(
            make_request(
                str(i),
                prompt,
                rng.randint(1, 24),
                extra_keys=rng.choice([(), (), (), ("adapter",)]),
                priority=rng.choice([0, 0, 0, 1]),
                ignore_eos=rng.random() < 0.5,
                ranges=some_ranges(rng, prompt, chunk) if has_ranges else (),
            )
        )
    # The largest request just fits, and a few blocks are to spare.
    needed = max(sum(g.max_blocks(r.max_computed_tokens, chunk) for g in groups) for r in arriving)
    scheduler = make_scheduler(
        num_blocks=1 + needed + spare_blocks,
        retentions=groups,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_chunk_tokens=max_chunk_tokens,
        reorder_batch_threshold=threshold,
    )
    model = PagedModel(scheduler.manager)
    requests = list(arriving)
    cancelled = set()

    def cancel_someone(probability: float) -> None:
        if rng.random() < probability:
            request = rng.choice(requests)
            if scheduler.finish(request.request_id):
                cancelled.add(request.request_id)

    while arriving or scheduler.has_work:
        while arriving and (rng.random() < 0.4 or not scheduler.has_work):
            scheduler.add(arriving.pop(0))
        cancel_someone(0.03)
        if not scheduler.has_work:
            continue
        output = scheduler.schedule()
        check_step(scheduler, output, requests)
        cancel_someone(0.03)
        sampled = model.run(output)
        cancel_someone(0.03)
        if rng.random() < 0.05:
            scheduler.discard(output)
        else:
            scheduler.commit(output, sampled)

    pool = scheduler.manager.pool
    assert pool.num_used == 0
    assert all(pool.num_refs(b) == 0 for b in range(1, pool.num_blocks))
    for request in requests:
        right = generate(request)
        if request.request_id in cancelled:
            assert request.finish_reason is FinishReason.ABORT
            assert request.output_token_ids == right[: request.num_output_tokens]
        else:
            assert request.output_token_ids == right
            assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if not enable_prefix_caching:
        assert scheduler.manager.num_hit_tokens == pool.num_cached == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_adding_a_request_never_changes_anothers_tokens(seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(9) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    alone = {}
    for i, token_ids in enumerate(prompts):
        alone[str(i)] = generate(make_request(str(i), token_ids, 8))
    scheduler = make_scheduler(num_blocks=14, max_num_batched_tokens=16, max_num_seqs=4)
    model = PagedModel(scheduler.manager)
    order = list(range(5))
    rng.shuffle(order)
    requests = [make_request(str(i), prompts[i], 8) for i in order]
    for request in requests:
        scheduler.add(request)
        output = scheduler.schedule()
        scheduler.commit(output, model.run(output))
    while scheduler.has_work:
        output = scheduler.schedule()
        scheduler.commit(output, model.run(output))
    assert {r.request_id: r.output_token_ids for r in requests} == alone
