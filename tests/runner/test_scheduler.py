"""Laws of the scheduler, case by case: order, budget, sharing, preemption, refusals, cancelling."""

from __future__ import annotations

import pytest
from paged_model import (
    EOS,
    PagedModel,
    generate,
    histories,
    make_request,
    make_scheduler,
    run_all,
)

from attnkit.errors import ConfigurationError, OutOfPages, RequestError
from attnkit.kvcache.retention import Retention
from attnkit.kvcache.tables import TokenRange
from attnkit.runner.request import FinishReason, Request, RequestStatus
from attnkit.runner.scheduled import SchedulerOutput
from attnkit.runner.scheduler import Scheduler

WINDOW = Retention(block_size=4, sliding_window=8)
FULL = Retention(block_size=4)


def prompt(seed: int, length: int) -> list[int]:
    """Different tokens for different seeds, in all blocks."""
    return [(seed * 7919 + i * 31) % 1000 for i in range(length)]


def step(scheduler: Scheduler, model: PagedModel) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.commit(output, model.run(output))
    return output


def planned(output: SchedulerOutput) -> list[tuple[str, int]]:
    return [(item.request.request_id, item.num_new_tokens) for item in output.scheduled]


def start(*requests: Request, **settings) -> tuple[Scheduler, PagedModel]:
    scheduler = make_scheduler(**settings)
    for request in requests:
        scheduler.add(request)
    return scheduler, PagedModel(scheduler.manager)


def test_decodes_come_first_then_begun_prompts_then_waiting_ones():
    a, b, c = (make_request(n, prompt(i, 20)) for i, n in enumerate("abc"))
    scheduler, model = start(a, max_num_batched_tokens=24)
    step(scheduler, model)
    scheduler.add(b)
    scheduler.add(c)
    assert planned(step(scheduler, model)) == [("a", 1), ("b", 20), ("c", 3)]
    scheduler.add(make_request("d", prompt(4, 30)))
    assert planned(step(scheduler, model)) == [("a", 1), ("b", 1), ("c", 17), ("d", 5)]
    assert planned(step(scheduler, model)) == [("a", 1), ("b", 1), ("c", 1), ("d", 21)]


def test_chunks_keep_the_budget_and_the_chunk_limit():
    requests = [make_request(n, prompt(i, 30)) for i, n in enumerate("ab")]
    scheduler, model = start(*requests, max_num_batched_tokens=20, max_chunk_tokens=12)
    assert planned(step(scheduler, model)) == [("a", 12), ("b", 8)]
    assert planned(step(scheduler, model)) == [("a", 12), ("b", 8)]
    assert planned(step(scheduler, model)) == [("a", 6), ("b", 12)]
    assert planned(step(scheduler, model)) == [("a", 1), ("b", 2)]


def test_only_a_chunk_that_ends_the_known_tokens_samples():
    request = make_request("a", prompt(1, 21), max_tokens=2)
    scheduler, model = start(request, max_chunk_tokens=10)
    samples = [o.scheduled[0].samples for o in run_all(scheduler, model)]
    assert samples == [False, False, True, True]
    assert request.output_token_ids == generate(request)


def test_no_more_requests_run_than_allowed():
    requests = [make_request(str(i), prompt(i, 5), max_tokens=3 + i) for i in range(6)]
    scheduler, model = start(*requests, max_num_seqs=2)
    outputs = run_all(scheduler, model)
    assert max(len(o.scheduled) for o in outputs) == 2
    assert all(r.output_token_ids == generate(r) for r in requests)


def test_lower_priority_values_run_first():
    late = make_request("late", prompt(1, 5), priority=-1)
    scheduler, model = start(make_request("early", prompt(2, 5)), late, max_num_seqs=1)
    assert planned(step(scheduler, model)) == [("late", 5)]


