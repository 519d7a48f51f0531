"""When two modules may run one program: layers that repeat are compiled once.

Modules of one structure, which is quick to see, have the same graphs. Others may have them, too (layers
that know their number, say): that shows when the graphs are there, before they are compiled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from zbpp.autograd.compiled.graphs import placeholders
from zbpp.autograd.compiled.inductor import Joint

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}  # forward: of a compiled one
_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})


def signature(value: Any) -> Hashable:
    """What graphs depend on in an argument."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), value


def structure_of(module: nn.Module) -> Hashable:
    """All that a module's forward can depend on besides the numbers in its tensors."""
    places: dict[int, int] = {}  # tied tensors have one

    def tensors(found: dict[str, Tensor | None]) -> Hashable:
        return tuple(
            (name, each if each is None else (places.setdefault(id(each), len(places)), signature(each)))
            for name, each in found.items()
        )

    return tuple(
        (
            name,
            type(each),
            each.training,
            tensors(each._parameters),
            tensors(each._buffers),
            tuple(
                (key, _constant(value)) for key, value in vars(each).items() if key not in _OF_EVERY_MODULE
            ),
        )
        for name, each in module.named_modules()
    )


def plain_attributes(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Where modules keep numbers and strings, which a graph has as constants."""
    return [
        (vars(each), name)
        for each in modules
        for name, value in vars(each).items()
        if name not in _OF_EVERY_MODULE and type(value) in _PLAIN
    ]


def plain_values(places: Iterable[tuple[dict[str, Any], str]]) -> list[Any]:
    """What is there now: of what is no number or string any more, the type."""
    return [value if type(value := place.get(name)) in _PLAIN else type(value) for place, name in places]


def _constant(value: Any) -> Hashable:
    """Equal for equal plain values; else only for one and the same object."""
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_constant, value))
    return (type(value), value) if type(value) in _PLAIN else _Same(value)


class _Same:
    """Equal to what stands for the same object, which stays alive meanwhile."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


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
