"""The law of captured steps: what a builder says of graphs, shown by capturing and replaying one.

In: a `Subject`. Out: as of any law (`laws`). The graph is a real one on a GPU and a simulated one on a
CPU. It is captured as the runner captures: with short requests in the null block that write nothing,
once. Then steps of other lengths, pages and numbers of requests are put at the same addresses, planned
and replayed, and each is judged by the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attnkit.conformance.case import Case
from attnkit.conformance.checks import BatchWatch, CacheWatch, judge
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.simulator import GraphSimulator
from attnkit.conformance.subject import LawBroken, NotClaimed, Result, Subject
from attnkit.contract import (
    AttentionCGSupport,
    CommonAttentionMetadata,
    ModelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from attnkit.paged_layer import PagedLayer
from attnkit.runner.graphs import CudaRecorder, Recorder

_MAX_MODEL_LEN = 512
"""Longer than any step here, and long enough for kernels to share a request between programs; in an
interpreter each of these takes its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """A kind of step that graphs are captured for.

    Attributes:
        num_reqs, num_tokens: that every step is padded to.
        width: queries of a request at most; that of decodes with drafts.
        steps: query and sequence lengths of real requests, step by step.
    """

    num_reqs: int
    num_tokens: int
    width: int
    steps: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


_SINGLE = _Graph(
    num_reqs=3, num_tokens=3, width=1, steps=(((1, 1), (20, 1)), ((1, 1, 1), (70, 33, 16)))
)
_UNIFORM = _Graph(
    num_reqs=3, num_tokens=9, width=3, steps=(((3, 3, 3), (20, 3, 41)), ((3, 3), (70, 33)))
)
_RAGGED = _Graph(
    num_reqs=3, num_tokens=9, width=3, steps=(((1, 3, 2), (20, 3, 41)), ((2, 1), (33, 70)))
)
_MIXED = _Graph(
    num_reqs=3, num_tokens=16, width=16, steps=(((1, 9, 1), (49, 25, 16)), ((14,), (30,)))
)


def captured_steps_replay(subject: Subject) -> None:
    """A graph that is captured once answers every step of the kinds that the builder says, from the
    addresses it was captured with."""
    num_captured = 0
    for graph in (_SINGLE, _UNIFORM, _RAGGED, _MIXED):
        case = _case(subject, (graph.width,), (graph.width,))
        speculative = None
        if graph in (_UNIFORM, _RAGGED):
            speculative = SpeculativeConfig(num_speculative_tokens=graph.width - 1)
        config = VllmConfig(
            model_config=ModelConfig(dtype=case.dtype, max_model_len=_MAX_MODEL_LEN),
            speculative_config=speculative,
        )
        layer = subject.layer(case, vllm_config=config)
        if graph in _kinds(layer, graph.width):
            _capture_and_replay(subject, layer, graph)
            num_captured += 1
    if not num_captured:
        raise NotClaimed("the builder says AttentionCGSupport.NEVER")


def _case(
    subject: Subject, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **fields: int
) -> Case:
    return subject.plain_case(
        "captured",
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_heads=2,
        num_kv_heads=1,
        return_lse=subject.basis().lse,
        **fields,
    )


def _kinds(layer: PagedLayer, width: int) -> tuple[_Graph, ...]:
    """What the builder says can be captured, for requests of at most `width` queries."""
    level = layer.get_cudagraph_support()
    if level is AttentionCGSupport.NEVER:
        return ()
    if level is AttentionCGSupport.ALWAYS:
        return _SINGLE, _MIXED  # The mixed steps are uniform and ragged ones too.
    kinds = [_SINGLE]
    if level is AttentionCGSupport.UNIFORM_BATCH:
        kinds.append(_UNIFORM)
    spec = layer.make_builder().kv_cache_spec
    longest = layer.backend.get_builder_cls().get_varlen_cudagraph_max_query_len(
        layer.vllm_config, spec
    )
    if longest is not None and longest >= width:
        kinds.append(_RAGGED)
    return tuple(kinds)