def test_a_family_with_one_prefix_computes_it_once():
    shared = prompt(0, 1000)
    family = [make_request(str(i), shared + prompt(i + 1, 17)) for i in range(6)]
    scheduler, model = start(
        *family,
        retentions=[Retention(block_size=16)],
        num_blocks=200,
        max_model_len=1100,
        max_num_batched_tokens=512,
    )
    run_all(scheduler, model)
    # 62 whole blocks are shared; the tokens behind them are each request's own work.
    whole = 1000 // 16 * 16
    assert all(model.num_computed[h] == 1 for h in histories(shared)[:whole])
    assert [r.num_cached_tokens for r in family] == [0] + [whole] * 5
    assert scheduler.manager.num_queried_tokens == 6 * 1017
    assert scheduler.manager.num_hit_tokens == 5 * whole
    assert all(r.output_token_ids == generate(r) for r in family)
    assert scheduler.manager.pool.num_used == 0


def test_a_request_that_waits_for_a_shared_prefix_does_not_hold_up_others():
    shared = prompt(0, 40)
    scheduler, model = start(
        make_request("a", [*shared, 1]),
        make_request("b", [*shared, 2]),
        make_request("c", prompt(3, 6)),
        max_num_batched_tokens=30,
    )
    assert planned(step(scheduler, model)) == [("a", 30)]
    assert planned(step(scheduler, model)) == [("a", 11), ("c", 6)]
    assert planned(step(scheduler, model)) == [("a", 1), ("c", 1), ("b", 1)]


def test_a_request_whose_leader_is_cancelled_computes_the_prefix_itself():
    shared = prompt(0, 40)
    a, b = make_request("a", [*shared, 1]), make_request("b", [*shared, 2])
    scheduler, model = start(a, b, max_num_batched_tokens=10)
    step(scheduler, model)
    scheduler.finish("a")
    assert planned(step(scheduler, model)) == [("b", 10)]
    run_all(scheduler, model)
    assert b.num_cached_tokens == 8
    assert b.output_token_ids == generate(b)


@pytest.mark.parametrize("length", [15, 16, 32, 33])
def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token(length):
    """Twice one after the other, then twice at once: same tokens, no holds left."""
    scheduler, model = start(retentions=[Retention(block_size=16)])
    first, second, third, fourth = (make_request(n, prompt(1, length)) for n in "abcd")
    for batch in ([first], [second], [third, fourth]):
        for request in batch:
            scheduler.add(request)
        run_all(scheduler, model)
    for request in (second, third, fourth):
        assert request.num_cached_tokens == (length - 1) // 16 * 16
        assert request.output_token_ids == first.output_token_ids == generate(first)
    assert scheduler.manager.pool.num_used == 0


def test_a_prefix_is_not_reused_when_a_window_group_has_lost_it():
    token_ids = prompt(1, 24)
    scheduler, model = start(retentions=[FULL, WINDOW], num_blocks=40)
    for name in "ab":
        request = make_request(name, token_ids, max_tokens=8)
        scheduler.add(request)
        run_all(scheduler, model)
        assert request.output_token_ids == generate(request)


def test_an_evicted_prompt_is_computed_again():
    x, y = prompt(1, 14), prompt(2, 14)
    scheduler, model = start(num_blocks=5)
    changed = [x[0] + 1, *x[1:]]
    hits = []
    for name, token_ids in (("x", x), ("y", y), ("again", x), ("changed", changed)):
        request = make_request(name, token_ids, max_tokens=2)
        scheduler.add(request)
        run_all(scheduler, model)
        hits.append(request.num_cached_tokens)
        assert request.output_token_ids == generate(request)
    assert hits == [0, 0, 0, 0]


def test_extra_keys_keep_requests_apart():
    a = make_request("a", prompt(1, 20))
    b = make_request("b", prompt(1, 20), extra_keys=("adapter",))
    scheduler, model = start(a, b)
    run_all(scheduler, model)
    assert b.num_cached_tokens == 0
    assert a.output_token_ids == generate(a) != generate(b) == b.output_token_ids


