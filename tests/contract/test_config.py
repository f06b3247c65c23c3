"""Configuration: what has no effect here is refused, and so is what no engine has."""

from __future__ import annotations

from typing import Any

import pytest

from attnkit.contract import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from attnkit.errors import ConfigurationError


@pytest.mark.parametrize("value", [0, 2, "1", None])
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("tensor_parallel_size", "give each layer the heads of its rank"),
        ("cp_kv_cache_interleave_size", "say in slot_mapping what this rank keeps"),
    ],
)
def test_ranks_that_nothing_here_would_see_are_refused(name: str, instead: str, value: Any) -> None:
    assert getattr(ParallelConfig(**{name: 1}), name) == 1
    with pytest.raises(ConfigurationError, match=f"{name} {value!r} .*leave it at 1 and {instead}"):
        ParallelConfig(**{name: value})


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        (ModelConfig, "dtype", "bfloat16"),
        (ModelConfig, "max_model_len", 0),
        (CacheConfig, "block_size", 1.5),
        (SchedulerConfig, "max_num_seqs", 0),
        (SchedulerConfig, "max_num_batched_tokens", None),
        (ParallelConfig, "decode_context_parallel_size", 0),
        (ParallelConfig, "prefill_context_parallel_size", True),
        (SpeculativeConfig, "num_speculative_tokens", -1),
        (SpeculativeConfig, "parallel_drafting", "no"),
    ],
)
def test_what_no_engine_has_is_refused(part: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} {value!r} is not allowed; give"):
        part(**{name: value})
