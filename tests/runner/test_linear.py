"""PackedLinear and BlockedLinear: the same product, and nothing replaced that cannot be."""

import pytest
import torch
from torch import fx, nn

from attnkit.backends.cpu.native import native_kernels
from attnkit.runner.linear import (
    BlockedLinear,
    OpaqueLinear,
    PackedLinear,
    is_for_vectors,
    is_packable,
    pack_linears,
)

PACKABLE = [
    dtype
    for dtype in (torch.bfloat16, torch.float16)
    if is_packable(torch.zeros(1, 1, dtype=dtype))
]


def layer_of(kind: type[OpaqueLinear], linear: nn.Linear, name: str = "linear") -> OpaqueLinear:
    if kind is BlockedLinear and not is_for_vectors(linear):
        pytest.skip("the processor has instructions for bfloat16, or no vectors or native library")
    if kind is PackedLinear and not is_packable(linear.weight):
        pytest.skip("oneDNN has no kernels for this dtype here")
    return kind(linear, name)


class Tied(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24, dtype=dtype)
        self.hidden = nn.Sequential(nn.Linear(24, 56, dtype=dtype), nn.Linear(56, 24, dtype=dtype))
        self.head = nn.Linear(24, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 33, 64, 300])
@pytest.mark.parametrize("sizes", [(72, 200), (96, 608)])
def test_the_product_is_the_linear_layers(
    dtype: torch.dtype, bias: bool, rows: int, sizes: tuple[int, int]
) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(*sizes, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(rows, 1, 2 * sizes[0], dtype=dtype).transpose(0, 1)[..., : sizes[0]]
    check_product(PackedLinear(linear), linear, x)


def check_product(layer: OpaqueLinear, linear: nn.Linear, x: torch.Tensor) -> None:
    bias = None if linear.bias is None else linear.bias.double()
    exact = nn.functional.linear(x.double(), linear.weight.double(), bias)
    found = layer(x)
    assert found.shape == exact.shape
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.dtype) == (linear.weight.shape, linear.weight.dtype)
    if not x.numel():
        return
    plain = (linear(x).double() - exact).abs().max().item()
    error = (found.double() - exact).abs().max().item()
    assert error <= plain + torch.finfo(x.dtype).eps * exact.abs().max().item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, *range(1, 14), 16, 17, 33, 300])
def test_the_product_in_blocks_is_the_linear_layers(bias: bool, rows: int) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(96, 608, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(rows, 1, 192, dtype=torch.bfloat16).transpose(0, 1)[..., :96]
    check_product(layer_of(BlockedLinear, linear), linear, x)


def test_rows_in_blocks_are_taken_in_chunks_that_a_cache_holds() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16384, 64, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(53, 16384, dtype=torch.bfloat16)
    check_product(layer_of(BlockedLinear, linear), linear, x)


def test_infinities_and_nan_stay_in_their_rows_and_columns() -> None:
    linear = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight[3, 5] = torch.inf
    blocked = layer_of(BlockedLinear, linear)
    x = torch.ones(5, 64, dtype=torch.bfloat16)
    x[2] = torch.nan
    y = blocked(x)
    assert y[2].isnan().all()
    others = y[[0, 1, 3, 4]]
    assert (others[:, 3] == torch.inf).all()
    assert others[:, [i for i in range(64) if i != 3]].isfinite().all()


def own_kernel(packed: PackedLinear) -> None:
    if packed.native is None:
        pytest.skip("oneDNN multiplies few rows too: there is no matrix unit or no native library")


def test_a_matrix_unit_means_our_own_kernel_for_few_rows() -> None:
    kernels = native_kernels()
    if kernels is None or not kernels.has_matrix_unit:
        pytest.skip("there is no matrix unit, or no native library")
    whole, odd = (PackedLinear(nn.Linear(n, 64, dtype=torch.bfloat16)) for n in (96, 72))
    assert whole.native is not None
    assert odd.native is None


KINDS = [PackedLinear, BlockedLinear]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 31, 64])
def test_a_row_does_not_depend_on_its_mates(kind: type[OpaqueLinear], rows: int) -> None:
    packed = layer_of(kind, nn.Linear(96, 1024, dtype=torch.bfloat16).requires_grad_(False))
    if isinstance(packed, PackedLinear):
        own_kernel(packed)
    x = torch.randn(64, 96, dtype=torch.bfloat16)
    alone = packed(x)[:rows]
    x[rows:] = torch.nan
    assert torch.equal(packed(x)[:rows], alone)
    assert torch.equal(packed(x[:rows]), alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "x", [torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 96)], ids=["width", "dtype"]
)
def test_what_does_not_fit_is_refused(kind: type[OpaqueLinear], x: torch.Tensor) -> None:
    packed = layer_of(kind, nn.Linear(96, 64, dtype=torch.bfloat16).requires_grad_(False))
    with pytest.raises(RuntimeError):
        packed(x)


