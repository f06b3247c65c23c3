"""The slice of an engine's configuration that backends and builders read.

In: an engine fills it, or passes its own object: access is by attribute, and the paths are those of
vLLM's VllmConfig, so either fits. Out: `vllm_config` of every builder, and `ParallelContext`, which
tells an impl its rank in context-parallel groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from attnkit.arguments import check_count, check_dtype, check_flags
from attnkit.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What backends ask of the model.

    Attributes:
        dtype: of activations.
        max_model_len: longest request in tokens.
    """

    dtype: torch.dtype = torch.float32
    max_model_len: int = 8192

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_count("max_model_len", self.max_model_len)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What backends ask of the KV cache.

    Attributes:
        block_size: tokens in one of the engine's blocks; kernel blocks may be smaller.
    """

    block_size: int = 16

    def __post_init__(self) -> None:
        check_count("block_size", self.block_size)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds on a batch: persistent buffers are sized by them.

    Attributes:
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192

    def __post_init__(self) -> None:
        check_count("max_num_seqs", self.max_num_seqs)
        check_count("max_num_batched_tokens", self.max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """World sizes. Everything is 1 on a single device.

    Attributes:
        decode_context_parallel_size: ranks that the cache of a request is spread over; layers want a
            backend that says `supports_dcp`.
        prefill_context_parallel_size: ranks that the queries of a prompt are spread over; likewise
            `supports_pcp`.
        tensor_parallel_size: ranks that heads are spread over. 1: a layer is told of its own heads.
        cp_kv_cache_interleave_size: neighbouring tokens that go to one rank before the next takes over.
            1: nothing here places tokens on ranks. Both are there since vLLM's builders read them.
    """

    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1

    def __post_init__(self) -> None:
        check_count("decode_context_parallel_size", self.decode_context_parallel_size)
        check_count("prefill_context_parallel_size", self.prefill_context_parallel_size)
        for name, instead in (
            ("tensor_parallel_size", "give each layer the heads of its rank"),
            ("cp_kv_cache_interleave_size", "say in slot_mapping what this rank keeps"),
        ):
            value = getattr(self, name)
            if value != 1:
                raise ConfigurationError(
                    f"{name} {value!r} has no effect here; leave it at 1 and {instead}"
                )


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding; an engine without it has None in place of the whole.

    Attributes:
        num_speculative_tokens: drafts verified per request and step; None: not decided.
        parallel_drafting: all drafts come from one forward pass of the drafter.
    """

    num_speculative_tokens: int | None = None
    parallel_drafting: bool = False

    def __post_init__(self) -> None:
        name = "num_speculative_tokens"
        check_count(name, self.num_speculative_tokens, lowest=0, optional=True)
        check_flags({"parallel_drafting": self.parallel_drafting})


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """Graph capture.

    Attributes:
        cudagraph_capture_sizes: token counts graphs are captured for, smallest first; empty: none.
    """

    cudagraph_capture_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """The parts together. Change one with `dataclasses.replace`.

    Attributes:
        model_config, cache_config, scheduler_config, parallel_config, compilation_config: the parts.
        speculative_config: None without speculation.
        use_v2_model_runner: False: an older engine, whose parallel drafter widens verified requests
            (see `max_decode_query_len`).
    """

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    speculative_config: SpeculativeConfig | None = None
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    use_v2_model_runner: bool = True


def max_decode_query_len(vllm_config: object) -> int:
    """Longest query that counts as a decode for builders that verify drafts in their decode kernel.

    The reorder threshold and every decode/prefill split read this one function, so they agree.

    Args:
        vllm_config: ours or vLLM's. Without a `speculative_config`, or with None, there are no drafts.

    Returns:
        1 without drafts, 1 + K with K drafts; 1 + 2K where an older runner
        (`use_v2_model_runner` False) drafts in parallel and appends K mask slots.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or speculative.num_speculative_tokens is None:
        return 1
    num_drafts = speculative.num_speculative_tokens
    old_runner = not getattr(vllm_config, "use_v2_model_runner", True)
    return 1 + num_drafts * (2 if speculative.parallel_drafting and old_runner else 1)


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """This process's place in context parallelism: ranks count from 0 to world size - 1.

    Attributes:
        dcp_world_size, dcp_rank: decode context parallelism, the cache of a request spread over ranks.
        pcp_world_size, pcp_rank: prefill context parallelism, the queries of a prompt spread over
            ranks.

    Raises:
        ConfigurationError: a world size below 1, or a rank outside of its world.
    """

    dcp_world_size: int = 1
    dcp_rank: int = 0
    pcp_world_size: int = 1
    pcp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("dcp", "pcp"):
            size, rank = getattr(self, f"{name}_world_size"), getattr(self, f"{name}_rank")
            if size < 1 or not 0 <= rank < size:
                raise ConfigurationError(
                    f"{name} rank {rank} of world size {size} is not allowed; "
                    "give a world size >= 1 and a rank below it"
                )


_PARALLEL_CONTEXT: ContextVar[ParallelContext | None] = ContextVar(
    "attnkit_parallel_context", default=None
)


def get_parallel_context() -> ParallelContext:
    """The context impls are constructed under: one rank unless a scope says otherwise."""
    return _PARALLEL_CONTEXT.get() or ParallelContext()


@contextmanager
def parallel_context(context: ParallelContext) -> Iterator[ParallelContext]:
    """Construct impls inside this scope to give them `context`.

    An impl reads it once, when it is made: a draft model built under its own scope keeps its own
    ranks inside a larger group.
    """
    token = _PARALLEL_CONTEXT.set(context)
    try:
        yield context
    finally:
        _PARALLEL_CONTEXT.reset(token)
