"""Keys of the cache of CompiledSplits: layers that repeat are compiled once.

Layers of the same class, with tensors of the same structure, share a CompiledSplit if Dynamo's guards pass
for both: then the second layer is not even traced. Other layers may turn out to have the same graphs after
they were traced: then these graphs are not compiled again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from zbpp.autograd.compiled.aot_autograd import Joint
from zbpp.autograd.compiled.fx_graphs import placeholders


def signature(value: Any) -> Hashable:
    """The properties of an argument that its graphs depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), value


def structure_of(module: nn.Module) -> Hashable:
    """Names, shapes, types and ties of a module's parameters and buffers."""
    places: dict[int, int] = {}  # tied tensors share one place
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return tuple((name, places.setdefault(id(each), len(places)), signature(each)) for name, each in tensors)


def text_of(joint: Joint) -> str:
    """Everything that the CompiledSplit of these graphs depends on."""
    graphs = joint.forward, joint.backward
    inputs = [signature(node.meta.get("val")) for graph in graphs for node in placeholders(graph)]
    constants = [_constants(graph) for graph in graphs]
    rest = [each for each in joint if not isinstance(each, GraphModule)]
    return "\n".join(map(str, [*(graph.code for graph in graphs), inputs, constants, rest]))


def _constants(graph: GraphModule) -> list[Any]:
    found = [getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")]
    return [each.tolist() if isinstance(each, Tensor) else id(each) for each in found]
