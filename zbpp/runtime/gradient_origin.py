"""Which operation of a backward made a gradient NaN or infinite: what came to it was finite, its result not.

Each node of the graph belongs to the innermost module whose forward made it: the nodes between a module's
outputs and its inputs are the module's, but for those of modules inside it, which return before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

_LEAF = "AccumulateGrad"


class Origin(NamedTuple):
    """value: "NaN", ... owner: the module's name. operation: of autograd, such as SqrtBackward0."""

    value: str
    owner: str
    operation: str


def nodes_of(values: Any) -> list[Node]:
    """The nodes that made the tensors of a nest."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    return [each.grad_fn for each in tensors if each.grad_fn is not None]


class GradientOrigins:
    """Watches the nodes of the graphs of one stage.

    kind_of: says what a nest of tensors holds beside numbers; "" for numbers alone.
    """

    def __init__(self, kind_of: Callable[[Any], str]) -> None:
        self._kind_of = kind_of
        self._owners: dict[Node, str] = {}  # the key keeps the node alive, so that no other has its identity
        self._first: Origin | None = None

    def own(self, owner: str, outputs: Iterable[Node], inputs: Collection[Node] = ()) -> None:
        """Give the nodes from outputs back to inputs, those without an owner, to `owner`; watch them."""
        ends, seen, waiting = set(inputs), set[Node](), list(outputs)
        while waiting:
            node = waiting.pop()
            if node in seen or node in ends:
                continue
            seen.add(node)
            waiting += [each for each, _ in node.next_functions if each is not None]
            if node not in self._owners and node.name().rpartition("::")[2] != _LEAF:
                self._owners[node] = owner
                self._watch(node.name(), node, owner)

    def taken(self) -> Origin | None:
        """The first such operation of the backward that has ended; forgets the graph."""
        found, self._first = self._first, None
        self._owners.clear()
        return found

    def _watch(self, operation: str, node: Node, owner: str) -> None:
        def look(made: Any, given: Any) -> None:
            if self._first is None and (value := self._kind_of(made)) and not self._kind_of(given):
                self._first = Origin(value, owner, operation)

        node.register_hook(look)
