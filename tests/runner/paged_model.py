"""A model whose cache holds, for each token, the hash of all tokens it sees, up to it or to the end of
its range.

It writes and reads pages as attention would: a page that is wrong, stale, freed or of another group is
an assertion, and would be a wrong token. `generate` gives the right tokens without pages.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Sequence

from attnkit.kvcache.blocks import NULL_BLOCK, BlockPool
from attnkit.kvcache.retention import Retention
from attnkit.kvcache.tables import BlockManager, TokenRange
from attnkit.runner.request import Request
from attnkit.runner.sampling_params import SamplingParams
from attnkit.runner.scheduled import SchedulerOutput
from attnkit.runner.scheduler import Scheduler

VOCAB_SIZE = 50
EOS = 7


def histories(
    token_ids: Sequence[int],
    extra_keys: tuple[Hashable, ...] = (),
    ranges: Sequence[TokenRange] = (),
) -> list[int]:
    """For each token, a number that depends on it, all before it, the extra keys and its whole range."""
    # Not `hash`: that of a string differs from process to process.
    found: list[int] = []
    state = zlib.crc32(repr(extra_keys).encode())
    range_at = {r.first: r for r in ranges}
    while len(found) < len(token_ids):
        r = range_at.get(len(found))
        if r is None:
            state = hash((state, token_ids[len(found)]))
            found.append(state)
        else:
            own = token_ids[r.first : r.last + 1]
            state = hash((state, *own, zlib.crc32(repr(r.key).encode())))
            found += [hash((state, i)) for i in range(len(own))]
    return found


def histories_of(request: Request) -> list[int]:
    """Of what it knows by now."""
    return histories(request.token_ids, request.extra_keys, request.ranges)


def generate(request: Request) -> list[int]:
    """What a request must put out, from its prompt alone."""
    token_ids, output = request.prompt_token_ids, []
    params = request.sampling_params
    while len(output) < params.max_tokens:
        known = histories(token_ids + output, request.extra_keys, request.ranges)
        output.append(known[-1] % VOCAB_SIZE)
        if (output[-1] == EOS and not params.ignore_eos) or output[-1] in params.stop_token_ids:
            break
    return output


def visible(retention: Retention, position: int, ranges: Sequence[TokenRange] = ()) -> range:
    """Key positions that a query attends to."""
    first = 0
    if retention.sliding_window is not None:
        first = max(0, position - retention.sliding_window + 1)
    if retention.attention_chunk_size is not None:
        first = position - position % retention.attention_chunk_size
    own = next((r for r in ranges if r.first <= position <= r.last), None)
    if own is not None:
        return range(min(first, own.first), own.last + 1)
    return range(first, position + 1)


class PagedModel:
    """Runs steps; `num_computed` counts how often each history was computed."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.num_computed: Counter[int] = Counter()
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Poison, write every row, then read every row and sample."""
        garbage = set(self.manager.pool.take_poisonable())
        self._slots = {k: v for k, v in self._slots.items() if k[0] not in garbage}
        rows = []
        for item in output.scheduled:
            request = item.request
            start = request.num_computed_tokens
            known = histories_of(request)
            rows.append((item, known))
            for position in range(start, start + item.num_new_tokens):
                self._write(request, position, known[position])
                self.num_computed[known[position]] += 1
        sampled = {}
        for item, known in rows:
            start = item.request.num_computed_tokens
            for position in range(start, start + item.num_new_tokens):
                self._read(item.request, position, known)
            if item.samples:
                sampled[item.request.request_id] = [known[-1] % VOCAB_SIZE]
        return sampled

    def _write(self, request: Request, position: int, history: int) -> None:
        for group, block_id, offset in self._places(request, position):
            assert block_id != NULL_BLOCK, f"{request} writes {position} into the null block"
            assert self.manager.pool.num_refs(block_id) == 1, "a shared block is written"
            self._slots[block_id, offset] = (group, history)

    def _read(self, request: Request, position: int, known: list[int]) -> None:
        for group, retention in enumerate(self.manager.retentions):
            for key in visible(retention, position, request.ranges):
                _, block_id, offset = self._places(request, key)[group]
                assert block_id != NULL_BLOCK, f"{request} at {position} lost visible {key}"
                assert self._slots.get((block_id, offset)) == (group, known[key]), (
                    f"{request} at {position} reads wrong contents for {key} in group {group}"
                )

    def _places(self, request: Request, position: int) -> list[tuple[int, int, int]]:
        assert request.blocks is not None
        return [
            (group, table[position // r.block_size], position % r.block_size)
            for group, (r, table) in enumerate(
                zip(self.manager.retentions, request.blocks.tables, strict=True)
            )
        ]


def make_scheduler(
    *,
    num_blocks: int = 65,
    retentions: Sequence[Retention] = (Retention(block_size=4),),
    enable_prefix_caching: bool = True,
    max_model_len: int = 256,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    max_chunk_tokens: int | None = None,
    reorder_batch_threshold: int | None = None,
) -> Scheduler:
    pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching)
    return Scheduler(
        BlockManager(pool, retentions),
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_chunk_tokens=max_chunk_tokens,
        reorder_batch_threshold=reorder_batch_threshold,
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 5,
    *,
    extra_keys: tuple[Hashable, ...] = (),
    priority: int = 0,
    ignore_eos: bool = True,
    stop_token_ids: Sequence[int] = (),
    ranges: Sequence[TokenRange] = (),
) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
    )
    return Request(
        request_id,
        prompt,
        params,
        eos_token_ids=(EOS,),
        extra_keys=extra_keys,
        ranges=ranges,
        priority=priority,
    )


def run_all(scheduler: Scheduler, model: PagedModel) -> list[SchedulerOutput]:
    """Step until nothing is left."""
    outputs = []
    while scheduler.has_work:
        outputs.append(scheduler.schedule())
        scheduler.commit(outputs[-1], model.run(outputs[-1]))
    return outputs