def test_the_latest_is_preempted_and_resumes_to_the_same_tokens():
    requests = [make_request(n, prompt(i, 12), max_tokens=20) for i, n in enumerate("abc")]
    # Two grow to 8 blocks each; three prompts need 9.
    scheduler, model = start(*requests, num_blocks=1 + 12)
    preempted = [i for o in run_all(scheduler, model) for i in o.preempted_ids]
    assert preempted
    assert preempted[0] == "c"
    assert "a" not in preempted
    assert [r.num_preemptions > 0 for r in requests][0::2] == [False, True]
    assert all(r.output_token_ids == generate(r) for r in requests)
    assert scheduler.manager.pool.num_used == 0


def test_a_preempted_request_finds_its_pages_again_while_they_last():
    a, b = (make_request(n, prompt(i, 12), max_tokens=12) for i, n in enumerate("ab"))
    scheduler, model = start(a, b, num_blocks=1 + 10)
    run_all(scheduler, model)
    assert b.num_preemptions == 1
    known = histories(b.token_ids)
    # The block it lost first was partly filled; the whole ones before it were found again.
    assert all(model.num_computed[h] == 1 for h in known[:8])
    assert b.num_cached_tokens == 0, "only the first admission counts"


def test_preemption_returns_the_tokens_planned_for_the_victim():
    """An earlier prompt takes the blocks of a later decode already in the step."""
    a, b = make_request("a", prompt(1, 16), max_tokens=2), make_request("b", prompt(2, 7))
    scheduler, model = start(a, b, num_blocks=1 + 5, max_chunk_tokens=7)
    assert planned(step(scheduler, model)) == [("a", 7), ("b", 7)]
    # The decode of b is planned first, but a, which came before it, needs two blocks and one is free.
    output = step(scheduler, model)
    assert output.preempted_ids == ("b",)
    assert planned(output) == [("a", 7)]
    assert output.num_tokens == 7
    assert (b.status, b.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    assert b.blocks is not None
    assert scheduler.manager.num_held(b.blocks) == 0
    run_all(scheduler, model)
    assert [r.output_token_ids for r in (a, b)] == [generate(a), generate(b)]


def test_a_request_alone_without_pages_fails_alone():
    scheduler, model = start(num_blocks=1 + 10)
    foreign = scheduler.manager.pool.allocate(6)
    big = make_request("big", prompt(1, 10), max_tokens=20)
    small = make_request("small", prompt(2, 6), max_tokens=3)
    for request in (big, small):
        scheduler.add(request)
    outputs = run_all(scheduler, model)
    assert big.finish_reason is FinishReason.ERROR
    assert isinstance(big.error, OutOfPages)
    assert "request big runs alone and needs 1 blocks, but 0 of 10 are free" in str(big.error)
    assert big.output_token_ids == generate(big)[: big.num_output_tokens]
    assert small.output_token_ids == generate(small)
    assert any("big" in o.finished_ids for o in outputs)
    assert scheduler.manager.pool.num_used == len(foreign)


def test_a_waiting_request_that_can_never_start_fails_and_the_next_one_runs():
    scheduler, model = start(num_blocks=1 + 10)
    scheduler.manager.pool.allocate(7)
    big, small = make_request("big", prompt(1, 20)), make_request("small", prompt(2, 6))
    for request in (big, small):
        scheduler.add(request)
    run_all(scheduler, model)
    assert "request big" in str(big.error)
    assert "needs 5 blocks, but 3 of 10 are free" in str(big.error)
    assert small.output_token_ids == generate(small)


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (64, 1, r"prompt has 64 tokens.*takes 64; shorten it to 63"),
        (60, 5, r"60 prompt tokens and max_tokens 5 exceed the model's 64.*lower max_tokens to 4"),
        (30, 12, r"need 11 blocks, but the pool has 10"),
    ],
)
def test_what_can_never_fit_is_refused_and_changes_nothing(length, max_tokens, message):
    scheduler = make_scheduler(max_model_len=64, num_blocks=1 + 10)
    with pytest.raises(RequestError, match=message):
        scheduler.add(make_request("a", prompt(1, length), max_tokens))
    assert not scheduler.has_work
    assert scheduler.manager.pool.num_used == 0


