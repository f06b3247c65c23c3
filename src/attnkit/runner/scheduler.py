"""Scheduler: which requests run now, and how many tokens of each.

In: requests, at any time; sampled tokens, after each step. Out: per step a `SchedulerOutput` whose
requests have the blocks they need. Host only: integers, no tensors.

One step: `output = schedule()`, the model runs, `commit(output, token_ids)`; or `discard(output)` where
the model did not run to its end. Meanwhile the next one may be chosen too (`schedule_ahead`), so that a
device need not wait for the host; steps are committed in their order.

Decodes come first, then prompts already begun, then waiting requests, each kind in order of priority and
arrival, until the token budget is spent. A prompt longer than what is left is computed in chunks, which
end before a range of tokens that see each other where they would cut it; a range that finds too little
room waits, and nothing behind it runs before it. When blocks run out, the request that came last gives
up all of its own and is computed again later.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Mapping, Sequence

from attnkit.errors import ConfigurationError, OutOfPages, RequestError
from attnkit.kvcache.tables import BlockManager, PrefixHit, RequestBlocks
from attnkit.runner.request import FinishReason, Request, RequestStatus
from attnkit.runner.scheduled import ScheduledRequest, SchedulerOutput


def check_budget(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Refuse steps in which not every running request could decode.

    Raises:
        ConfigurationError: fewer tokens than requests.
    """
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigurationError(
            f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs "
            f"{max_num_seqs}, so not every request could decode in each step; raise the first or "
            "lower the second"
        )


