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

from attnkit.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What backends ask of the model."""

    dtype: torch.dtype = torch.float32
    max_model_len: int = 8192
    rswa_window: int | None = None
    is_mm_prefix_lm: bool = False
    use_mla: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What backends ask of the KV cache."""

    block_size: int = 16
    cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    kv_sharing_fast_prefill: bool = False


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds on a batch: persistent buffers are sized by them."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """World sizes. Everything is 1 on a single device."""

    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Draft tokens per step; None of it exists without speculation."""

    num_speculative_tokens: int | None = None
    parallel_drafting: bool = False


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """Graph capture sizes, smallest first; empty: no graphs."""

    cudagraph_capture_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """The parts together. `replace` one with `dataclasses.replace`."""

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

    dcp: decode context parallelism, the cache of a request spread over ranks. pcp: prefill context
    parallelism, the queries of a prompt spread over ranks.
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
