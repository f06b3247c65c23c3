"""Repeated launches of the Gluon kernels: tensor maps move, and results are those of first launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import Attention, MLAAttention, PagedKVCache, make_batch
from attnkit.backends.hopper.launch import Operands, States, decode_call, score_config
from attnkit.backends.hopper.tuning import decode_config
from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.repeat import Repeats
from attnkit.contract import AttentionVariant, MLADimensions


class Compiled:
    """A jitted function and what its first launch returns: started again, that notes its arguments."""

    arg_names = ("q_desc", "v_desc")
    packed_metadata = ()

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*values: Any, **arguments: Any) -> Compiled:
            if values:
                self.launches.append(values)
            return self

        return launch


def test_tensor_maps_move_to_another_tensor_and_keep_the_address_of_the_cache() -> None:
    config = decode_config(128, 4, 16, score_config(AttentionVariant(scale=1.0), lse=False), 16)
    cache = torch.zeros(6, 2, 16, 256, dtype=torch.bfloat16)
    query = torch.zeros(3, 8, 128, dtype=torch.bfloat16)
    work = torch.zeros(64, dtype=torch.int32)
    call = decode_call(
        Operands(
            query=query,
            key=cache[..., :128],
            value=cache[..., 128:],
            output=torch.empty_like(query),
            lse=None,
            block_table=work.view(1, -1),
        ),
        AttentionVariant(scale=1.0),
        work,
        work.view(-1, 16),
        States.make(4, config, "cpu"),
        config,
    )
    kernel = Compiled()
    call = KernelCall(
        kernel=kernel, grid=call.grid, arguments=call.arguments, options={}, device=call.device
    )
    repeats = Repeats()
    longer = torch.zeros(7, 8, 128, dtype=torch.bfloat16)
    for q in (query, longer):
        repeats.launch(("key",), cache, (4,), {"q_desc": q}, lambda: call)
    ((moved, values),) = kernel.launches
    assert moved.base is longer
    assert moved.shape == [7, 2, 4, 128]
    assert moved.strides == call.arguments["q_desc"].strides
    assert call.arguments["q_desc"].shape == [3, 2, 4, 128]
    assert values.base.data_ptr() == cache[..., 128:].data_ptr()
    assert not isinstance(values.base, torch.Tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_repeated_launches_compute_what_first_ones_do(kv_cache_dtype: str) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm_90")
    device = "cuda"

    def make() -> tuple[Attention, torch.Tensor]:
        layer = Attention(
            32,
            128,
            num_kv_heads=8,
            dtype=torch.bfloat16,
            device=device,
            backend="hopper",
            kv_cache_dtype=kv_cache_dtype,
        )
        spec = layer.get_kv_cache_spec()
        assert spec is not None
        return layer, PagedKVCache({layer.layer_name: spec}, 40, device=device)[layer.layer_name]

    layer, cache = make()
    for lens in ([5, 60, 64], [1, 1, 1], [3, 40, 1], [1, 1, 1]):
        kv_lens = [n + 3 for n in lens]
        tables = [[1 + 5 * i + j for j in range(-(-n // 16))] for i, n in enumerate(kv_lens)]
        batch = make_batch(lens, kv_lens, tables, 16, device=device)
        fresh, other = make()
        other.copy_(cache)
        shape = (sum(lens), 32 + 16, 128)
        q, k, v = torch.randn(shape, dtype=torch.bfloat16, device=device).split([32, 8, 8], dim=1)
        out = layer(q, k, v, cache, layer.make_builder().build(0, batch))
        want = fresh(q, k, v, other, fresh.make_builder().build(0, batch))
        assert torch.equal(out, want)
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_repeated_launches_over_latents_compute_what_first_ones_do(
    kv_cache_dtype: str, num_heads: int
) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm_90")
    new = {"dtype": torch.bfloat16, "device": "cuda"}
    projection = torch.nn.Linear(512, num_heads * 256, bias=False, **new)

    def make() -> tuple[MLAAttention, torch.Tensor]:
        layer = MLAAttention(
            num_heads,
            MLADimensions(
                kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
            ),
            projection,
            192**-0.5,
            backend="hopper_mla",
            kv_cache_dtype=kv_cache_dtype,
            block_size=64,
            **new,
        )
        layer.process_weights_after_loading(torch.bfloat16)
        spec = {layer.layer_name: layer.get_kv_cache_spec()}
        return layer, PagedKVCache(spec, 40, device="cuda")[layer.layer_name]

    layer, cache = make()
    for lens in ([5, 3, 4], [1, 1, 1], [3, 4, 1], [1, 1, 1]):
        kv_lens = [n + 150 for n in lens]
        tables = [[1 + 3 * i + j for j in range(3)] for i in range(3)]
        batch = make_batch(lens, kv_lens, tables, 64, device="cuda")
        fresh, other = make()
        other.copy_(cache)
        q = torch.randn(sum(lens), num_heads, 192, **new)
        latents, rope = torch.randn(sum(lens), 576, **new).split([512, 64], dim=1)
        out = layer(q, latents, rope, cache, layer.make_builder().build(0, batch))
        want = fresh(q, latents, rope, other, fresh.make_builder().build(0, batch))
        assert torch.equal(out, want)
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))