class Scheduler:
    """Continuous batching over one `BlockManager`.

    Attributes:
        manager: gives and takes blocks.
        max_num_batched_tokens: new tokens in one step.
        max_num_seqs: requests that run at once.
        max_model_len: longest prompt and output together.
        max_chunk_tokens: new tokens of one request in one step.
        reorder_batch_threshold: see `SchedulerOutput.scheduled`; None: no reordering.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_model_len: int,
        max_num_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
        max_chunk_tokens: int | None = None,
        reorder_batch_threshold: int | None = None,
    ) -> None:
        """An idle scheduler; `max_chunk_tokens` None: only the token budget bounds a chunk.

        Raises:
            ConfigurationError: a bound is below 1, or the token budget is below `max_num_seqs`, so
                that not every running request could decode.
        """
        if max_chunk_tokens is None:
            max_chunk_tokens = max_num_batched_tokens
        bounds = {
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "max_chunk_tokens": max_chunk_tokens,
        }
        for name, value in bounds.items():
            if value < 1:
                raise ConfigurationError(f"{name} {value} is not allowed; give at least 1")
        check_budget(max_num_seqs, max_num_batched_tokens)
        self.manager = manager
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_chunk_tokens = min(max_chunk_tokens, max_num_batched_tokens)
        self.reorder_batch_threshold = reorder_batch_threshold
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._arrivals = itertools.count()
        self._in_flight: list[SchedulerOutput] = []
        self._finished_ids: list[str] = []

    @property
    def has_work(self) -> bool:
        """Some request has not finished."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Take a request.

        Raises:
            RequestError: its id is in use, or it could never finish: prompt and max_tokens exceed the
                model's length or all blocks of the pool, or a range exceeds a step. Nothing was changed.
        """
        who = f"request {request.request_id}"
        if request.request_id in self._requests:
            raise RequestError(f"{who} exists and has not finished; give another id")
        if request.status is not RequestStatus.WAITING or request.blocks is not None:
            raise RequestError(f"{who} was added before; make a new Request")
        num_prompt, max_tokens = request.num_prompt_tokens, request.sampling_params.max_tokens
        if num_prompt >= self.max_model_len:
            raise RequestError(
                f"{who}: the prompt has {num_prompt} tokens, but with at least one generated token "
                f"the model takes {self.max_model_len}; shorten it to {self.max_model_len - 1} tokens"
            )
        if num_prompt + max_tokens > self.max_model_len:
            raise RequestError(
                f"{who}: {num_prompt} prompt tokens and max_tokens {max_tokens} exceed the model's "
                f"{self.max_model_len} tokens; lower max_tokens to {self.max_model_len - num_prompt} "
                "or shorten the prompt"
            )
        needed = self._most_blocks(request, request.max_computed_tokens)
        num_blocks = self.manager.pool.num_blocks - 1
        if needed > num_blocks:
            raise RequestError(
                f"{who}: {num_prompt} prompt tokens and max_tokens {max_tokens} need {needed} blocks, "
                f"but the pool has {num_blocks}; lower max_tokens, shorten the prompt, or give the "
                "cache more memory"
            )
        longest = max(request.ranges, key=lambda r: r.last - r.first, default=None)
        if longest is not None and longest.last - longest.first >= self.max_chunk_tokens:
            raise RequestError(
                f"{who}: tokens {longest.first} to {longest.last} see each other, so one step computes "
                f"them, and it has {self.max_chunk_tokens} tokens at most; raise max_num_batched_tokens"
            )
        request.arrival = next(self._arrivals)
        request.blocks = self.manager.new_request(
            request.extra_keys,
            prefix_len=num_prompt,
            encoder_len=request.encoder_len,
            ranges=request.ranges,
        )
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_order)

    def finish(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request from outside: cancelled, or at a stop string.

        Allowed at any time. The blocks of a request in the step under way are given back with it.

        Returns:
            Whether it had not finished before.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        return True

    def schedule(self) -> SchedulerOutput:
        """Choose the next step and allocate its blocks.

        A request that runs alone and still finds no block ends with an error. Only in that step, or
        without any request, nothing is scheduled.
        """
        assert not self._in_flight, "commit or discard the last step first"
        step = _Step(budget=self.max_num_batched_tokens)
        for request in sorted(self._running, key=lambda r: (r.is_prefilling, r.order)):
            if request.status is not RequestStatus.RUNNING:
                continue  # Preempted for one before it.
            if step.budget == 0:
                break
            num_left = request.num_tokens - request.num_computed_tokens
            num_new = min(num_left, self.max_chunk_tokens, step.budget)
            num_new = request.uncut(request.num_computed_tokens, num_new)
            if num_new == 0:
                step.admits = False  # Else newcomers would take the room it waits for.
                break
            if self._make_room(request, num_new, step):
                step.put(request, num_new)
            else:
                step.admits = False
        if step.admits:
            self._admit(step)
        output = SchedulerOutput(
            scheduled=self._in_batch_order(step.num_new_tokens),
            preempted_ids=tuple(r.request_id for r in step.preempted),
            finished_ids=tuple(self._finished_ids),
            num_tokens=self.max_num_batched_tokens - step.budget,
        )
        self._finished_ids.clear()
        self._in_flight.append(output)
        return output

    def schedule_ahead(self) -> SchedulerOutput | None:
        """Choose the step after the one under way, whose tokens are not known yet.

        Its requests are those of the step under way that reach no length limit with it, one token each:
        the one being sampled. A request that turns out to have ended has a row there all the same,
        which `commit` passes over; its blocks are given back then.

        Returns:
            None where what comes next depends on these tokens: a request could be admitted or is still
            in its prompt, or there are too few blocks.
        """
        (under_way,) = self._in_flight
        has_room = len(self._running) < self.max_num_seqs
        if (self._waiting and has_room) or len(under_way.scheduled) < len(self._running):
            return None
        if not all(item.samples for item in under_way.scheduled):
            return None
        going_on = [
            r
            for r in (item.request for item in under_way.scheduled)
            if not r.is_finished and r.num_output_tokens + 1 < r.sampling_params.max_tokens
        ]
        manager = self.manager
        missing = sum(manager.num_missing(_blocks(r), r.num_tokens + 1) for r in going_on)
        if not going_on or missing > manager.pool.num_free:
            return None
        for request in going_on if missing else ():
            manager.grow(_blocks(request), request.num_tokens + 1)
        output = SchedulerOutput(
            scheduled=tuple(
                ScheduledRequest(
                    request=request,
                    num_computed_tokens=request.num_tokens,
                    num_new_tokens=1,
                    samples=True,
                )
                for request in going_on
            ),
            preempted_ids=(),
            finished_ids=tuple(self._finished_ids),
            num_tokens=len(going_on),
        )
        self._finished_ids.clear()
        self._in_flight.append(output)
        return output

    def commit(
        self, output: SchedulerOutput, token_ids: Mapping[str, Sequence[int]]
    ) -> tuple[Request, ...]:
        """Enter what a step computed.

        Args:
            output: the oldest one under way.
            token_ids: request id -> tokens sampled for it, for each request that `samples`. Of several
                tokens all but the last must have been computed in this step (verified drafts).

        Returns:
            The requests that ended with these tokens.
        """
        assert output is self._in_flight[0], "steps are committed in their order"
        self._land(output)
        finished = []
        for item in output.scheduled:
            request = item.request
            if request.is_finished:
                continue
            request.num_computed_tokens += item.num_new_tokens
            reason = None
            if item.samples:
                sampled = token_ids[request.request_id]
                assert len(sampled) > 0, f"no token was sampled for {request}"
                for token_id in sampled:
                    reason = request.append(token_id)
                    if reason is not None:
                        break
                request.num_computed_tokens = request.num_tokens - 1
            self.manager.settle(_blocks(request), request.token_ids, request.num_computed_tokens)
            if reason is not None:
                self._finish(request, reason)
                finished.append(request)
        return tuple(finished)

    def discard(self, output: SchedulerOutput) -> None:
        """Give up a step that did not run to its end: its tokens will be scheduled again.

        Args:
            output: the last one scheduled that is under way.
        """
        assert output is self._in_flight[-1], "the step after it hangs on this one"
        self._land(output)

    def _land(self, output: SchedulerOutput) -> None:
        self._in_flight.remove(output)
        for item in output.scheduled:
            if item.request.is_finished and not self._is_flying(item.request):
                self.manager.release(_blocks(item.request))

    def _is_flying(self, request: Request) -> bool:
        return any(item.request is request for step in self._in_flight for item in step.scheduled)

    def _make_room(self, request: Request, num_new: int, step: _Step) -> bool:
        """Allocate for a running request, at the cost of later ones; False: it sits this step out."""
        blocks = _blocks(request)
        end = request.num_computed_tokens + num_new
        while (missing := self.manager.num_missing(blocks, end)) > self.manager.pool.num_free:
            victim = self._running[-1]
            if victim is request:
                # It keeps its blocks until an earlier request wants them: that one never waits.
                if len(self._running) == 1:
                    self._fail(request, missing)
                return False
            self._running.pop()
            self.manager.release(_blocks(victim))
            victim.status = RequestStatus.PREEMPTED
            victim.num_computed_tokens = 0
            victim.num_preemptions += 1
            insort(self._waiting, victim, key=_order)
            step.preempt(victim)
        if missing:
            self.manager.grow(blocks, end)
        return True

    def _admit(self, step: _Step) -> None:
        """Start waiting requests, in order; one that does not fit keeps all later ones waiting."""
        num_deferred = 0
        while (
            step.budget
            and num_deferred < len(self._waiting)
            and len(self._running) + num_deferred < self.max_num_seqs
        ):
            request = self._waiting[num_deferred]
            hit = self.manager.find_prefix(_blocks(request), request.token_ids)
            if self._is_being_computed(request, hit):
                num_deferred += 1
                continue
            num_left = request.num_tokens - hit.num_tokens
            num_new = min(num_left, self.max_chunk_tokens, step.budget)
            num_new = request.uncut(hit.num_tokens, num_new)
            if num_new == 0:
                return
            if self._start(request, hit, num_new):
                step.put(request, num_new)
            elif self._running:
                return
            else:
                self._fail(request, self._most_blocks(request, request.num_tokens))

    def _start(self, request: Request, hit: PrefixHit, num_new: int) -> bool:
        """Give a waiting request its first blocks, if all its known tokens have room by now.

        Not only those of the first chunk: a request that starts too early is preempted soon.
        """
        manager, blocks = self.manager, _blocks(request)
        manager.take_prefix(blocks, hit)
        needed = self._most_blocks(request, request.num_tokens)
        if needed - manager.num_held(blocks) > manager.pool.num_free:
            manager.release(blocks)
            return False
        manager.grow(blocks, hit.num_tokens + num_new)
        if request.status is RequestStatus.WAITING:
            manager.count_lookup(request.num_tokens, hit)
            request.num_cached_tokens = hit.num_tokens
        request.num_computed_tokens = hit.num_tokens
        request.status = RequestStatus.RUNNING
        self._waiting.remove(request)
        insort(self._running, request, key=_order)
        return True

    def _most_blocks(self, request: Request, num_tokens: int) -> int:
        return self.manager.max_blocks(num_tokens, self.max_chunk_tokens, request.encoder_len)

    def _is_being_computed(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a running request is about to compute what comes after the hit: then wait for it."""
        end = hit.num_tokens + self.manager.hit_unit
        return end < request.num_tokens and any(
            other.num_computed_tokens < end <= other.num_tokens
            and self.manager.same_prefix(_blocks(request), _blocks(other), end)
            for other in self._running
        )

    def _fail(self, request: Request, num_blocks: int) -> None:
        pool = self.manager.pool
        request.error = OutOfPages(
            f"request {request.request_id} runs alone and needs {num_blocks} blocks, but "
            f"{pool.num_free} of {pool.num_blocks - 1} are free; something else holds blocks of this "
            "pool: free them, or give the cache more memory"
        )
        self._finish(request, FinishReason.ERROR)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._finished_ids.append(request.request_id)
        if not self._is_flying(request):
            self.manager.release(_blocks(request))

    def _in_batch_order(
        self, num_new_tokens: Mapping[Request, int]
    ) -> tuple[ScheduledRequest, ...]:
        items = [
            ScheduledRequest(
                request=request,
                num_computed_tokens=request.num_computed_tokens,
                num_new_tokens=num_new,
                samples=request.num_computed_tokens + num_new == request.num_tokens,
            )
            for request, num_new in num_new_tokens.items()
        ]
        threshold = self.reorder_batch_threshold
        if threshold is not None:
            items.sort(key=lambda item: _region(item, threshold))
        return tuple(items)


class _Step:
    """A step in the making."""

    def __init__(self, budget: int) -> None:
        self.num_new_tokens: dict[Request, int] = {}
        self.preempted: list[Request] = []
        self.budget = budget
        self.admits = True
        """No running request waits for blocks or room."""

    def put(self, request: Request, num_new: int) -> None:
        self.num_new_tokens[request] = num_new
        self.budget -= num_new

    def preempt(self, request: Request) -> None:
        self.budget += self.num_new_tokens.pop(request, 0)
        self.preempted.append(request)
        self.admits = False


def _region(item: ScheduledRequest, threshold: int) -> int:
    if item.num_computed_tokens == 0:
        return 3
    if item.num_new_tokens > threshold:
        return 2
    return 1 if item.is_prefilling else 0


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _blocks(request: Request) -> RequestBlocks:
    assert request.blocks is not None, "only a request that was added has blocks"
    return request.blocks
