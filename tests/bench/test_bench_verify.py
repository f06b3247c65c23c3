"""The check before timing: what is right passes, what is wrong does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from attnkit.bench.contender import Prepared
from attnkit.bench.inputs import Inputs
from attnkit.bench.verify import WrongOutput, answer, check, nan_filled_allocations, tolerance
from attnkit.bench.workloads import LayerShape, Workload, decode, mixed, prefill, verify, write
from attnkit.conformance.oracle import Meaning, attend
from attnkit.contract import KVCacheLayout
from attnkit.kvcache.write import write_kv

LAYER = LayerShape(num_heads=6, num_kv_heads=2, head_size=24, block_size=16, dtype="float32")
WORKLOADS = [
    prefill(2, 37, LAYER),
    prefill(1, 30, LAYER, context=21),
    decode(9, 45, LAYER),
    verify(3, 4, 63, LAYER),
    mixed(33, 15, 5, 50, LAYER),
]


def oracle_output(inputs: Inputs) -> torch.Tensor:
    """Every row by the conformance kit's float64 oracle, which shares no code with the bench."""
    workload, outs = inputs.workload, []
    starts = inputs.batch.query_start_loc_cpu.tolist()
    meaning = Meaning(scale=1 / math.sqrt(workload.head_size))
    for request in range(workload.num_reqs):
        q = inputs.query[starts[request] : starts[request + 1]].double().numpy()
        k, v = (x.double().numpy() for x in inputs.sequence(request))
        outs.append(torch.from_numpy(attend(q, k, v, meaning).out))
    return torch.cat(outs).to(inputs.query.dtype)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_the_reference_agrees_with_the_conformance_oracle(workload: Workload) -> None:
    inputs = Inputs(workload, "cpu", seed=3)
    right = answer(inputs)
    assert len(right.rows) == len(set(right.rows.tolist()))
    torch.testing.assert_close(right.out.float(), oracle_output(inputs)[right.rows])


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_a_right_output_passes_with_its_error(workload: Workload) -> None:
    inputs = Inputs(workload, "cpu")
    out = oracle_output(inputs)
    assert check(inputs, Prepared(run=lambda: out), answer(inputs)) < 1e-6


def swapped_heads(inputs: Inputs) -> torch.Tensor:
    out = oracle_output(inputs)
    out[:, [0, 1]] = out[:, [1, 0]]
    return out


def one_wrong_row_and_head(inputs: Inputs) -> torch.Tensor:
    out = oracle_output(inputs)
    out[-1, 2] += 0.05
    return out


def unscaled(inputs: Inputs) -> torch.Tensor:
    inputs.query = inputs.query * 1.1
    try:
        return oracle_output(inputs)
    finally:
        inputs.query = inputs.query / 1.1


def one_nan(inputs: Inputs) -> torch.Tensor:
    out = oracle_output(inputs)
    out[0, 0, 0] = math.nan
    return out


@pytest.mark.parametrize("fault", [swapped_heads, one_wrong_row_and_head, unscaled, one_nan])
def test_a_wrong_output_is_refused(fault: Callable[[Inputs], torch.Tensor]) -> None:
    inputs = Inputs(decode(9, 45, LAYER), "cpu")
    out = fault(inputs)
    with pytest.raises(WrongOutput):
        check(inputs, Prepared(run=lambda: out), answer(inputs))


def test_an_element_nobody_wrote_is_found_although_old_memory_looks_right() -> None:
    inputs = Inputs(decode(3, 45, LAYER), "cpu")
    out = oracle_output(inputs)

    def leaves_a_head_out() -> torch.Tensor:
        mine = torch.empty_like(out)
        if not torch.are_deterministic_algorithms_enabled():
            mine[:, -1] = out[:, -1]  # what an earlier call may have left in this memory
        mine[:, :-1] = out[:, :-1]
        return mine

    with pytest.raises(WrongOutput, match="not written"):
        check(inputs, Prepared(run=leaves_a_head_out), answer(inputs))


def test_nan_filling_reaches_what_layers_allocate_and_ends_with_the_block() -> None:
    x = torch.zeros(3)
    with nan_filled_allocations():
        assert torch.isnan(torch.empty(4)).all()
        assert torch.isnan(x.new_empty(4)).all()
        assert torch.isnan(torch.empty_like(x)).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_tolerance_follows_the_dtype() -> None:
    def of(dtype: str, cache: str = "auto") -> float:
        return tolerance(decode(1, 16, LayerShape(dtype=dtype, kv_cache_dtype=cache)))

    assert of("float32") < of("float16") < of("bfloat16") < of("bfloat16", "int8_per_token_head")
    assert of("bfloat16", "fp8") == of("bfloat16")


WRITE = write(3, 20, LAYER)


def torch_write(inputs: Inputs, slots: torch.Tensor) -> Prepared:
    pages = inputs.pages(KVCacheLayout.LBHNC)
    key, value = inputs.new_tokens

    def run() -> torch.Tensor:
        write_kv(key, value, pages, slots)
        return pages

    return Prepared(run=run)


def test_a_right_write_passes() -> None:
    inputs = Inputs(WRITE, "cpu")
    assert check(inputs, torch_write(inputs, inputs.batch.slot_mapping), None) == 0.0


def test_a_write_that_skips_a_token_is_refused() -> None:
    inputs = Inputs(WRITE, "cpu")
    slots = inputs.batch.slot_mapping.clone()
    slots[17] = -1
    with pytest.raises(WrongOutput):
        check(inputs, torch_write(inputs, slots), None)


def test_a_write_beside_its_slots_is_refused() -> None:
    inputs = Inputs(WRITE, "cpu")
    pages = inputs.pages(KVCacheLayout.LBHNC)
    right = torch_write(inputs, inputs.batch.slot_mapping)

    def run() -> torch.Tensor:
        right.run()
        pages[0] += 1.0
        return pages

    with pytest.raises(WrongOutput, match="not of this step"):
        check(inputs, Prepared(run=run), None)
