"""What a plan may assume of a batch, what is launched for it, and that it survives a graph's replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_problem import DEVICE

from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.triton import configs
from attnkit.backends.triton.backend import TritonBackend
from attnkit.backends.triton.plan import Workspace
from attnkit.batch import make_batch
from attnkit.conformance.oracle import Meaning, attend
from attnkit.contract import AttentionCGSupport, CommonAttentionMetadata, VllmConfig
from attnkit.kvcache.pool import PagedKVCache
from attnkit.layer import Attention

PAGE = 16


def make_layer(**facts: Any) -> Attention:
    return Attention(
        4, 32, num_kv_heads=2, backend=TritonBackend, block_size=PAGE, device=DEVICE, **facts
    )


def make_step(query_lens: list[int], seq_lens: list[int], **how: Any) -> CommonAttentionMetadata:
    """A batch whose request r owns pages 1 + 8 r to 8 + 8 r."""
    tables = [list(range(1 + 8 * r, 9 + 8 * r)) for r in range(len(query_lens))]
    return make_batch(query_lens, seq_lens, tables, PAGE, device=DEVICE, **how)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched from here on."""
    names: list[str] = []
    start = KernelCall.launch

    def spy(call: KernelCall) -> None:
        names.append(call.kernel.__name__)
        start(call)

    monkeypatch.setattr(KernelCall, "launch", spy)
    return names


def run(layer: Attention, plan: Any, num_tokens: int) -> Any:
    cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 64, device=DEVICE)
    q = torch.randn(num_tokens, 4, 32, device=DEVICE)
    k, v = torch.randn(2, num_tokens, 2, 32, device=DEVICE)
    return layer(q, k, v, cache[layer.layer_name], plan)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "kernels"),
    [
        ([1, 1], [30, 9], ["decode_kernel"]),
        ([4, 2], [30, 9], ["decode_kernel"]),
        ([30, 9], [30, 9], ["attention_kernel"]),
        ([1, 9], [30, 9], ["decode_kernel", "attention_kernel"]),
        ([9, 1], [9, 30], ["decode_kernel", "attention_kernel"]),
    ],
    ids=["decodes", "verification", "prompts", "mixed", "decode_last"],
)
def test_only_kernels_with_work_are_launched(
    launched: list[str], query_lens: list[int], seq_lens: list[int], kernels: list[str]
) -> None:
    layer = make_layer()
    run(layer, layer.build(make_step(query_lens, seq_lens)), sum(query_lens))
    assert launched == ["write_kernel", *kernels]


def test_a_decode_beside_a_long_one_is_split(launched: list[str]) -> None:
    layer = make_layer()
    batch = make_step([1, 1], [100, 9]).replace(max_seq_len=5000)
    run(layer, layer.build(batch), 2)
    assert launched == ["write_kernel", "decode_kernel", "merge_kernel"]


def test_drafts_of_the_engine_are_decoded() -> None:
    """1 + 6 drafts are more than fit beside a group of 2 for free."""

    class Speculative:
        num_speculative_tokens = 6
        parallel_drafting = False

    layer = make_layer(vllm_config=VllmConfig(speculative_config=Speculative()))  # type: ignore[arg-type]
    plan = layer.build(make_step([7, 7], [50, 20]))
    assert configs.decode_query_len(2, plan.decode_query_len) == 7
    assert configs.decode_query_len(2, 1) == 4
    assert configs.decode_query_len(8, 1) == 2
    assert configs.decode_query_len(71, 1) == 1


def test_a_captured_plan_serves_any_batch_put_into_its_tensors() -> None:
    """The builder says ALWAYS: lengths, pages and the mix of queries change under a plan that was made
    for a prompt of 12 among padding; only tokens, requests and the longest query are bounds."""
    layer = make_layer(return_lse=True)
    builder = layer.make_builder()
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    assert builder.get_cudagraph_support(VllmConfig(), spec) is AttentionCGSupport.ALWAYS
    table = torch.zeros(4, 8, dtype=torch.int32, device=DEVICE)
    captured = make_step([12, 0, 0, 0], [12, 0, 0, 0]).replace(block_table_tensor=table)
    plan = builder.build_for_cudagraph_capture(captured)
    kv_cache = PagedKVCache({layer.layer_name: spec}, 64, device=DEVICE)[layer.layer_name]
    history: dict[int, list[torch.Tensor]] = {r: [] for r in range(4)}
    lens = [0, 0, 0, 0]
    generator = torch.Generator().manual_seed(0)
    for query_lens in ([7, 3, 2, 0], [1, 1, 1, 1], [1, 8, 0, 3], [0, 0, 0, 12], [5, 1, 5, 1]):
        lens = [n + q for n, q in zip(lens, query_lens, strict=True)]
        step = make_step(query_lens, lens)
        num_tokens = sum(query_lens)
        captured.slot_mapping.fill_(-1)
        captured.slot_mapping[:num_tokens] = step.slot_mapping
        captured.query_start_loc.copy_(step.query_start_loc)
        captured.seq_lens.copy_(step.seq_lens)
        table[:, : step.block_table_tensor.shape[1]] = step.block_table_tensor
        q, k, v = (
            torch.randn(12, heads, 32, generator=generator).to(DEVICE) for heads in (4, 2, 2)
        )
        out, lse = layer(q, k, v, kv_cache, plan)
        row = 0
        for r, q_len in enumerate(query_lens):
            rows = slice(row, row + q_len)
            row = rows.stop
            history[r].append(torch.stack([k[rows], v[rows]]).cpu())
            keys, values = torch.cat(history[r], dim=1).double().numpy()
            answer = attend(q[rows].double().cpu().numpy(), keys, values, Meaning(scale=32**-0.5))
            assert torch.allclose(out[rows].cpu().double(), torch.from_numpy(answer.out), atol=1e-5)
            assert torch.allclose(lse[rows].cpu().double(), torch.from_numpy(answer.lse), atol=1e-5)


