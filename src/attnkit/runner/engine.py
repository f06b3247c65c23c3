"""The engine: steps of continuous batching over one model, for any number of requests at once.

In: requests, at any time. Out: after each step, entries whose tokens and text have grown. One step is
schedule, upload, plan, model, sample, commit; whoever wants progress calls `step`. Before a GPU's tokens
are awaited the next step is launched where it does not hang on them, so that the GPU does not wait for
the host. One lock makes it safe to call from several threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.errors import RequestError
from attnkit.kvcache.blocks import NULL_BLOCK, BlockPool
from attnkit.kvcache.tables import BlockManager
from attnkit.kvcache.transfer import LayerContents, PrefixContents, rows_of, whole_blocks
from attnkit.runner.detokenizer import TextStream, Tokenizer
from attnkit.runner.encoder_decoder import PackedEncoderDecoder
from attnkit.runner.entry import Entry
from attnkit.runner.graphs import DecodeGraphs, Recorder
from attnkit.runner.images import embed_images, ranges_of_prompt
from attnkit.runner.model import PackedModel
from attnkit.runner.output import StreamOutput
from attnkit.runner.planner import StepPlanner
from attnkit.runner.request import FinishReason, Request
from attnkit.runner.sampler import Draw, Sampled, SamplingState, draw
from attnkit.runner.sampling_params import SamplingParams
from attnkit.runner.scheduled import SchedulerOutput
from attnkit.runner.scheduler import Scheduler
from attnkit.runner.sound import read_sound
from attnkit.runner.step import build_step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        num_steps: passes through the model.
        num_computed_tokens: tokens that went through it.
        num_generated_tokens: tokens sampled.
        num_prompt_tokens: prompt tokens of requests admitted.
        num_cached_tokens: of those, tokens that the prefix cache spared.
        num_preemptions: times a request lost its pages.
        num_used_blocks: pages held now.
        num_blocks: pages there are.
    """

    num_steps: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_used_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flight:
    """A step that was launched: what it was, and its tokens on their way, one an entry."""

    output: SchedulerOutput
    entries: list[Entry]
    draw: Draw


