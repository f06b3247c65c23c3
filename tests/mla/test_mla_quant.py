"""Layers over latents with outputs in codes: who writes those of prefills, and that they are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from attnkit import MLAAttention, PagedKVCache, make_batch
from attnkit.backends.triton.mla_prefill import TritonMLAPrefill
from attnkit.contract import MLADimensions, kFp8StaticTensorSym
from attnkit.output_quant import QuantizedOutput

SIZES = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
HEADS, SCALE = 2, torch.tensor(0.02)


@pytest.mark.parametrize(
    ("lens", "by_kernel"),
    [
        (([1, 12], [20, 12]), True),  # a decode, and a prompt
        (([12], [25]), False),  # a prompt with context, whose parts are merged
        (([1, 2], [20, 12]), False),  # decodes, whose values are a product
    ],
)
def test_static_codes_of_prefills_come_out_of_the_kernel(
    lens: Any, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    layer = MLAAttention(
        HEADS,
        SIZES,
        nn.Linear(32, HEADS * 32, bias=False).requires_grad_(False),
        backend="triton_mla",
        return_lse=True,
    )
    cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 6)[layer.layer_name]
    query_lens, seq_lens = lens
    plan = layer.build(make_batch(query_lens, seq_lens, [[1, 2], [4, 3]][: len(seq_lens)], 16))
    rows = sum(query_lens) + 2  # of which two are padding
    given = [torch.randn(rows, *n) for n in ((HEADS, 24), (32,), (8,))]
    cache.normal_()
    before = cache.clone()
    out, lse = layer(*given, cache, plan)
    cache.copy_(before)

    calls: list[Any] = []
    to_codes = TritonMLAPrefill.run_prefill_to_codes
    monkeypatch.setattr(
        TritonMLAPrefill, "run_prefill_to_codes", lambda *a: calls.append(to_codes(*a))
    )
    width = HEADS * SIZES.v_head_dim
    made, right = (
        QuantizedOutput.empty(kFp8StaticTensorSym, rows, width, scale=SCALE) for _ in range(2)
    )
    right.write(out)
    codes, coded_lse = layer(*given, cache, plan, quantized=made)
    assert codes is made.codes
    assert torch.equal(codes.view(torch.uint8), right.codes.view(torch.uint8))
    assert torch.equal(coded_lse, lse)
    assert len(calls) == by_kernel
