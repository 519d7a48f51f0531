"""Leaves with hooks: W sums a microbatch's gradient, and autograd's engine takes it to the leaf's own node.

A leaf may have hooks of any kind. The engine runs them all, in the order of a plain backward:

    tasks of W ──sum──► gradient ──engine──► tensor hooks, multi-grad hooks │ prehooks of the leaf's node
                                             .grad or main_grad += gradient │ post-accumulate hooks
                                             hooks of the leaf's node

Leaves without hooks never come here: their tasks add to `.grad` themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from zbpp.autograd.hooks import multi_grad_hooks, without_hooks
from zbpp.autograd.leaf_grad import engine_adds_to_main_grad, set_aside
from zbpp.autograd.node_roles import is_leaf, leaf_tensor
from zbpp.autograd.weight_grads import Task, leaves_of

Give = Callable[[Sequence[Node], list[Tensor | None]], None]


class HookedTask:
    """The tasks of some leaves with hooks, as one task: one run of the engine delivers all their gradients.

    nodes: the leaves' AccumulateGrad nodes, in the order in which the engine reaches them. give: the function
    that gets nodes and gradients. A leaf without a gradient gets None, and its hooks run, too.
    """

    def __init__(self, nodes: Sequence[Node], tasks: list[Task]) -> None:
        self.nodes, self.tasks = nodes, tasks
        self.give: Give = give_to_leaves

    @property
    def leaf(self) -> Tensor:
        """The first of the leaves."""
        return leaf_tensor(self.nodes[0])

    def leaves(self) -> Iterator[Tensor]:
        """The leaves with hooks, and others whose gradients the same tasks compute."""
        found = (*self._hooked(), *(leaf for task in self.tasks for leaf in leaves_of(task)))
        return iter({id(leaf): leaf for leaf in found}.values())

    def _hooked(self) -> list[Tensor]:
        return [*map(leaf_tensor, self.nodes)]

    def tensors(self) -> Iterator[Tensor]:
        """See Task."""
        return (tensor for task in self.tasks for tensor in task.tensors())

    def accumulate(self) -> None:
        """Compute each leaf's gradient, and pass them to `give`."""
        hooked = self._hooked()
        with without_hooks(self.nodes), set_aside(hooked):
            while self.tasks:
                self.tasks.pop(0).accumulate()
            gradients = [leaf.grad for leaf in hooked]
        self.give(self.nodes, gradients)


def give_to_leaves(nodes: Sequence[Node], gradients: list[Tensor | None]) -> None:
    """Let the engine take gradients to AccumulateGrad nodes, one after the other, in one run.

    Empties the list: a gradient that nobody else holds becomes the leaf's `.grad` without a copy.
    """
    leaves, token = [leaf_tensor(node) for node in nodes], torch.empty(0)
    with torch.enable_grad():
        for leaf in reversed(leaves):
            gradient = [gradients.pop()]
            if leaf.requires_grad:  # a leaf may be frozen since B
                token = _ToLeaf.apply(gradient, leaf, token)  # type: ignore[no-untyped-call]  # torch's
    if token.requires_grad:
        with engine_adds_to_main_grad(leaves):
            torch.autograd.Variable._execution_engine.run_backward(
                (token,),
                (torch.empty_like(token),),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )


class _ToLeaf(torch.autograd.Function):
    """A node whose backward gives a gradient to a leaf, then goes on to the next such node."""

    @staticmethod
    def forward(ctx: Any, gradient: list[Tensor | None], leaf: Tensor, token: Tensor) -> Tensor:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=leaf.device)

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[None, Tensor | None, None]:
        return None, ctx.gradient.pop(), None


def grouped(tasks: list[Task], hooked: Mapping[int, Node]) -> list[Task]:
    """The tasks of W, with HookedTasks in place of the tasks of leaves with hooks.

    hooked: {id of a leaf with hooks: its node}; leaves of HookedTasks among `tasks` are grouped anew, too. A
    HookedTask stands where the last of its tasks stood. Two leaves are in one HookedTask if one task computes
    both their gradients, or if one multi-grad hook watches both. Raises ValueError for a multi-grad hook that
    also watches a tensor that is no leaf.
    """
    nodes = {**hooked, **{id(leaf_tensor(node)): node for each in tasks for node in _nodes_of(each)}}
    if not nodes:
        return tasks
    flat = [part for each in tasks for part in (each.tasks if isinstance(each, HookedTask) else (each,))]
    touched = [[id(leaf) for leaf in leaves_of(task) if id(leaf) in nodes] for task in flat]
    group_of = _joined([*touched, *_together(nodes), *([leaf] for leaf in nodes)])
    last = {leaf: place for place, leaves in enumerate(touched) for leaf in leaves}
    ordered = sorted(nodes, key=lambda leaf: last.get(leaf, len(flat)))
    made: list[tuple[int, HookedTask]] = []
    for group in {id(each): each for each in group_of.values()}.values():
        members = [leaf for leaf in ordered if leaf in group]
        own = [task for task, leaves in zip(flat, touched, strict=True) if leaves and leaves[0] in group]
        place = max(last.get(leaf, len(flat)) for leaf in members)
        made.append((place, HookedTask([nodes[leaf] for leaf in members], own)))
    rest = [
        (place, task) for place, (task, leaves) in enumerate(zip(flat, touched, strict=True)) if not leaves
    ]
    return [task for _, task in sorted([*rest, *made], key=lambda each: each[0])]


def _nodes_of(task: Task) -> Sequence[Node]:
    return task.nodes if isinstance(task, HookedTask) else ()


def _together(nodes: Mapping[int, Node]) -> Iterable[list[int]]:
    """The leaves of each multi-grad hook."""
    by_lock: defaultdict[int, list[int]] = defaultdict(list)
    for leaf, node in nodes.items():
        for hook in multi_grad_hooks(leaf_tensor(node)):
            by_lock[id(hook.lock)].append(leaf)
            if not all(map(is_leaf, hook.nodes)):
                raise ValueError(
                    "a hook by register_multi_grad_hook watches a parameter and a tensor that was computed: "
                    "one gradient comes in W, the other in B; register a hook for each of the two kinds"
                )
    return by_lock.values()


def _joined(links: Iterable[list[int]]) -> dict[int, set[int]]:
    """Each leaf's group: leaves of one link are in one group."""
    group_of: dict[int, set[int]] = {}
    for link in links:
        group = {leaf for each in link for leaf in group_of.get(each, {each})}
        group_of.update(dict.fromkeys(group, group))
    return group_of