class Engine:
    """Continuous batching on one `PackedModel`.

    Attributes:
        model: the model.
        cache: its pages.
        scheduler: which requests run.
        graphs: of its decode steps; None: there are none.
    """

    def __init__(
        self,
        model: PackedModel,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
        poison: bool = False,
        recorder: Recorder | None = None,
        graphs_required: bool = False,
        runs_ahead: bool | None = None,
    ) -> None:
        """
        Args:
            num_blocks: pages, the null block included.
            max_num_seqs: requests that run at once.
            max_num_batched_tokens: tokens of one step.
            enable_prefix_caching: find prompts' beginnings that were computed before.
            eos_token_ids: the model's end tokens.
            tokenizer: None: outputs have no text.
            seed: of the requests that name none.
            poison: fill fresh and freed pages with NaN, to find reads of what nobody wrote.
            recorder: captures decode steps of the model's `capture_sizes` as graphs; None: every step
                runs without.
            graphs_required: a decode step that cannot be captured raises.
            runs_ahead: launch a step before the tokens of the one before are known, where it does not
                hang on them; requests that end have a row too many then. None: on a GPU.

        Raises:
            ConfigurationError: a bound is not allowed.
            CacheError: fewer than two pages, or more than there is memory for.
        """
        self.model = model
        # Memory first, which says what it has no room for; a list of as many ids would end the process.
        self.cache = model.allocate(num_blocks, poison=poison)
        pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching)
        self.manager = BlockManager(pool, model.kv_plan.retentions)
        self._planner = StepPlanner(model)
        self.scheduler = Scheduler(
            self.manager,
            max_model_len=model.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            reorder_batch_threshold=self._planner.reorder_batch_threshold,
        )
        self.graphs = (
            None
            if recorder is None
            else DecodeGraphs(model, self._planner, self.cache, recorder, required=graphs_required)
        )
        self.eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._seed = seed
        self._poison = poison
        self._runs_ahead = model.device.type == "cuda" if runs_ahead is None else runs_ahead
        self._flight: Flight | None = None
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._numbers = itertools.count()
        self._block_sizes = [r.block_size for r in model.kv_plan.retentions]
        follow = [r.follows_encoder for r in model.kv_plan.retentions]
        self._follow_encoder = follow if any(follow) else None
        self._num_steps = self._num_computed = self._num_generated = self._num_preemptions = 0

    @property
    def stats(self) -> EngineStats:
        pool = self.manager.pool
        return EngineStats(
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed,
            num_generated_tokens=self._num_generated,
            num_prompt_tokens=self.manager.num_queried_tokens,
            num_cached_tokens=self.manager.num_hit_tokens,
            num_preemptions=self._num_preemptions,
            num_used_blocks=pool.num_used,
            num_blocks=pool.num_blocks,
        )

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        encoder_token_ids: Sequence[int] = (),
        *,
        token_type_ids: Sequence[int] | None = None,
        pixel_values: Any = None,
        input_features: Any = None,
    ) -> Entry:
        """Take a request; it runs from the next step on.

        Args:
            prompt_token_ids: at least one.
            prompt: the text they came from, to be handed back.
            encoder_token_ids: at least one for an encoder-decoder that reads text, none for others.
            token_type_ids: of a PrefixLM, which tokens see each other in both directions; None: none.
            pixel_values: of the images that its image tokens stand for.
            input_features: of a recording, for an encoder-decoder that reads sound.

        Raises:
            RequestError: the prompt or its parameters are not allowed; nothing was changed.
        """
        with self._lock:
            number = next(self._numbers)
            images = None
            if pixel_values is not None:
                images = embed_images(self.model, prompt_token_ids, pixel_values)
            sound = None
            if input_features is not None:
                sound = read_sound(self.model.model, input_features)
            request = Request(
                str(number),
                prompt_token_ids,
                params,
                encoder_token_ids=encoder_token_ids,
                sound=sound,
                eos_token_ids=self.eos_token_ids,
                ranges=ranges_of_prompt(self.model, prompt_token_ids, token_type_ids, images),
                images=images,
            )
            self._check_encoder_tokens(request)
            vocab_size = self.model.vocab_size
            if (largest := max(*prompt_token_ids, *encoder_token_ids, 0)) >= vocab_size:
                raise RequestError(
                    f"request {number}: token id {largest} is not of the model, which has "
                    f"{vocab_size}; give ids from 0 to {vocab_size - 1}"
                )
            for token_id in params.stop_token_ids:
                if token_id >= vocab_size:
                    raise RequestError(
                        f"request {number}: stop_token_ids has {token_id}, and the model's tokens end "
                        f"at {vocab_size - 1}, so it would never stop there; give ids up to that"
                    )
            if params.stop and self._tokenizer is None:
                raise RequestError(
                    f"request {number}: stop strings {list(params.stop)} need a tokenizer, and the "
                    "model has none; use stop_token_ids"
                )
            state = SamplingState(
                params, prompt_token_ids, vocab_size, [self._seed, number], self.model.device
            )
            text = (
                None
                if self._tokenizer is None
                else TextStream(self._tokenizer, prompt_token_ids, stop=params.stop)
            )
            entry = Entry(request, prompt, state, text)
            # Last: what is scheduled must have an entry.
            self.scheduler.add(request)
            self._entries[request.request_id] = entry
            return entry

    def _check_encoder_tokens(self, request: Request) -> None:
        given = request.encoder_len
        if self._follow_encoder is None and given:
            raise RequestError(
                f"request {request.request_id}: encoder tokens were given, and the model has no "
                "encoder; give a prompt alone"
            )
        if self._follow_encoder is not None:
            assert isinstance(self.model, PackedEncoderDecoder)
            if not 0 < given <= self.model.max_encoder_len:
                raise RequestError(
                    f"request {request.request_id}: the encoder's prompt has {given} tokens; give 1 to "
                    f"{self.model.max_encoder_len}"
                )

    def abort(self, entries: Iterable[Entry]) -> None:
        """Cancel those of the entries that have not finished; their pages are free afterwards."""
        unfinished = [entry for entry in entries if not entry.request.is_finished]
        if not unfinished:
            return  # without waiting for a step of other requests
        with self._lock:
            for entry in unfinished:
                self.scheduler.finish(entry.request.request_id, FinishReason.ABORT)
                self._entries.pop(entry.request.request_id, None)
            self._drop_idle_flight()

    def advance(self, entry: Entry) -> StreamOutput:
        """Step until this entry has news, and give them out; another thread's steps count."""
        with self._lock:
            while not entry.has_news:
                self.step()
            return entry.take()

    def export_prefix(self, token_ids: Sequence[int], model: str) -> PrefixContents:
        """What the cache holds of a prefix: whole blocks, as far as they are there.

        Args:
            token_ids: a prompt and its output, say.
            model: identifies the weights, for `PrefixContents`.
        """
        with self._lock:
            blocks = self.manager.new_request()
            hit = self.manager.find_everything(blocks, token_ids)
            layers = {}
            for group, table in zip(self.model.kv_plan.groups, hit.tables, strict=True):
                first = next((i for i, b in enumerate(table) if b != NULL_BLOCK), len(table))
                for name in group.specs:
                    rows = self.cache.read_blocks(name, table[first:]).cpu()
                    layers[name] = self._contents(name, first * group.retention.block_size, rows)
        return PrefixContents(
            model=model, token_ids=tuple(token_ids[: hit.num_tokens]), layers=layers
        )

    def empty_prefix(self, model: str) -> PrefixContents:
        """No token, but what rows must look like: for `KVConnector.load`."""
        layers = {name: self._contents(name, 0, self.cache.read_blocks(name, ()).cpu())
                  for name in self.model.kv_plan.specs}  # fmt: skip
        return PrefixContents(model=model, token_ids=(), layers=layers)

    def import_prefix(self, contents: PrefixContents) -> int:
        """Put a prefix into the cache, where prompts that begin with it find it.

        Args:
            contents: checked by `check_fits`.

        Returns:
            Its tokens in whole blocks of every group.

        Raises:
            OutOfPages: the cache has less room; nothing was changed.
        """
        groups, manager, layers = self.model.kv_plan.groups, self.manager, contents.layers
        num_tokens = len(contents.token_ids)
        with self._lock:
            blocks = manager.new_request()
            spans = [
                whole_blocks(
                    layers[g.layer_names[0]].first_token, num_tokens, g.retention.block_size
                )
                for g in groups
            ]
            manager.take_from(blocks, [s.start for s in spans], [s.stop for s in spans])
            if self._poison:  # Or the next step would, over what is written now.
                self.cache.poison_blocks(manager.pool.take_poisonable())
            for group, span, table in zip(groups, spans, blocks.tables, strict=True):
                for name in group.specs if span else ():
                    rows = rows_of(layers[name], span, group.retention.block_size)
                    self.cache.write_blocks(name, table[span.start :], rows)
            manager.settle(blocks, contents.token_ids, num_tokens)
            manager.release(blocks)
        return num_tokens // manager.hit_unit * manager.hit_unit

    def _contents(self, name: str, first_token: int, rows: torch.Tensor) -> LayerContents:
        layer = self.model.layers.get(name)
        if layer is None:  # What is kept beside a layer has no scales of the model.
            return LayerContents(first_token=first_token, rows=rows)
        scales = [tuple(s.flatten().tolist()) for s in (layer._k_scale, layer._v_scale)]
        return LayerContents(
            first_token=first_token,
            rows=rows,
            kv_cache_dtype=layer.kv_cache_dtype,
            scales=(scales[0], scales[1]),
        )

    def step(self) -> None:
        """Run one step for whoever is scheduled. Nothing happens where no request is left."""
        with self._lock:
            flight, self._flight = self._flight, None
            if flight is None:
                flight = self._launch_next()
            if flight is None:
                return
            try:
                self._flight = self._launch_ahead(flight)
            finally:
                self._land(flight)
            self._drop_idle_flight()

    def _launch_next(self) -> Flight | None:
        output = self.scheduler.schedule()
        self._num_preemptions += len(output.preempted_ids)
        self._forget(output.finished_ids)
        if output.scheduled:
            return self._launch(output)
        self.scheduler.commit(output, {})
        return None

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """The step after one whose tokens are not known; None: it must wait for them."""
        # A penalty counts the tokens before it.
        if not self._runs_ahead or any(e.state.seen is not None for e in flight.entries):
            return None
        output = self.scheduler.schedule_ahead()
        if output is None:
            return None
        self._forget(output.finished_ids)
        return self._launch(output, flight)

    def _forget(self, finished_ids: Iterable[str]) -> None:
        for request_id in finished_ids:  # those that ended without running
            self._entries.pop(request_id, None)

    def _launch(self, output: SchedulerOutput, before: Flight | None = None) -> Flight:
        """The device's part of a step: from the upload to the tokens' way down.

        Args:
            before: samples the tokens of this step; None: they are known.
        """
        try:
            if self._poison:
                self.cache.poison_blocks(self.manager.pool.take_poisonable())
            with torch.inference_mode():
                graph = None if self.graphs is None else self.graphs.fitting(output)
                inputs = build_step(
                    output,
                    self._block_sizes,
                    self.model.blocks_per_block,
                    self.model.device,
                    None if graph is None else graph.static,
                    self._follow_encoder,
                )
                if before is not None:
                    inputs.input_ids[: output.num_tokens] = _tokens_of(before, inputs.sampled)
                plans = self._planner.plan(inputs.batches)
                if graph is None:
                    logits = self.model.run(inputs, plans, self.cache)
                else:
                    logits = graph.replay(plans, len(inputs.sampled))
                entries = [self._entries[request.request_id] for request in inputs.sampled]
                drawn = draw(logits, [entry.state for entry in entries])
        except BaseException:
            self.scheduler.discard(output)
            raise
        return Flight(output=output, entries=entries, draw=drawn)

    def _land(self, flight: Flight) -> None:
        """Wait for a step's tokens and enter them."""
        try:
            sampled = list(zip(flight.entries, flight.draw.read(), strict=True))
        except BaseException:
            later, self._flight = self._flight, None
            for torn in (later, flight):
                if torn is not None:
                    torn.draw.take_back()
                    self.scheduler.discard(torn.output)
            raise
        # A request may have ended with the step before.
        sampled = [(entry, s) for entry, s in sampled if not entry.request.is_finished]
        self._commit(flight.output, sampled)

    def _drop_idle_flight(self) -> None:
        """Nobody waits for a step whose requests have all ended: their pages are free."""
        flight = self._flight
        if flight is not None and all(i.request.is_finished for i in flight.output.scheduled):
            self._flight = None
            self.scheduler.discard(flight.output)

    def _commit(self, output: SchedulerOutput, sampled: list[tuple[Entry, Sampled]]) -> None:
        self._num_steps += 1
        self._num_computed += output.num_tokens
        token_ids: dict[str, list[int]] = {}
        for entry, outcome in sampled:
            request_id = entry.request.request_id
            if outcome.token_id is None:
                entry.error = (
                    f"request {request_id}: the model's logits are not finite after "
                    f"{entry.request.num_tokens} tokens; try dtype float32, or another backend"
                )
                self.scheduler.finish(request_id, FinishReason.ERROR)
                continue
            token_ids[request_id] = [outcome.token_id]
            if entry.logprobs is not None and outcome.logprobs is not None:
                entry.logprobs.append(outcome.logprobs)
        self._num_generated += len(token_ids)
        self.scheduler.commit(output, token_ids)
        for entry, outcome in sampled:
            request = entry.request
            if outcome.token_id is None or entry.text is None:
                continue
            if request.finish_reason is FinishReason.STOP:
                continue  # A token that ends the output is no text.
            if entry.text.append(outcome.token_id):
                self.scheduler.finish(request.request_id, FinishReason.STOP)
        for entry, _ in sampled:
            if entry.request.is_finished:
                self._entries.pop(entry.request.request_id)


def _tokens_of(flight: Flight, requests: Sequence[Request]) -> torch.Tensor:
    """int64 (num_requests,), what a step samples for some of its requests, on the device."""
    token_ids = flight.draw.token_ids
    row_of = {entry.request: row for row, entry in enumerate(flight.entries)}
    rows = [row_of[request] for request in requests]
    if rows == list(range(len(flight.entries))):
        return token_ids
    return token_ids[torch.tensor(rows, device=token_ids.device)]