def _capture_and_replay(subject: Subject, layer: PagedLayer, graph: _Graph) -> None:
    padded = [_padded(subject, layer, graph, *step) for step in graph.steps]
    static = _Static(layer, padded)
    share = graph.num_tokens // graph.num_reqs
    lens = (share,) * graph.num_reqs
    static.put(_padded(subject, layer, graph, lens, lens))
    batch = static.batch.replace(
        # As the longest step that will come, whatever this one is.
        max_query_len=graph.width,
        max_seq_len=layer.vllm_config.model_config.max_model_len,
        block_table_tensor=static.batch.block_table_tensor.zero_(),
        slot_mapping=static.batch.slot_mapping.fill_(-1),
    )
    builder = layer.make_builder()
    plans = {layer.layer_name: builder.build_for_cudagraph_capture(batch)}

    def work() -> None:
        layer._run(
            static.query,
            static.key,
            static.value,
            static.out,
            static.lse,
            static.kv_cache,
            plans[layer.layer_name],
        )

    recorder: Recorder = GraphSimulator()
    if subject.device.type == "cuda":
        recorder = CudaRecorder(subject.device)
    try:
        recording = recorder.record(work, plans)
    except RuntimeError as error:
        raise LawBroken(f"a step of {graph} cannot be captured: {error}") from error
    for inputs in padded:
        static.put(inputs)
        held = static.inputs_of(inputs)
        cache, watch = CacheWatch(held), BatchWatch(static.batch)
        recording.replay({layer.layer_name: builder.build(0, static.batch)})
        watch.expect_unchanged()
        cache.expect_only_new_tokens_written()
        judge(inputs.sequences, Result(out=static.out, lse=static.lse))


def _padded(
    subject: Subject,
    layer: PagedLayer,
    graph: _Graph,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
) -> Inputs:
    """A step with as many rows and tokens as the graph has."""
    case = _case(
        subject,
        query_lens,
        seq_lens,
        padding_tokens=graph.num_tokens - sum(query_lens),
        padding_reqs=graph.num_reqs - len(query_lens),
    )
    inputs = subject.inputs(layer, case)
    if not inputs.is_logical:
        raise NotClaimed("the law copies caches, and this one has a shape of the backend's own")
    return inputs


class _Static:
    """Tensors that a graph reads and writes; `put` gives them a step's contents."""

    def __init__(self, layer: PagedLayer, steps: Sequence[Inputs]) -> None:
        largest = max(steps, key=lambda inputs: inputs.kv_cache.shape[0])
        widest = max(steps, key=lambda inputs: inputs.batch.block_table_tensor.shape[1])
        self.query, self.key, self.value = (
            torch.empty_like(x) for x in (largest.query, largest.key, largest.value)
        )
        self.kv_cache = largest.kv_cache.clone()
        self.out = self.query.new_empty(len(self.query), layer.num_heads, layer.head_size_v)
        self.lse: torch.Tensor | None = None
        if layer.return_lse:
            self.lse = torch.empty(self.out.shape[:2], device=self.query.device)
        self.batch: CommonAttentionMetadata = _copied(widest.batch)

    def put(self, inputs: Inputs) -> None:
        """Take a step."""
        # A graph computes its padding rows too, and the model's are numbers.
        self.query.copy_(inputs.query.nan_to_num())
        self.key.copy_(inputs.key)
        self.value.copy_(inputs.value)
        self.kv_cache[: inputs.kv_cache.shape[0]].copy_(inputs.kv_cache)
        self.out.fill_(math.nan)
        if self.lse is not None:
            self.lse.fill_(math.nan)
        batch, table = self.batch, inputs.batch.block_table_tensor
        batch.block_table_tensor.zero_()[:, : table.shape[1]].copy_(table)
        tensors: dict[str, torch.Tensor] = {}
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "positions"):
            tensors[name] = getattr(batch, name).copy_(getattr(inputs.batch, name))
        self.batch = inputs.batch.replace(
            block_table_tensor=batch.block_table_tensor,
            num_actual_tokens=self.query.shape[0],
            **tensors,
        )

    def inputs_of(self, inputs: Inputs) -> Inputs:
        """The step as it stands here."""
        return replace(
            inputs,
            query=self.query,
            key=self.key,
            value=self.value,
            kv_cache=self.kv_cache,
            batch=self.batch,
        )


def _copied(batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """A batch whose tensors on the device are its own."""
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "positions")
    return batch.replace(**{name: getattr(batch, name).clone() for name in names})
