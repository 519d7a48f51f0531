"""W: compute the weight gradients that B put off, and add them to `.grad`.

WeightGrads holds a list of tasks. A task knows the tensors it needs (x and dy) and adds a gradient to one
leaf's `.grad`; the task of a compiled call serves several leaves. A parameter that has a `main_grad` (a
float32 tensor of the parameter's shape, say, beside bf16 weights) gets its gradients added there; its `.grad`
is left alone.

W reads tensors that may share memory with others: x with a buffer that the next forward writes into, dy with
a gradient that the caller passed in or got back. They are guarded as autograd guards its saved tensors:
autograd counts the in-place changes of each tensor (`_version`), B notes the counts of all tensors that W
will read, and W raises ChangedInPlace if a count has grown since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zbpp.autograd.capture import AddOfParts, tensors_in, version_of
from zbpp.autograd.chains import like_output, run_chains
from zbpp.autograd.graph import Edge, WeightUse
from zbpp.autograd.leaf_grad import add_to_grad, new_gradient, total_of
from zbpp.autograd.rules import name_of
from zbpp.autograd.storages import storages_of


class Task(Protocol):
    """What W has to do for one leaf. A task for several leaves has a method `leaves`, too."""

    @property
    def leaf(self) -> Tensor: ...
    def tensors(self) -> Iterator[Tensor]:
        """The tensors that are held for this task."""

    def accumulate(self) -> None:
        """Add to the leaf's gradient."""


def leaves_of(task: Task) -> Iterable[Tensor]:
    """The leaves whose gradients a task computes."""
    leaves = getattr(task, "leaves", None)
    return (task.leaf,) if leaves is None else leaves()


class ChangedInPlace(RuntimeError):
    """A tensor that B or W reads was changed in place before it was read.

    leaf: the parameter whose gradient W was about to compute; None if it is not one parameter alone. tensor:
    the one that was changed, if it is known.
    """

    def __init__(self, message: str, leaf: Tensor | None = None, tensor: Tensor | None = None) -> None:
        super().__init__(message)
        self.leaf, self.tensor = leaf, tensor


def _changed(leaf: Tensor, what: str, tensor: Any, remedy: str) -> ChangedInPlace:
    shape = f" of shape {tuple(tensor.shape)}" if hasattr(tensor, "shape") else ""
    message = (
        f"{what}{shape} was changed in place before W, which needs it as B found it, for the gradient of "
        f"a weight of shape {tuple(leaf.shape)}: {remedy}"
    )
    return ChangedInPlace(message, leaf, tensor if isinstance(tensor, Tensor) else None)


_CLONE_GRADIENT = (
    "clone a gradient before changing it, be it one that was passed to B or one that B returned "
    "(grad = grad * 2, not grad.mul_(2))"
)


class UseTask(NamedTuple):
    """The gradient of one use of a leaf. For a leaf with a single use, it is the whole task of that leaf."""

    use: WeightUse
    dy: Any  # a tensor, or what AddOfParts.placed has made of it
    version: int  # sum of the versions of dy and of all that the use holds

    @property
    def leaf(self) -> Tensor:
        return self.use.leaf

    def tensors(self) -> Iterator[Tensor]:
        yield from tensors_in((self.dy,))
        yield from self.use.tensors()

    def check(self) -> None:
        """Raise ChangedInPlace if a tensor was changed since B."""
        if version_of(self.use.held) + self.dy._version != self.version:
            raise self._changed()

    def _changed(self) -> ChangedInPlace:
        leaf, held, node = self.use.leaf, self.use.held, name_of(self.use.rule)
        if version_of(held) == self.use.version:
            return _changed(leaf, f"dy, the gradient of {node}'s output,", self.dy, _CLONE_GRADIENT)
        return _changed(
            leaf,
            f"the input that {node} saved",
            held[0],
            "clone it before the layer, or do not write into its memory (out=, in-place operations) before W",
        )

    def add_to(self, total: Tensor, fresh: bool) -> None:
        """Add to the use's view of `total`. If `fresh`, total is uninitialised memory and is overwritten."""
        (_, held, add, _, views, _, _), dy, _ = self
        self.check()
        for view in views or ():
            total = view.apply(total)
        add(total, held, dy, fresh)

    def accumulate(self) -> None:
        (leaf, held, add, _, views, _, _), dy, version = self
        now = dy._version
        for each in held:
            now += each._version
        if now != version:
            raise self._changed()
        total = total_of(leaf)
        if total is None or views:
            _accumulate(leaf, [self])
        else:  # nearly every task comes here: add_to without views, inlined
            add(total, held, dy, False)


class SumTask(NamedTuple):
    """The gradient of a leaf from all its uses: there may be several, and a use's chain may compute."""

    leaf: Tensor
    uses: list[UseTask]

    def tensors(self) -> Iterator[Tensor]:
        for use in self.uses:
            yield from use.tensors()

    def accumulate(self) -> None:
        leaf, uses = self
        if any(each.use.views is None for each in uses):
            add_to_grad(leaf, _through_chains(leaf, uses))
        else:
            _accumulate(leaf, uses)


def tasks_per_leaf(uses: list[UseTask]) -> list[Task]:
    """A SumTask per leaf, even for a single use. The uses of one leaf stand side by side in `uses`."""
    uses = [*map(_placed, uses)]
    groups = [list(group) for _, group in groupby(uses, key=lambda use: id(use.leaf))]
    return [SumTask(group[0].leaf, group) for group in groups]