def test_a_plan_follows_lengths_that_drafting_moves_in_place() -> None:
    layer = make_layer()
    builder = layer.make_builder()
    assert builder.supports_draft_decode_metadata_update
    batch = make_step([1, 1], [20, 31])
    plan = builder.build(0, batch)
    batch.seq_lens.add_(1)
    builder.update_draft_decode_metadata(plan)
    moved = make_step([1, 1], [21, 32])
    cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 64, device=DEVICE)
    kv_cache = cache[layer.layer_name]
    kv_cache.normal_()
    q, k, v = torch.randn(2, 4, 32), torch.randn(2, 2, 32), torch.randn(2, 2, 32)
    q, k, v = q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)
    want = layer(q, k, v, kv_cache, builder.build(0, moved))
    batch.slot_mapping.copy_(moved.slot_mapping)
    assert torch.equal(layer(q, k, v, kv_cache, plan), want)


def test_the_plan_of_a_cross_attention_layer_has_the_encoders_lengths() -> None:
    lens = torch.tensor([7, 3], dtype=torch.int32)
    batch = make_step([1, 2], [40, 2]).replace(
        encoder_seq_lens=lens.to(DEVICE), encoder_seq_lens_cpu=lens.numpy()
    )
    plan = make_layer(attn_type="encoder_decoder").build(batch)
    assert (plan.kv_lens.tolist(), plan.max_kv_len) == ([7, 3], 7)
    assert make_layer().build(batch).kv_lens.tolist() == [40, 2]


def test_workspace_grows_and_keeps_what_graphs_may_hold() -> None:
    workspace = Workspace(DEVICE)
    small = workspace.reserve(10)
    assert workspace.reserve(5).data_ptr() == small.data_ptr()
    large = workspace.reserve(1000)
    assert large.numel() >= 1000
    assert large.data_ptr() != small.data_ptr()
    assert workspace.reserve(10).data_ptr() == large.data_ptr()
    assert workspace._memory[0] is small


def test_splits_fill_the_device_and_level_uneven_batches() -> None:
    def splits(programs: int, **how: Any) -> int:
        return configs.num_splits(programs, 132, 32, **how)

    assert splits(8) == 32
    assert splits(64) == 8
    assert splits(512) == 1
    assert splits(0) == 32
    assert splits(512, longest_to_mean=6.5) == 6
    assert splits(512, longest_to_mean=1.9) == 1
    assert splits(512, is_captured=True) == 4
    assert configs.num_splits(8, 132, 2) == 2


def test_br126_one_long_request_fills_the_device() -> None:
    """BR-126: a split count with a low limit left most of a device idle. 8 KV heads, 132
    multiprocessors: programs grow with the context until there are some three on each."""
    config = configs.decode_config(128, 128, 2, 2, 4, configs.HOPPER)

    def programs(num_keys: int) -> int:
        most = min(config.max_segments, -(-num_keys // config.segment))
        return 8 * configs.num_splits(8, 132, most)

    assert [programs(n) for n in (256, 1024, 4096)] == [8, 32, 128]
    assert programs(16_384) >= 3 * 132
    assert programs(65_536) >= programs(16_384)


def test_every_config_fits_its_device() -> None:
    """Tiles are powers of two of at least 16, segments whole tiles, and K/V buffers fit the smallest
    device that the backend says it runs on."""
    smallest = configs.Gpu(num_sms=20, shared_memory=101376, has_wgmma=False)
    for gpu in (configs.HOPPER, smallest):
        for head_size in range(8, 513, 8):
            for itemsize, kv_itemsize in ((2, 2), (4, 4), (2, 4), (4, 2)):
                sizes = (head_size, head_size, itemsize, kv_itemsize)
                decode = configs.decode_config(*sizes, 16, gpu)
                assert decode.segment % decode.block_n == 0
                for config in (configs.attention_config(*sizes, gpu), decode):
                    for block in (config.block_m, config.block_n):
                        assert block >= 16
                        assert block & (block - 1) == 0
                    tile = config.block_n * 2 * configs.padded(head_size) * kv_itemsize
                    in_use = 0 if gpu.has_wgmma and config.block_m >= 64 else 1
                    assert tile * max(1, config.num_stages - in_use) <= gpu.shared_memory
