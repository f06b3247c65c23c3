"""Under torch.compile a layer is one opaque node: same bits, same cache, nothing dropped or moved."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from attnkit import Attention, forward_context, make_batch
from attnkit.backends.reference import ReferenceBackend, ReferenceImpl
from attnkit.errors import BatchError
from attnkit.kvcache.write import write_kv

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
Outputs = tuple[torch.Tensor, ...]
GRAPHS = pytest.mark.parametrize("graph", ["eager", "aot_eager"])


class SplitImpl(ReferenceImpl):
    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        write_kv(key, value, kv_cache, slot_mapping)

    def forward(self, layer: Any, query: torch.Tensor, key: Any, value: Any, *rest: Any) -> Any:
        return super().forward(layer, query, None, None, *rest)  # type: ignore[arg-type]


class LayerWrites(ReferenceBackend):
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[ReferenceImpl]:
        return SplitImpl


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _layer(name: str, backend: Any = ReferenceBackend, **arguments: Any) -> Attention:
    facts = {"num_kv_heads": KV_HEADS, "block_size": BLOCK, "backend": backend}
    return Attention(HEADS, SIZE, layer_name=name, **{**facts, **arguments})


def _tokens(count: int) -> Outputs:
    g = torch.Generator().manual_seed(count)
    return tuple(torch.randn(count, h, SIZE, generator=g) for h in (HEADS, KV_HEADS, KV_HEADS))


def _caches(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((9, KV_HEADS, BLOCK, 2 * SIZE), math.nan) for name in names}


def _step(
    function: Callable[..., Any],
    layers: list[Attention],
    caches: Mapping[str, torch.Tensor],
    query_lens: list[int],
    seq_lens: list[int],
) -> Any:
    """Run `function` on the tokens of a step of two requests, in pages 7, 2 and 5, 1."""
    batch = make_batch(query_lens, seq_lens, [[7, 2], [5, 1]], BLOCK)
    with forward_context({layer.layer_name: layer.build(batch) for layer in layers}, caches):
        return function(*_tokens(sum(query_lens)))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    return len(a) == len(b) and all(map(_same, a, b))


def _compare(
    function: Callable[..., Any], layers: list[Attention], graph: str, cache_names: list[str]
) -> Any:
    """Prefill, then decode, eagerly and compiled: outputs and caches must be the same bits."""
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend=graph)):
        caches = _caches(*cache_names)
        outs = [
            _step(run, layers, caches, [5, 2], [5, 2]),
            _step(run, layers, caches, [1, 1], [6, 3]),
        ]
        results.append((outs, tuple(caches.values())))
    (eager, eager_caches), (compiled, compiled_caches) = results
    assert _same(eager, compiled)
    assert _same(eager_caches, compiled_caches)
    assert not all(bool(c.isnan().all()) for c in eager_caches)
    return eager


@GRAPHS
@pytest.mark.parametrize("backend", [ReferenceBackend, LayerWrites])
def test_two_layers_in_a_row(graph: str, backend: Any) -> None:
    a, b = _layer("a", backend), _layer("b", backend)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = a(q * 2, k, v).tanh()
        return b(hidden, k + 1, v * 3) + hidden

    _compare(model, [a, b], graph, ["a", "b"])


@GRAPHS
@pytest.mark.parametrize("backend", [ReferenceBackend, LayerWrites])
def test_a_write_is_kept_although_nobody_uses_the_output(graph: str, backend: Any) -> None:
    """BR-119: a cache update removed as dead code."""
    owner = _layer("owner", backend)
    reader = _layer("reader", backend, kv_sharing_target_layer_name="owner")

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        owner(q, k, v)
        return reader(q, None, None)

    eager = _compare(model, [owner, reader], graph, ["owner"])
    assert all(bool(out.isfinite().all()) for out in eager)


@GRAPHS
def test_a_reader_stays_behind_the_write_it_does_not_depend_on(graph: str) -> None:
    owner = _layer("owner")
    reader = _layer("reader", kv_sharing_target_layer_name="owner")

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        late = (q.exp() + 1).log().cumsum(0)
        first = owner(late, k, v)
        return reader(q, k, v), first

    _compare(model, [owner, reader], graph, ["owner"])


@GRAPHS
def test_an_lse_and_flat_tensors(graph: str) -> None:
    layer = _layer("a", return_lse=True)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        out, lse = layer(q.flatten(1), k.flatten(1), v.flatten(1))
        return out * 2, lse + 1

    (out, lse), _ = _compare(model, [layer], graph, ["a"])
    assert out.shape == (7, HEADS * SIZE)
    assert lse.shape == (7, HEADS)


def test_inductor_runs_it_too() -> None:
    owner = _layer("owner", LayerWrites)
    reader = _layer("reader", LayerWrites, kv_sharing_target_layer_name="owner")

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        owner(q, k, v)
        return reader(q, None, None)

    _compare(model, [owner, reader], "inductor", ["owner"])


def test_one_graph_serves_steps_of_any_length() -> None:
    layer = _layer("a")
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    caches = _caches("a")
    for query_lens, seq_lens in (([5, 2], [5, 2]), ([2, 3], [7, 5]), ([1, 1], [8, 6])):
        compiled = _step(run, [layer], caches, query_lens, seq_lens)
        assert torch.equal(compiled, _step(layer, [layer], caches, query_lens, seq_lens))
    assert counter.frame_count == 1


def test_a_graph_is_profiled_without_plans_and_refuses_a_forgotten_layer() -> None:
    layer, cache = _layer("a"), _caches("a")
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert not run(*_tokens(3)).any()
    with forward_context({}, cache):
        assert not run(*_tokens(3)).any()
    with (
        forward_context({"b": object()}, cache),
        pytest.raises(BatchError, match="no plan for layer a"),
    ):
        run(*_tokens(3))
    assert cache["a"].isnan().all()


def test_a_graph_takes_no_cache_and_no_plan() -> None:
    """Where the whole must be one graph that is an error; else the layer runs outside of it."""
    layer, caches = _layer("a"), _caches("a", "b")
    plan = layer.build(make_batch([3], [3], [[7]], BLOCK))
    run = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(Unsupported, match=r"put attnkit\.forward_context"):
        run(*_tokens(3), caches["a"], plan)
    assert caches["a"].isnan().all()
    run = torch.compile(layer, backend="eager")
    assert torch.equal(run(*_tokens(3), caches["a"], plan), layer(*_tokens(3), caches["b"], plan))


def test_a_copied_model_runs_its_own_layers() -> None:
    layer = _layer("a", sinks=torch.zeros(HEADS))
    twin = copy.deepcopy(layer)
    assert isinstance(twin.impl, ReferenceImpl)
    assert twin.impl.variant.sinks is not None
    twin.impl.variant.sinks.fill_(5.0)
    caches = _caches("a")
    outs = []
    for module in (layer, twin):
        run = torch.compile(module, fullgraph=True, backend="aot_eager")
        outs.append(_step(run, [module], caches, [5, 2], [5, 2]))
    assert outs[1].norm() < outs[0].norm()
    assert torch.equal(outs[1], _step(twin, [twin], caches, [5, 2], [5, 2]))


def test_the_node_keeps_what_it_tells_the_compiler() -> None:
    """Schema, fake implementation and dispatch as torch checks them, with and without LSE."""
    layer = _layer("a", return_lse=True)
    batch = make_batch([3], [3], [[7]], BLOCK)
    out, lse = torch.zeros(3, HEADS, SIZE), torch.zeros(3, HEADS)
    with forward_context({"a": layer.build(batch)}, _caches("a")):
        for rows in (lse, None):
            torch.library.opcheck(
                torch.ops.attnkit.attention.default,
                (*_tokens(3), out, rows, layer._order, layer._handle),
                test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
            )
    assert layer._order.tolist() == [0], "claimed to change, never changed"
