"""Graphs of decode steps: the model's pass over a step, captured once and replayed with one call.

In: steps in which every request computes one token. Out: their logits. A graph is captured for a
number of rows, when a step first needs it, and serves every step of as many requests or a few fewer,
padded. It reads what stands at fixed addresses (`StaticInputs`, the cache, what builders keep), so
before a replay the step's inputs are uploaded there and its plans are built anew.

What records and replays is a `Recorder`: `CudaRecorder`, or a stand-in that shows on a CPU whether a
backend and a model keep to the rules (`attnkit.conformance.simulator`).
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from attnkit.errors import ConfigurationError, ModelError
from attnkit.kvcache.pool import PagedKVCache
from attnkit.runner.model import PackedModel
from attnkit.runner.planner import StepPlanner
from attnkit.runner.scheduled import SchedulerOutput
from attnkit.runner.step import StaticInputs, build_capture_step

Plans = Mapping[str, Any]
"""Layer name -> plan."""


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows that graphs are captured for, smallest first; the largest is `max_num_seqs`.

    Padding rows cost little: a decode step reads all weights for one row too, and attention skips
    them. So steps of 8 up to 64 and an eighth to a quarter from there keep the graphs few.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class Recording(Protocol):
    """Work that can be done again."""

    def replay(self, plans: Plans) -> None:
        """Do what was recorded, on what now stands at the addresses it was recorded with.

        Args:
            plans: of this step. A graph of the device cannot see them; a stand-in compares them with
                those of the recording.
        """
        ...


class Recorder(Protocol):
    """Records work for a device."""

    def record(self, work: Callable[[], None], plans: Plans) -> Recording:
        """Do the work at least once, and record it.

        Args:
            work: only launches; it is called again for the recording.
            plans: that it runs with.

        Raises:
            RuntimeError: the work asks the device for something, which cannot be recorded.
        """
        ...


class CudaRecorder:
    """CUDA graphs. They share one pool of memory, so no two of them may run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None], plans: Plans) -> Recording:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # Compiles kernels and reserves memory, which a capture must not.
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return _CudaRecording(graph)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, plans: Plans) -> None:
        self._graph.replay()


def choose_recorder(packed: PackedModel, wanted: bool | None) -> tuple[Recorder | None, str]:
    """Whether a model's decode steps are captured.

    Args:
        packed: the model.
        wanted: None: where it can be done.

    Returns:
        The recorder, None for no graphs; and a line that says why.

    Raises:
        ConfigurationError: they are wanted and cannot be.
    """
    if wanted is False:
        return None, "cuda graphs: off, as asked"
    reason = packed.capture_refusal
    if packed.device.type != "cuda":
        reason = f"the model runs on {packed.device.type}"
    if reason is None:
        return CudaRecorder(packed.device), "cuda graphs: decode steps are captured"
    if wanted:
        raise ConfigurationError(
            f"cuda_graphs=True was asked for, but {reason}; leave cuda_graphs out, or choose another "
            "device or backend"
        )
    return None, f"cuda graphs: off, {reason}"


class DecodeGraph:
    """The graph of decode steps of some number of rows.

    Attributes:
        static: where a step's inputs must be put before a replay.
    """

    def __init__(self, static: StaticInputs, recording: Recording, logits: torch.Tensor) -> None:
        self.static = static
        self._recording = recording
        self._logits = logits

    def replay(self, plans: Plans, num_rows: int) -> torch.Tensor:
        """Run a step.

        Args:
            plans: built from its inputs.
            num_rows: rows of logits that are wanted.

        Returns:
            (num_rows, vocab_size); the next replay of any graph overwrites them.
        """
        self._recording.replay(plans)
        return self._logits[:num_rows]


class DecodeGraphs:
    """The graphs of a model, captured as steps need them."""

    def __init__(
        self,
        model: PackedModel,
        planner: StepPlanner,
        cache: PagedKVCache,
        recorder: Recorder,
        *,
        required: bool = False,
    ) -> None:
        """
        Args:
            model: whose steps they are, of its `capture_sizes`.
            planner: makes their plans.
            cache: that they read and write.
            recorder: records them.
            required: a step that cannot be captured raises; else it runs without a graph, and so do
                all after it, which a warning says once.
        """
        self._model, self._planner, self._cache = model, planner, cache
        self._recorder: Recorder | None = recorder
        self._required = required
        self._sizes = model.capture_sizes
        assert self._sizes, "a model without capture_sizes has no graphs"
        self._block_sizes = [r.block_size for r in model.kv_plan.retentions]
        widths = [-(-model.max_model_len // s) * model.blocks_per_block for s in self._block_sizes]
        self._static = StaticInputs.allocate(self._sizes[-1], widths, model.device)
        self._graphs: dict[int, DecodeGraph] = {}
        self._logits: torch.Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the graphs captured so far."""
        return tuple(sorted(self._graphs))

    def fitting(self, output: SchedulerOutput) -> DecodeGraph | None:
        """The smallest graph that a step fits into; None: it must run without.

        Raises:
            ModelError: graphs are required, and the step cannot be captured.
        """
        num_rows = len(output.scheduled)
        is_decode = all(
            item.num_new_tokens == 1 and item.images is None for item in output.scheduled
        )
        if self._recorder is None or not is_decode or num_rows > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        if size not in self._graphs:
            try:
                self._graphs[size] = self._capture(size, self._recorder)
            except RuntimeError as error:
                self._give_up(size, error)
        return self._graphs.get(size)

    def _capture(self, num_rows: int, recorder: Recorder) -> DecodeGraph:
        static, model = self._static.of(num_rows), self._model
        inputs = build_capture_step(
            static, self._block_sizes, model.blocks_per_block, model.max_model_len
        )
        plans = self._planner.plan(inputs.batches, for_capture=True)

        def work() -> None:
            logits = model.forward(
                inputs.input_ids, inputs.positions, inputs.logits_indices, plans, self._cache
            )
            # One copy into memory that all graphs share: kept each by its graph, the logits of a large
            # vocabulary would take more memory than all else in the pool.
            if self._logits is None:
                self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
            self._logits[:num_rows].copy_(logits)

        recording = recorder.record(work, plans)
        assert self._logits is not None
        return DecodeGraph(static, recording, self._logits)

    def _give_up(self, num_rows: int, error: RuntimeError) -> None:
        what = f"a decode step of {num_rows} requests cannot be captured as a graph: {error}"
        if self._required:
            raise ModelError(f"{what}; leave cuda_graphs out, or choose another model") from error
        self._recorder = None
        warnings.warn(
            f"{what}; steps run without graphs from here on", RuntimeWarning, stacklevel=2
        )
