"""Adapters to libraries, over doubles of these: what they pass means what the libraries say it means.

The doubles (`rival_doubles`) have the published signatures and compute in plain torch, so the kit judges
the arguments: pages, lengths, scale, window, soft cap, and what becomes of the LSE that is returned.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

import rival_doubles as doubles
from attnkit import Attention, make_batch
from attnkit.backends import flash_attn, flashinfer, libraries
from attnkit.backends.flash_attn import FlashAttnBackend
from attnkit.backends.flashinfer import FlashInferBackend, Paging
from attnkit.conformance import verify
from attnkit.contract import AttentionBackend, DeviceCapability
from attnkit.errors import BackendUnavailable, BatchError, UnsupportedConfiguration
from attnkit.selection import AttentionRequest, decide, reasons_against, select

FLOATS: list[torch.dtype] = [torch.float32, torch.float16, torch.bfloat16]


class FlashAttnHere(FlashAttnBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = FLOATS

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True


class FlashInferHere(FlashInferBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = FLOATS

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True


LIBRARIES = [
    pytest.param(FlashAttnHere, doubles.dao_flash_attention_3, id="dao-3"),
    pytest.param(FlashAttnHere, doubles.vllm_flash_attention, id="vllm-3"),
    pytest.param(FlashAttnHere, doubles.flash_attention_2, id="dao-2"),
    pytest.param(FlashInferHere, doubles.flashinfer, id="flashinfer"),
]


def install(monkeypatch: pytest.MonkeyPatch, library: ModuleType) -> None:
    """Let a double stand where the library would be installed."""
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setattr(flash_attn, "is_installed", lambda name: name == library.__name__)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 64)


@pytest.mark.parametrize(("backend", "library"), LIBRARIES)
@pytest.mark.parametrize(
    ("filter", "at_least"), [("-mixed-fp32", 14), ("-decode-bf16", 9), ("law:parts_merge", 1)]
)
def test_an_adapter_passes_the_kit_over_its_double(
    monkeypatch: pytest.MonkeyPatch,
    backend: type[AttentionBackend],
    library: Any,
    filter: str,
    at_least: int,
) -> None:
    install(monkeypatch, library())
    report = verify(backend, filter=filter)
    assert report.ok, str(report)
    assert len(report.passed) >= at_least, str(report)


@pytest.mark.parametrize(("backend", "library"), LIBRARIES)
def test_rows_without_keys_and_empty_requests(
    monkeypatch: pytest.MonkeyPatch, backend: type[AttentionBackend], library: Any
) -> None:
    install(monkeypatch, library())
    for name in ("no_key_at_all", "only_empty_requests", "more_queries_than_keys-sinks"):
        report = verify(backend, filter=f"case:{name}")
        assert report.ok, str(report)


@pytest.mark.parametrize(("backend", "library"), LIBRARIES)
def test_what_an_adapter_claims_it_does(
    monkeypatch: pytest.MonkeyPatch, backend: type[AttentionBackend], library: Any
) -> None:
    install(monkeypatch, library())
    report = verify(backend, filter="claim:")
    assert not report.failed, str(report)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sliding_window": 4}, "sliding window"),
        ({"alibi_slopes": [1.0, 1.0]}, "ALiBi"),
        ({"attn_type": "encoder"}, "attention type encoder"),
    ],
)
@pytest.mark.parametrize(
    "backend", [FlashAttnHere, FlashInferHere], ids=lambda backend: backend.get_name()
)
def test_an_impl_refuses_what_its_class_does(
    backend: type[AttentionBackend], arguments: dict[str, Any], named: str
) -> None:
    impl_cls: Any = backend.get_impl_cls()
    with pytest.raises(UnsupportedConfiguration, match=f"{named} is asked for"):
        impl_cls(2, 64, 1.0, **arguments)


@pytest.mark.parametrize(("backend", "library"), LIBRARIES)
def test_a_batch_that_is_not_causal_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: type[AttentionBackend], library: Any
) -> None:
    install(monkeypatch, library())
    layer = Attention(2, 64, backend=backend, block_size=backend_pages(backend))
    batch = make_batch([1], [1], [[1]], layer.block_size, causal=False)
    with pytest.raises(BatchError, match="is for causal batches"):
        layer.build(batch)
    with pytest.raises(BatchError, match="does causal batches only"):
        layer.make_builder(["a"]).build(0, batch)


def backend_pages(backend: type[AttentionBackend]) -> int:
    size = backend.get_supported_kernel_block_sizes()[0]
    return size if isinstance(size, int) else size.base


def test_layers_of_a_kind_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = doubles.flashinfer()
    install(monkeypatch, library)
    planned = []
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper
    plan = wrapper.plan
    monkeypatch.setattr(
        wrapper, "plan", lambda self, *a, **kw: (planned.append(kw), plan(self, *a, **kw))
    )
    layers = [Attention(2, 64, backend=FlashInferHere, logits_soft_cap=c) for c in (None, None, 3)]
    step = layers[0].build(make_batch([1, 1], [5, 20], [[1], [2, 3]], 16))
    cache = torch.zeros(4, 2, 16, 128)
    q = torch.ones(2, 2, 64)
    for layer in layers:
        layer(q, q, q, cache, step)
    assert [kw["logits_soft_cap"] for kw in planned] == [None, 3]


def test_pages_in_a_row() -> None:
    table = torch.tensor([[7, 3, 0], [5, 0, 0], [0, 0, 0], [2, 4, 6]], dtype=torch.int32)
    paging = Paging.of(table, torch.tensor([17, 16, 0, 40]), 16)
    assert paging.offsets.tolist() == [0, 2, 3, 3, 6]
    assert paging.pages.tolist() == [7, 3, 5, 2, 4, 6]
    assert paging.last_page_len.tolist() == [1, 16, 0, 8]
    assert {x.dtype for x in (paging.offsets, paging.pages, paging.last_page_len)} == {torch.int32}


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("flash_attn", "none of flash_attn_interface, vllm.* is installed"),
        ("flashinfer", "flashinfer is not installed"),
    ],
)
def test_a_missing_library_is_a_reason(name: str, named: str) -> None:
    request = AttentionRequest(
        head_size=128, dtype=torch.bfloat16, device_capability=DeviceCapability.parse("sm_90")
    )
    with pytest.raises(BackendUnavailable, match=named):
        select(request, name)
    (decision,) = [d for d in decide(request) if d.name == name]
    assert any("installed" in reason for reason in decision.reasons)
    assert not reasons_against(select(request, name, here=False).backend, request, here=False)


def test_a_broken_library_raises_its_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("import a_kernel_library_that_is_gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_attn.flash_attention_module() == "flash_attn_interface"
    with pytest.raises(ModuleNotFoundError, match="a_kernel_library_that_is_gone"):
        Attention(2, 64, backend=FlashAttnHere)


def test_a_module_is_found_without_importing_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    inner = tmp_path / "a_package" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "a_package" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (inner / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert libraries.is_installed("a_package.inner.part")
    assert not libraries.is_installed("a_package.inner.other")
    assert not libraries.is_installed("no_such_package.inner.part")


def test_a_sink_joins_afterwards() -> None:
    lse = torch.tensor([[0.0, -math.inf], [2.0, 1.0]])
    out = torch.ones(2, 2, 4)
    got, total = libraries.join_sinks(out, lse, torch.tensor([0.0, -math.inf]))
    torch.testing.assert_close(got[:, 0, 0], torch.tensor([0.5, 1 / (1 + math.exp(-2))]))
    assert got[:, 1, 0].tolist() == [0.0, 1.0]
    assert total[:, 1].tolist() == [-math.inf, 1.0]
    torch.testing.assert_close(total[0, 0], torch.tensor(math.log(2)))


# flex needs no double. Its eager form is slow: here is what each mask and score needs, the whole kit is
# `attnkit verify flex`.


@pytest.mark.parametrize(
    "filter",
    [
        "case:all-mixed",
        "case:window_freed-mixed-fp32",
        "case:alibi_sqrt-mixed-fp32",
        "case:non_causal-mixed-fp32",
        "case:mm_prefix-mixed-fp32",
        "case:rswa-mixed-fp32",
        "case:tree-mixed-fp32",
        "case:encoder_only-mixed-fp32",
        "case:cross-mixed-fp32",
        "case:wide_values-mixed-fp32",
        "case:fp8-mixed-bf16",
        "case:no_request",
        "case:no_key_at_all",
        "law:a_tree_is_its_paths",
    ],
)
def test_flex_passes_the_kit(filter: str) -> None:
    report = verify("flex", filter=filter)
    assert report.ok, str(report)
    assert not report.refused