@pytest.mark.parametrize("dtype", PACKABLE)
def test_a_model_keeps_its_embedding_and_its_results(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tied(dtype).requires_grad_(False)
    ids = torch.arange(40)
    before = model.head(model.hidden(model.embed(ids)))
    assert pack_linears(model) == 3
    assert isinstance(model.head, PackedLinear)
    torch.testing.assert_close(model.head(model.hidden(model.embed(ids))), before)
    assert pack_linears(model) == 0


def test_whole_blocks_in_bfloat16_go_to_vectors_where_these_multiply() -> None:
    layers = [nn.Linear(n, 64, dtype=torch.bfloat16) for n in (96, 80)]
    layers.append(nn.Linear(96, 64, dtype=torch.float16))
    model = nn.Sequential(*layers).requires_grad_(False)
    fits = is_for_vectors(layers[0])
    pack_linears(model)
    assert [isinstance(m, BlockedLinear) for m in model] == [fits, False, False]


def test_float32_stays_as_it_is() -> None:
    model = Tied(torch.float32)
    assert pack_linears(model) == 0
    assert type(model.head) is nn.Linear


class OwnLinear(nn.Linear):
    """A layer with a forward of its own, as quantised ones have."""


def test_other_classes_stay_as_they_are() -> None:
    model = nn.Sequential(OwnLinear(8, 8, dtype=torch.bfloat16))
    assert pack_linears(model) == 0


@pytest.mark.parametrize("dtype", PACKABLE)
def test_a_graph_holds_a_handle_instead_of_the_weight(dtype: torch.dtype) -> None:
    linear = nn.Linear(24, 40, dtype=dtype).requires_grad_(False)
    packed = PackedLinear(linear, "model.head")
    graphs = []

    def keep(graph, inputs):
        graphs.append((graph, inputs))
        return graph

    x = torch.randn(3, 24, dtype=dtype)
    assert torch.equal(torch.compile(packed, backend=keep, fullgraph=True)(x), packed(x))
    ((graph, inputs),) = graphs
    (node,) = (n for n in graph.graph.nodes if n.op == "call_function")
    assert node.target is torch.ops.attnkit.linear
    assert node.args[1].startswith("model.head#")
    assert len(inputs) == 1, "x alone: a graph with packed weights cannot be kept on disk"


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_the_same_rows_become_one_node(kind: type[OpaqueLinear]) -> None:
    from attnkit.runner.join import JoinLinears  # torch._inductor, for those who compile

    layers = [
        layer_of(
            kind, nn.Linear(96, size, bias=size == 64, dtype=torch.bfloat16).requires_grad_(False)
        )
        for size in (64, 32, 608)
    ]
    after = layer_of(kind, nn.Linear(32, 64, dtype=torch.bfloat16).requires_grad_(False))
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [linear_node(graph, x, layer) for layer in layers]
    graph.output((*nodes, linear_node(graph, nodes[1], after)))
    JoinLinears()(graph)
    targets = [node.target for node in graph.nodes]
    assert targets.count(torch.ops.attnkit.linears.default) == 1
    assert targets.count(torch.ops.attnkit.linear.default) == 1
    run = fx.GraphModule({}, graph)
    for rows in (3, 300):
        given = torch.randn(rows, 96, dtype=torch.bfloat16)
        products = [layer(given) for layer in layers]
        for found, right in zip(run(given), [*products, after(products[1])], strict=True):
            assert torch.equal(found, right)


def linear_node(graph: fx.Graph, x: fx.Node, layer: OpaqueLinear) -> fx.Node:
    arguments = (x, layer._handle, layer.out_features, torch.bfloat16)
    node = graph.call_function(torch.ops.attnkit.linear.default, arguments)
    node.meta["val"] = torch.empty(0)
    return node