def test_what_just_fits_runs_to_its_end():
    request = make_request("a", prompt(1, 30), 11)
    scheduler, model = start(request, max_model_len=41, num_blocks=1 + 10)
    run_all(scheduler, model)
    assert request.output_token_ids == generate(request)


def test_an_id_in_use_is_refused_and_one_finished_is_free_again():
    a = make_request("a", prompt(1, 5))
    scheduler, model = start(a)
    with pytest.raises(RequestError, match="request a exists"):
        scheduler.add(make_request("a", prompt(2, 5)))
    run_all(scheduler, model)
    with pytest.raises(RequestError, match="make a new Request"):
        scheduler.add(a)
    scheduler.add(make_request("a", prompt(2, 5)))


@pytest.mark.parametrize("bad", [[], [3, -1], [3, 1.5], ["3"]])
def test_prompts_that_are_not_token_ids_are_refused(bad):
    with pytest.raises(RequestError, match="request a: "):
        make_request("a", bad)


def test_end_tokens_and_stop_tokens_end_the_output():
    plain = make_request("a", prompt(3, 9), max_tokens=150)
    tokens = generate(plain)
    assert EOS in tokens
    eos = make_request("eos", prompt(3, 9), max_tokens=150, ignore_eos=False)
    stop = make_request("stop", prompt(3, 9), max_tokens=150, stop_token_ids=[tokens[2]])
    scheduler, model = start(plain, eos, stop, num_blocks=200)
    run_all(scheduler, model)
    assert plain.output_token_ids == tokens
    assert plain.finish_reason is FinishReason.LENGTH
    assert eos.output_token_ids == tokens[: tokens.index(EOS) + 1]
    assert stop.output_token_ids == tokens[: tokens.index(tokens[2]) + 1]
    assert eos.finish_reason is stop.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("when", ["waiting", "running", "in flight", "preempted"])
def test_a_request_is_cancelled_at_any_time_and_the_others_go_on(when):
    a, b = (make_request(n, prompt(i, 12), max_tokens=12) for i, n in enumerate("ab"))
    tight = {"num_blocks": 1 + 10}
    scheduler, model = start(a, b, max_num_seqs=1 if when == "waiting" else 2, **tight)
    step(scheduler, model)
    while when == "preempted" and b.status is not RequestStatus.PREEMPTED:
        step(scheduler, model)
    output = scheduler.schedule()
    sampled = model.run(output) if when != "in flight" else None
    if when != "in flight":
        scheduler.commit(output, sampled or {})
    assert scheduler.finish("b")
    assert not scheduler.finish("b")
    if when == "in flight":
        # Its pages stay its own until the step has landed.
        scheduler.commit(output, model.run(output))
    assert b.finish_reason is FinishReason.ABORT
    assert "b" in scheduler.schedule().finished_ids
    scheduler.discard(scheduler._in_flight[-1])
    run_all(scheduler, model)
    assert a.output_token_ids == generate(a)
    assert b.output_token_ids == generate(b)[: b.num_output_tokens]
    assert scheduler.manager.pool.num_used == 0


def test_finish_of_an_unknown_request_does_nothing():
    assert not make_scheduler().finish("nobody")


def test_a_discarded_step_is_scheduled_again():
    a, b = make_request("a", prompt(1, 20)), make_request("b", prompt(2, 20))
    scheduler, model = start(a, b, max_num_batched_tokens=30)
    lost = scheduler.schedule()
    model.run(lost)
    scheduler.discard(lost)
    assert planned(step(scheduler, model)) == planned(lost)
    run_all(scheduler, model)
    assert [r.output_token_ids for r in (a, b)] == [generate(a), generate(b)]


def test_finished_ids_are_told_once():
    scheduler, model = start(make_request("a", prompt(1, 5), 1), make_request("b", prompt(2, 5), 3))
    outputs = run_all(scheduler, model)
    told = [i for o in [*outputs, scheduler.schedule()] for i in o.finished_ids]
    assert told == ["a", "b"]


