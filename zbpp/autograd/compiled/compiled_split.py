"""F, B and W of one module call as three callables, and the autograd Function that runs them.

For autograd the call is one node. The node's backward runs B. W is put off as `zbpp.checkpoint` puts off its
own: through the collector that `backward_input` hands to Functions. In the rest of zbpp.autograd only
`explain` asks whether a module is compiled.

F KEEPS values for B; B HOLDS values for W.

Values are found by their places in a list, the POOL. The pool of F holds the module's tensors (their names
are CompiledSplit.tensors), then the arguments of the call. The pool of B holds the module's tensors, then the
arguments and the computed values that F kept, then the gradients of the outputs in `BGraph.tangents`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from zbpp.autograd.collector import collector_of, refuse_create_graph
from zbpp.autograd.compiled.inductor import Boxed
from zbpp.autograd.hooked_leaves import grouped
from zbpp.autograd.hooks import hooked_nodes
from zbpp.autograd.leaf_grad import add_to_grad, grad_dtype, total_of
from zbpp.autograd.weight_grads import ChangedInPlace


class FGraph(NamedTuple):
    """F: inputs -> (new values of the `mutated` buffers, outputs, the computed values that F keeps)."""

    run: Boxed
    inputs: tuple[int, ...]  # places in F's pool
    mutated: tuple[int, ...]  # buffers among the module's tensors
    num_outputs: int
    structure: TreeSpec  # of the outputs
    kept: tuple[int, ...]  # the arguments of the call that F keeps for B


class BGraph(NamedTuple):
    """B: inputs -> (the gradients of some arguments, the computed values that B holds for W)."""

    run: Boxed
    inputs: tuple[int, ...]  # places in B's pool
    read: tuple[int, ...]  # the module's tensors that B or W reads
    tangents: tuple[tuple[int, tuple[int, ...]], ...]  # (output, strides of the output's gradient)
    input_gradients: tuple[int, ...]  # the arguments whose gradients B returns
    held: tuple[int, ...]  # places in B's pool of the values that are held for W as they are


class WGraph(NamedTuple):
    """W: inputs -> nothing. It adds to the gradients, which are its last inputs.

    The inputs are the values that B held, then the module's tensors in `tensors`, then the gradients of the
    parameters in `trained`.
    """

    run: Boxed
    tensors: tuple[int, ...]
    trained: tuple[int, ...]  # parameters among the module's tensors
    sum_dtypes: tuple[torch.dtype, ...]  # of the gradients, for each of `trained`
    computed_in_b: frozenset[int]  # of these: the parameters whose gradients B computes, and W only adds
    # The inputs of W that other code may change in place, so that their versions are checked: values of B's
    # pool, gradients that B returns, and the module's tensors. As places in CompiledSplit.names.
    shared: tuple[int, ...]
    returned: tuple[int, ...]  # places in B's results: input gradients that W needs as well


class CompiledSplit(NamedTuple):
    """The compiled F, B and W of a module's call."""

    tensors: tuple[str, ...]  # names of the module's parameters and buffers
    names: tuple[str, ...]  # of the values in B's pool, then of the gradients that B returns: for errors
    f: FGraph
    b: BGraph
    w: WGraph


