"""AttentionMetadataBuilder: who counts as a decode, and what the default builds are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from attnkit.batch import make_batch
from attnkit.contract import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
    FullAttentionSpec,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
    max_decode_query_len,
)

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)


def _config(
    drafts: int | None = None, *, parallel: bool = False, dcp: int = 1, v2: bool = True
) -> Any:
    speculative = SpeculativeConfig(num_speculative_tokens=drafts, parallel_drafting=parallel)
    return VllmConfig(
        speculative_config=speculative,
        parallel_config=ParallelConfig(decode_context_parallel_size=dcp),
        use_v2_model_runner=v2,
    )


@dataclass
class Foreign:
    """An engine's own configuration: only attributes count."""

    speculative_config: Any


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (VllmConfig(), 1),
        (object(), 1),
        (_config(None), 1),
        (_config(3), 4),
        (_config(3, parallel=True, v2=False), 7),
        (_config(3, parallel=True, v2=True), 4),
        (_config(3, v2=False), 4),
        (Foreign(SpeculativeConfig(num_speculative_tokens=2, parallel_drafting=True)), 3),
    ],
)
def test_longest_query_that_is_a_decode(config: Any, longest: int) -> None:
    assert max_decode_query_len(config) == longest


class Builder(AttentionMetadataBuilder[Any]):
    def __init__(self, config: Any) -> None:
        super().__init__(SPEC, ["a"], config, torch.device("cpu"))
        self.calls: list[tuple[Any, ...]] = []

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        self.calls.append((common_prefix_len, common_attn_metadata, fast_build))
        return len(self.calls)


@pytest.mark.parametrize(
    ("config", "arguments", "threshold"),
    [
        (_config(), {}, 1),
        (_config(3), {}, 1),
        (_config(3), {"supports_spec_as_decode": True}, 4),
        (_config(3, parallel=True, v2=False), {"supports_spec_as_decode": True}, 7),
        (_config(3), {"reorder_batch_threshold": 6, "supports_spec_as_decode": True}, 6),
        (_config(3), {"reorder_batch_threshold": None, "supports_spec_as_decode": True}, None),
        (VllmConfig(), {"reorder_batch_threshold": 5, "supports_spec_as_decode": True}, 5),
        (_config(3, dcp=2), {"supports_spec_as_decode": True}, 1),
        (_config(dcp=2), {"reorder_batch_threshold": None}, 1),
        (
            _config(3, dcp=2),
            {"supports_spec_as_decode": True, "supports_dcp_with_varlen": True},
            4,
        ),
    ],
)
def test_reorder_threshold(config: Any, arguments: dict[str, Any], threshold: int | None) -> None:
    builder = Builder(config)
    assert builder.reorder_batch_threshold is None
    builder._init_reorder_batch_threshold(**arguments)
    assert builder.reorder_batch_threshold == threshold
    assert Builder.reorder_batch_threshold is None


def test_capture_and_drafts_are_built_by_build() -> None:
    builder, batch = Builder(VllmConfig()), make_batch([1], [5], [[3]], 16)
    assert builder.build_for_cudagraph_capture(batch) == 1
    assert builder.build_for_drafting(batch, draft_index=2) == 2
    assert builder.calls == [(0, batch, False), (0, batch, True)]


def test_defaults_promise_nothing() -> None:
    builder = Builder(VllmConfig())
    assert Builder.get_cudagraph_support(VllmConfig(), SPEC) is AttentionCGSupport.NEVER
    assert Builder.get_varlen_cudagraph_max_query_len(VllmConfig(), SPEC) is None
    assert not builder.use_cascade_attention(64, np.ones(4), 8, 2, False, False, False, 100, 1)
    assert not builder.supports_update_block_table
    assert not builder.requires_block_table_width
    with pytest.raises(NotImplementedError):
        builder.update_block_table(1, torch.zeros(1), torch.zeros(1))
    with pytest.raises(NotImplementedError):
        builder.update_draft_decode_metadata(1)


def test_the_kernels_block_size_is_told_apart_from_the_specs() -> None:
    builder = Builder(VllmConfig())
    assert builder.kernel_block_size is None
    builder.set_kernel_block_size(8)
    assert (builder.kernel_block_size, builder.kv_cache_spec.block_size) == (8, 16)


def test_the_batch_itself_as_plan_updates_as_it_is_built() -> None:
    builder = CommonMetadataBuilder(SPEC, ["a"], VllmConfig(), torch.device("cpu"))
    a = make_batch([3, 1], [3, 20], [[5], [7, 2]], 16)
    b = make_batch([3, 1], [3, 20], [[1], [9, 4]], 16)
    plan = builder.build(0, a)
    assert plan is a
    updated = builder.update_block_table(plan, b.block_table_tensor, b.slot_mapping)
    rebuilt = builder.build(0, b)
    for name in ("block_table_tensor", "slot_mapping", "seq_lens", "query_start_loc"):
        assert torch.equal(getattr(updated, name), getattr(rebuilt, name))
    assert not torch.equal(a.slot_mapping, b.slot_mapping)
    assert torch.equal(plan.slot_mapping, a.slot_mapping)