@pytest.mark.parametrize("threshold", [None, 1, 4])
def test_batches_are_ordered_by_region(threshold):
    scheduler = make_scheduler(
        num_blocks=800, max_model_len=700, max_num_batched_tokens=1000, max_num_seqs=9
    )
    scheduler.reorder_batch_threshold = threshold
    # (new tokens, tokens with context before), all but the marked ones past their prompt.
    rows = [
        (1, 20),
        (1, 50),
        (374, 0),
        (300, 20),
        (1, 20),
        (256, 0),
        (1, 5),
        (27, 0),
        (1, 4),
        (3, 8),
    ]
    in_prompt = {4, 9}
    requests = {}
    for i, (num_new, num_computed) in enumerate(rows):
        request = make_request(str(i), prompt(i, num_computed + num_new))
        request.num_computed_tokens = num_computed
        if i not in in_prompt and num_computed:
            request.num_prompt_tokens = num_computed
        requests[request] = num_new
    items = scheduler._in_batch_order(requests)
    assert [i.num_new_tokens for i in items] == [rows[int(i.request.request_id)][0] for i in items]
    order = [int(i.request.request_id) for i in items]
    assert (
        order
        == {
            None: list(range(10)),
            1: [0, 1, 6, 8, 4, 3, 9, 2, 5, 7],
            4: [0, 1, 6, 8, 4, 9, 3, 2, 5, 7],
        }[threshold]
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0, "max_num_seqs": 1},
        {"max_model_len": -5},
        {"max_chunk_tokens": 0},
        {"max_num_batched_tokens": 7, "max_num_seqs": 8},
    ],
)
def test_impossible_bounds_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        make_scheduler(**wrong)


def test_several_tokens_of_one_step_are_taken_until_one_stops():
    request = make_request("a", prompt(1, 8), max_tokens=6, stop_token_ids=[3])
    scheduler, _ = start(request)
    output = scheduler.schedule()
    scheduler.commit(output, {"a": [5, 9]})
    assert request.num_computed_tokens == request.num_tokens - 1 == 9
    output = scheduler.schedule()
    assert scheduler.commit(output, {"a": [4, 3, 8]}) == (request,)
    assert request.output_token_ids == [5, 9, 4, 3]
    assert scheduler.manager.pool.num_used == 0


def ranges_of(token_ids: list[int], *spans: tuple[int, int]) -> list[TokenRange]:
    return [TokenRange(first, last, tuple(token_ids[first : last + 1])) for first, last in spans]


def test_a_range_is_computed_in_one_step_and_waits_for_room_that_nobody_else_takes():
    a, b = prompt(1, 20), prompt(2, 24)
    scheduler, model = start(
        make_request("a", a, ranges=ranges_of(a, (5, 9), (10, 19)), max_tokens=3),
        make_request("b", b, ranges=ranges_of(b, (0, 11)), max_tokens=2),
        make_request("c", prompt(3, 3)),
        max_num_batched_tokens=12,
    )
    steps = [planned(step(scheduler, model)) for _ in range(6)]
    # b's first range needs a whole step, so it waits until a has ended, and c behind it.
    assert steps == [[("a", 10)], [("a", 10)], [("a", 1)], [("a", 1)], [("b", 12)], [("b", 12)]]


def test_ranges_that_mean_nothing_or_exceed_a_step_are_refused_before_anything_happens():
    tokens = prompt(1, 20)
    for spans, message in (
        ([(3, 2)], r"range \(3, 2\) is reversed"),
        ([(-1, 2)], r"range \(-1, 2\) is not inside the prompt's 20 tokens"),
        ([(17, 20)], r"range \(17, 20\) is not inside the prompt's 20 tokens"),
        ([(4, 9), (0, 4)], r"range \(4, 9\) overlaps \(0, 4\)"),
    ):
        with pytest.raises(RequestError, match=message):
            make_request("a", tokens, ranges=ranges_of(tokens, *spans))
    scheduler, _ = start(max_num_batched_tokens=12)
    with pytest.raises(RequestError, match=r"tokens 2 to 14 see each other.*12 tokens at most"):
        scheduler.add(make_request("a", tokens, ranges=ranges_of(tokens, (2, 14))))
    assert not scheduler.has_work