def run(split: CompiledSplit, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> tuple[Any, ...]:
    """F: the outputs as a flat tuple. W, or a plain backward, adds to `.grad` of the trained parameters."""
    # On stage 0 no argument needs grad: the dummy makes autograd call this Function's backward all the same.
    dummy = torch.empty(0, requires_grad=True)
    outputs: tuple[Any, ...] = _SplitFunction.apply(dummy, split, tensors, *arguments)  # type: ignore[no-untyped-call]  # torch's
    return outputs


class Unchanged(NamedTuple):
    """Tensors that must not be changed in place until they are read, with autograd's counts of changes."""

    split: CompiledSplit
    places: tuple[int, ...]  # in split.names
    tensors: list[Tensor]
    versions: list[int]

    def check(self) -> None:
        """Raise ChangedInPlace if one of the tensors was changed."""
        if [each._version for each in self.tensors] == self.versions:
            return
        for place, tensor, version in zip(self.places, self.tensors, self.versions, strict=True):
            if tensor._version != version:
                is_module = place < len(self.split.tensors)
                raise ChangedInPlace(
                    f"{self.split.names[place]} was changed in place before a compiled stage's backward "
                    f"had read it (version {version}, now {tensor._version}), so gradients would be wrong: "
                    + ("change it after the last W of the step" if is_module else "change a clone() of it")
                )


def _unchanged(split: CompiledSplit, places: tuple[int, ...], tensors: list[Tensor]) -> Unchanged:
    return Unchanged(split, places, tensors, [each._version for each in tensors])


class _SplitFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dummy: Tensor, split: CompiledSplit, tensors: Sequence[Tensor], *arguments: Any
    ) -> tuple[Any, ...]:
        f, b, _ = split[2:]
        pool = [*tensors, *arguments]
        results = f.run([pool[place] for place in f.inputs])
        for place, value in zip(f.mutated, results, strict=False):
            tensors[place].copy_(value)
        first = len(f.mutated)
        last = first + f.num_outputs
        outputs = tuple(results[first:last])
        ctx.split, ctx.tensors, ctx.num_arguments = split, tensors, len(arguments)
        ctx.read = _unchanged(split, b.read, [tensors[place] for place in b.read])
        ctx.zbpp_explained = partial(_explained, split, tensors)
        ctx.save_for_backward(*(arguments[place] for place in f.kept), *results[last:])
        differentiable = {place for place, _ in b.tangents}
        ctx.mark_non_differentiable(
            *(
                each
                for place, each in enumerate(outputs)
                if isinstance(each, Tensor) and place not in differentiable
            )
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_create_graph("a compiled stage, which has no second derivative", "do not compile")
        split: CompiledSplit = ctx.split
        b, w = split.b, split.w
        ctx.read.check()
        pool = [*ctx.tensors, *(each.detach() for each in ctx.saved_tensors)]
        ctx.maybe_clear_saved_tensors()
        pool += [_in_layout(gradients[place], strides) for place, strides in b.tangents]
        held = [pool[place] for place in b.held]
        values = [pool[place] for place in b.inputs]
        del pool, gradients  # so that B's code can free each value after its last use
        results = b.run(values)
        shared = [
            *held,
            *(results[place] for place in w.returned),
            *(ctx.tensors[place] for place in w.tensors),
        ]
        held += results[len(b.input_gradients) :]
        _put_off(ctx, CompiledTask(split, ctx.tensors, held, _unchanged(split, w.shared, shared)))
        to_arguments: list[Tensor | None] = [None] * ctx.num_arguments
        for place, gradient in zip(b.input_gradients, results, strict=False):
            to_arguments[place] = gradient
        return (None, None, None, *to_arguments)


def _explained(split: CompiledSplit, tensors: Sequence[Tensor]) -> list[tuple[Tensor, str, str]]:
    """For `explain`: (parameter, where, why) for each trained parameter."""
    return [
        (tensors[place], "B", "compiled: cheap, or not a product by itself")
        if place in split.w.computed_in_b
        else (tensors[place], "W", "compiled: its product is in W's graph")
        for place in split.w.trained
    ]


def _in_layout(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    if gradient.stride() == strides:
        return gradient
    copied = gradient.new_empty_strided(gradient.shape, strides)
    return copied.copy_(gradient)


def _put_off(ctx: Any, task: CompiledTask) -> None:
    """Put the task off until W. In a plain backward, which has no W, run it now."""
    if not task.split.w.trained:
        return
    collector = collector_of(ctx)
    wanted = {id(leaf) for leaf in task.leaves() if leaf.requires_grad}  # a leaf may be frozen since F
    if collector is not None and collector.wanted is not None:
        wanted &= collector.wanted
    hooked = hooked_nodes([leaf for leaf in task.leaves() if id(leaf) in wanted])
    if collector is not None:
        task = task._replace(module_tensors=_needed_in_w(task))
    tasks = grouped([task._replace(wanted=wanted)], hooked)
    if collector is not None:
        collector.put_off(tasks)
        return
    for each in tasks:
        each.accumulate()


def _needed_in_w(task: CompiledTask) -> list[Any]:
    """The module's tensors, None for those that W doesn't need, such as a recompute's copies of buffers."""
    needed = {*task.split.w.trained, *task.split.w.tensors}
    return [each if place in needed else None for place, each in enumerate(task.module_tensors)]


class CompiledTask(NamedTuple):
    """W of one call. One run of W's graph adds the gradients of all trained parameters."""

    split: CompiledSplit
    module_tensors: Sequence[Tensor]
    held: list[Tensor]
    shared: Unchanged
    wanted: set[int] | None = None

    @property
    def leaf(self) -> Tensor:
        """The first of the trained parameters."""
        return self.module_tensors[self.split.w.trained[0]]

    def leaves(self) -> Iterator[Tensor]:
        return (self.module_tensors[place] for place in self.split.w.trained)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.held

    def accumulate(self) -> None:
        w = self.split.w
        self.shared.check()
        totals, added_later = [], []
        for leaf, dtype in zip(self.leaves(), w.sum_dtypes, strict=True):
            total = total_of(leaf)
            if total is None or not _can_add_to(total, leaf, dtype, self.wanted):
                total = torch.zeros_like(leaf, dtype=dtype, requires_grad=False)
                added_later.append((leaf, total))
            totals.append(total)
        values = [*self.held, *(self.module_tensors[place] for place in w.tensors), *totals]
        self.held.clear()  # so that W's code can free each value after its last use
        self.shared.tensors.clear()
        with torch.no_grad():
            w.run(values)
        for leaf, gradient in added_later:
            if _is_wanted(leaf, self.wanted):
                _add_new(leaf, gradient)


def _can_add_to(total: Tensor, leaf: Any, dtype: torch.dtype, wanted: set[int] | None) -> bool:
    """Whether W's graph may add to this tensor: it has the compiled layout and dtype."""
    return (
        total.dtype is dtype
        and total.layout is torch.strided
        and total.stride() == leaf.stride()
        and _is_wanted(leaf, wanted)
    )


def _is_wanted(leaf: Tensor, wanted: set[int] | None) -> bool:
    return wanted is None or id(leaf) in wanted


def _add_new(leaf: Tensor, gradient: Tensor) -> None:
    """Add a gradient that nothing else refers to: if it is the leaf's first, it is not copied."""
    if total_of(leaf) is None:
        leaf.grad = gradient.to(grad_dtype(leaf))
    else:
        add_to_grad(leaf, gradient)