def _placed(task: UseTask) -> UseTask:
    """The task; if W computes with parts of dy, the task with these in place of dy."""
    use, dy, _ = task
    if not isinstance(use.add, AddOfParts):
        return task
    dy = use.add.placed(dy)
    return UseTask(use, dy, use.version + dy._version)


def _accumulate(leaf: Tensor, uses: list[UseTask]) -> None:
    if (total := total_of(leaf)) is not None:
        for use in uses:
            use.add_to(total, False)
    else:
        leaf.grad = _sum_of(leaf, uses)


def _sum_of(leaf: Tensor, uses: list[UseTask]) -> Tensor:
    """The sum of the uses' gradients, a new tensor in the leaf's layout."""
    whole = all(view.whole for view in uses[0].use.views or ())
    gradient = new_gradient(leaf) if whole else new_gradient(leaf).zero_()
    for use in uses:
        use.add_to(gradient, whole)
        whole = False
    return gradient


def _through_chains(leaf: Tensor, uses: list[UseTask]) -> Tensor:
    """Sum the gradients where the uses' chains begin, then let autograd run each chain once."""
    at_head: dict[Edge, Tensor] = {}
    for each in uses:
        use, dy, _ = each
        if use.views is not None:
            continue
        each.check()
        head = use.chain[0]
        fresh = head not in at_head
        if fresh:
            at_head[head] = like_output(head)
        use.add(at_head[head], use.held, dy, fresh)
    direct = [each for each in uses if each.use.views is not None]  # their gradient starts at the leaf itself
    start = _sum_of(leaf, direct) if direct else None
    return run_chains(leaf, at_head, start, [each.use for each in uses])


class ComputedTask(NamedTuple):
    """A leaf whose gradient B has computed: W only adds it."""

    leaf: Tensor
    gradient: Tensor
    version: int

    def tensors(self) -> Iterator[Tensor]:
        yield self.gradient

    def accumulate(self) -> None:
        leaf, gradient, version = self
        if gradient._version != version:
            raise _changed(leaf, "the gradient that B computed,", gradient, _CLONE_GRADIENT)
        add_to_grad(leaf, gradient)


class FunctionTask(NamedTuple):
    """The gradient that the backward of an autograd Function put off by calling `defer`."""

    leaf: Tensor
    compute: Callable[..., Tensor]
    held: tuple[Tensor, ...]
    version: int

    def tensors(self) -> Iterator[Tensor]:
        yield from self.held

    def accumulate(self) -> None:
        if version_of(self.held) != self.version:
            raise _changed(
                self.leaf,
                "a tensor that a Function passed to defer",
                None,
                "clone it before it is changed, or pass a clone to defer",
            )
        add_to_grad(self.leaf, self.compute(*self.held))


class WeightGrads:
    """The tasks that `backward_input` leaves for W: hold this object, then call `accumulate()` once.

    large: gradients among what the tasks hold that are larger than all else (Collector.large).
    """

    def __init__(self, tasks: list[Task], large: Sequence[Tensor] = ()) -> None:
        self._tasks: list[Task] | None = tasks
        self._large = {storage._cdata for each in large for storage in storages_of(each)}

    @property
    def held_bytes(self) -> int:
        """Bytes of the distinct storages kept alive for W, without those of the leaves; 0 after W."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for task in self.tasks
            for tensor in task.tensors()
            for storage in storages_of(tensor)
        }
        own = {storage.data_ptr() for task in self.tasks for storage in storages_of(task.leaf)}
        return sum(count for start, count in storages.items() if start not in own)

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks that are left."""
        return self._tasks or ()

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that W will read."""
        return (tensor for task in self.tasks for tensor in task.tensors())

    def leaves(self) -> Iterator[Tensor]:
        """The parameters that W adds to."""
        return (leaf for task in self.tasks for leaf in leaves_of(task))

    def take(self, is_wanted: Callable[[Task], bool]) -> WeightGrads:
        """A part of W, which may run before the rest: take the tasks for which `is_wanted` is true."""
        if not self._tasks:
            return WeightGrads([])
        parts: tuple[list[Task], list[Task]] = [], []
        for each in self._tasks:
            parts[is_wanted(each)].append(each)
        self._tasks, taken = parts
        return WeightGrads(taken)

    def is_large(self, task: Task) -> bool:
        """Whether a task holds a gradient that is larger than all else."""
        return not self._large.isdisjoint(_memory_of(task))

    def accumulate(self) -> None:
        """W: add the gradients to each parameter's `.grad`, and drop all that was held.

        The hooks of a parameter run once, when its whole gradient is there. Raises RuntimeError at a second
        call, and ChangedInPlace, a RuntimeError, if a tensor that W reads was changed in place since B.
        """
        if self._tasks is None:
            raise RuntimeError(
                "accumulate() was called before, and what these gradients are computed from is gone; "
                "call backward_input again after another forward"
            )
        tasks, self._tasks = self._tasks, None
        with torch.set_grad_enabled(False):  # no_grad() takes twice as long
            while tasks:
                tasks.pop(0).accumulate()  # pop: the task's tensors are freed as soon as it is done


def _memory_of(task: Task) -> Iterator[int]:
    return (storage._cdata for tensor in task.tensors() for storage in storages_of(tensor))
