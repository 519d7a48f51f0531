"""When two modules may run one program: layers that repeat are compiled once.

Layers of one class, with tensors of one structure, share a program where Dynamo's guards hold for both: then
the second is not even traced. Others may have the same graphs, too: that shows when the graphs are there,
before they are compiled.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from zbpp.autograd.compiled.graphs import placeholders
from zbpp.autograd.compiled.joint import Joint


def signature(value: Any) -> Hashable:
    """What graphs depend on in an argument."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), value


def structure_of(module: nn.Module) -> Hashable:
    """Names, shapes, types and ties of a module's parameters and buffers."""
    places: dict[int, int] = {}  # tied tensors have one
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return tuple((name, places.setdefault(id(each), len(places)), signature(each)) for name, each in tensors)


def text_of(joint: Joint) -> str:
    """All that a program depends on."""
    graphs = joint.forward, joint.backward
    inputs = [signature(node.meta.get("val")) for graph in graphs for node in placeholders(graph)]
    constants = [_constants(graph) for graph in graphs]
    rest = [each for each in joint if not isinstance(each, GraphModule)]
    return "\n".join(map(str, [*(graph.code for graph in graphs), inputs, constants, rest]))


def _constants(graph: GraphModule) -> list[Any]:
    found = [getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")]
    return [each.tolist() if isinstance(each, Tensor) else id(each) for each in found]
