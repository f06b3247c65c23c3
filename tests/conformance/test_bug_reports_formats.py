"""Public bug reports, replayed: fp8 scales and cache formats.

Each test is named by its report in the list of replays (BR-nnn) and by the law that was broken, and
runs on every backend that can run here. A backend that refuses the format by name has answered.
"""

from __future__ import annotations

import math

import pytest
import torch
from replays import InputsOf, LayerOf, close, mean

from attnkit.batch import make_batch
from attnkit.conformance.case import Case
from attnkit.conformance.subject import Subject
from attnkit.kvcache.pool import PagedKVCache
from attnkit.layer import Attention

SCALE_KINDS = {
    "float": lambda x: x,
    "zero_dim": lambda x: torch.tensor(x),
    "one_element": lambda x: torch.tensor([x]),
}


def set_scales(layer: Attention, k: object, v: object) -> None:
    """As a checkpoint loader does: numbers in place, tensors assigned."""
    for name, scale in (("_k_scale", k), ("_v_scale", v)):
        if isinstance(scale, torch.Tensor):
            setattr(layer, name, scale.to(layer.device))
        else:
            getattr(layer, name).fill_(scale)
    layer.process_weights_after_loading(layer.dtype)


def prefill(
    layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One prompt through the layer, in block 2; results on the CPU."""
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    cache = PagedKVCache({"layer": spec}, 4, device=layer.device)
    batch = make_batch([len(q)], [len(q)], [[2]], layer.block_size, device=layer.device)
    q, k, v = (x.to(layer.device) for x in (q, k, v))
    answer = layer(q, k, v, cache["layer"], layer.build(batch))
    out, lse = answer if isinstance(answer, tuple) else (answer, None)
    return out.cpu(), None if lse is None else lse.cpu()


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("kind", SCALE_KINDS)
def test_br066_scales_reach_the_kernel(layer_of: LayerOf, kind: str, return_lse: bool) -> None:
    case = Case(
        name="br066",
        query_lens=(2,),
        seq_lens=(2,),
        num_heads=2,
        num_kv_heads=1,
        scale=1.0,
        kv_cache_dtype="fp8_e4m3",
        return_lse=return_lse,
    )
    layer = layer_of(case)
    set_scales(layer, SCALE_KINDS[kind](0.25), SCALE_KINDS[kind](0.5))
    q, k, v = torch.zeros(2, 2, 32), torch.zeros(2, 1, 32), torch.zeros(2, 1, 32)
    q[..., 0], k[1, :, 0], v[1] = 1.0, 2.0, 0.5  # Stored as codes 8 and 1.
    out, lse = prefill(layer, q, k, v)
    close(out[1], 0.440399)
    if lse is not None:
        close(lse[1], 2.126928)


def test_br068_the_value_scale_is_not_the_keys(subject: Subject, layer_of: LayerOf) -> None:
    case = Case(name="br068", query_lens=(3,), seq_lens=(3,), kv_cache_dtype="fp8", num_kv_heads=1)
    q, k = torch.zeros(3, 4, 32), torch.randn(3, 1, 32)
    layer_of(case)  # Or the backend refuses it.
    # One without the kit's scales: the value's is the default, 1.
    layer = Attention(
        4, 32, num_kv_heads=1, kv_cache_dtype="fp8", backend=subject.backend, device=subject.device
    )
    layer._k_scale.fill_(0.5)
    layer.process_weights_after_loading(layer.dtype)
    close(prefill(layer, q, k, torch.ones(3, 1, 32))[0], 1.0)
    set_scales(layer, 0.5, 1.5)
    close(prefill(layer, q, k, torch.full((3, 1, 32), 3.0))[0], 3.0)


@pytest.mark.parametrize("block_size", [16, 64])
def test_br070_what_is_written_as_e5m2_is_read_as_e5m2(layer_of: LayerOf, block_size: int) -> None:
    for value in (1.0, 2.0, 3.5, 0.25):
        case = Case(
            name="br070",
            query_lens=(1,),
            seq_lens=(1,),
            kv_cache_dtype="fp8_e5m2",
            block_size=block_size,
        )
        layer = layer_of(case)
        set_scales(layer, 1.0, 1.0)
        out, _ = prefill(
            layer, torch.zeros(1, 4, 32), torch.ones(1, 2, 32), torch.full((1, 2, 32), value)
        )
        assert (out == value).all()


@pytest.mark.parametrize("kv_len", [1, 7, 15, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head"])
def test_br072_stale_scales_of_the_last_page_do_not_show(
    subject: Subject, inputs_of: InputsOf, name: str, kv_len: int
) -> None:
    case = Case(name="br072", query_lens=(1,), seq_lens=(kv_len,), kv_cache_dtype=name)
    tokens = mean(case)
    outs = []
    for poison in (math.nan, 1e30, 0.0):
        layer, inputs = inputs_of(case, tokens, poison=poison)
        outs.append(subject.run(layer, inputs).out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    # One scale per vector: the largest value sets the error.
    step = 1 / 127 if name.startswith("int8") else 1 / 16
    assert (outs[0] - (kv_len - 1) / 2).abs().max() <= step * max(1, kv_len - 1)
