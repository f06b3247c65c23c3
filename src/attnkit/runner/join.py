"""JoinLinears: linear layers of the same rows become one node of a compiled graph.

In: a graph with nodes `torch.ops.attnkit.linear`. Out: the same graph where those that read one tensor
(queries, keys and values; gate and up) are one `torch.ops.attnkit.linears`: one call and one waking of
threads instead of two or three.
"""

from __future__ import annotations

import operator

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.node import Argument

from attnkit.runner.linear import LINEAR, LINEARS


class JoinLinears(CustomGraphPass):
    """A pass over graphs of ATen operations."""

    def __call__(self, graph: fx.Graph) -> None:
        groups: dict[tuple[Argument, Argument], list[fx.Node]] = {}
        for node in graph.find_nodes(op="call_function", target=LINEAR):
            x, _, _, dtype = node.args
            groups.setdefault((x, dtype), []).append(node)
        for (x, dtype), nodes in groups.items():
            if len(nodes) > 1:
                _join(graph, x, dtype, nodes)

    def uuid(self) -> bytes:
        """What graphs kept on disk depend on."""
        return get_hash_for_files((__file__,))


def _join(graph: fx.Graph, x: Argument, dtype: Argument, nodes: list[fx.Node]) -> None:
    handles, sizes = ([node.args[i] for node in nodes] for i in (1, 2))
    with graph.inserting_before(nodes[0]):
        joined = graph.call_function(LINEARS, (x, handles, sizes, dtype))
        joined.meta["val"] = [node.meta["val"] for node in nodes]
        for i, node in enumerate(nodes):
            product = graph.call_function(operator.getitem, (joined, i))
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
    for node in nodes:
        graph.erase_node(node)
