"""F, B and W of one module call as three callables, and the autograd Function that runs them.

For autograd the call is one node. Its backward is B; W is put off as `zbpp.checkpoint`'s is, through
the collector that `backward_input` hands to Functions: nothing else knows that a module is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from zbpp.autograd.collector import collector_of
from zbpp.autograd.compiled.inductor import Boxed
from zbpp.autograd.hooks import run_hooks
from zbpp.autograd.weight_grads import add_to_grad, grad_dtype, total_of


class Program(NamedTuple):
    """The three callables, and where each of their inputs is found.

    Module tensors go by their place in `tensors`. Behind them come, for F, the call's arguments; for
    B, what F kept, then the gradients of the outputs in `tangents`.
    """

    tensors: tuple[str, ...]
    names: tuple[str, ...]  # of B's inputs as above, then of the gradients that it returns
    trained: tuple[int, ...]  # the parameters whose gradients W adds, in the order of its last inputs
    structure: TreeSpec  # of the outputs
    num_outputs: int
    f: Boxed
    b: Boxed
    w: Boxed
    f_inputs: tuple[int, ...]
    b_inputs: tuple[int, ...]
    w_tensors: tuple[int, ...]  # W takes what B held, then these, then where to add
    read: tuple[int, ...]  # the module's tensors that B and W take: nobody may change them in place before
    mutated: tuple[int, ...]  # the buffers whose new values F returns first
    kept: tuple[int, ...]  # the arguments that F keeps; what else it keeps it returns last
    held: tuple[int, ...]  # of B's inputs, what W needs; what else it needs B returns last
    tangents: tuple[tuple[int, tuple[int, ...]], ...]  # output, strides of its gradient
    input_gradients: tuple[int, ...]  # the arguments whose gradients B returns first
    returned: tuple[int, ...]  # those of them that W takes, too
    shared: tuple[int, ...]  # what W takes that others have, too, by their names
    early: frozenset[int]  # trained ones whose gradients B computes, and W only adds
    held_bytes: int  # between B and W


def run(program: Program, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> tuple[Any, ...]:
    """F: the outputs, flat. `.grad` of the trained parameters is added to in W, or in a plain backward."""
    # Where no argument needs grad (stage 0) the dummy makes autograd come here all the same.
    dummy = torch.empty(0, requires_grad=True)
    outputs: tuple[Any, ...] = _Call.apply(dummy, program, tensors, *arguments)  # type: ignore[no-untyped-call]  # torch's
    return outputs


class Unchanged(NamedTuple):
    """Tensors that must stay as they are, with autograd's counts of changes in place."""

    program: Program
    places: tuple[int, ...]  # among the program's names
    tensors: list[Tensor]
    versions: list[int]

    def check(self) -> None:
        """Raises RuntimeError for what was changed in place since."""
        if [each._version for each in self.tensors] == self.versions:
            return
        for place, tensor, version in zip(self.places, self.tensors, self.versions, strict=True):
            if tensor._version != version:
                is_module = place < len(self.program.tensors)
                raise RuntimeError(
                    f"{self.program.names[place]} was changed in place before a compiled stage's backward "
                    f"had read it (version {version}, now {tensor._version}), so gradients would be wrong: "
                    + ("change it after the last W of the step" if is_module else "change a clone() of it")
                )


def _unchanged(program: Program, places: tuple[int, ...], tensors: list[Tensor]) -> Unchanged:
    return Unchanged(program, places, tensors, [each._version for each in tensors])


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dummy: Tensor, program: Program, tensors: Sequence[Tensor], *arguments: Any
    ) -> tuple[Any, ...]:
        pool = [*tensors, *arguments]
        found = program.f([pool[place] for place in program.f_inputs])
        first = len(program.mutated)
        for place, value in zip(program.mutated, found, strict=False):
            tensors[place].copy_(value)
        last = first + program.num_outputs
        outputs = tuple(found[first:last])
        ctx.program, ctx.tensors, ctx.num_arguments = program, tensors, len(arguments)
        ctx.read = _unchanged(program, program.read, [tensors[place] for place in program.read])
        ctx.zbpp_explained = partial(_explained, program, tensors)
        ctx.save_for_backward(*(arguments[place] for place in program.kept), *found[last:])
        differentiable = {place for place, _ in program.tangents}
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
        program: Program = ctx.program
        ctx.read.check()
        pool = [*ctx.tensors, *(each.detach() for each in ctx.saved_tensors)]
        ctx.maybe_clear_saved_tensors()
        pool += [_in_layout(gradients[place], strides) for place, strides in program.tangents]
        held = [pool[place] for place in program.held]
        values = [pool[place] for place in program.b_inputs]
        del pool, gradients  # what B has used goes while it runs
        found = program.b(values)
        num_gradients = len(program.input_gradients)
        shared = [
            *held,
            *(found[place] for place in program.returned),
            *(ctx.tensors[place] for place in program.w_tensors),
        ]
        held += found[num_gradients:]
        _put_off(ctx, Compiled(program, ctx.tensors, held, _unchanged(program, program.shared, shared)))
        to_arguments: list[Tensor | None] = [None] * ctx.num_arguments
        for place, gradient in zip(program.input_gradients, found, strict=False):
            to_arguments[place] = gradient
        return (None, None, None, *to_arguments)


def _explained(program: Program, tensors: Sequence[Tensor]) -> tuple[int, list[tuple[Tensor, str, str]]]:
    """For `explain`: what is held between B and W, and where each gradient is computed, and how."""
    rows = [
        (tensors[place], "B", "compiled: cheap, or not a product by itself")
        if place in program.early
        else (tensors[place], "W", "compiled: its product is in W's graph")
        for place in program.trained
    ]
    return program.held_bytes, rows


def _in_layout(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    if gradient.stride() == strides:
        return gradient
    made = gradient.new_empty_strided(gradient.shape, strides)
    return made.copy_(gradient)


def _put_off(ctx: Any, work: Compiled) -> None:
    """Until W; in a plain backward there is no later."""
    collector = collector_of(ctx)
    if collector is None:
        work.accumulate()
        return
    work = work._replace(wanted=collector.wanted, module_tensors=_of_w(work))
    if not work.program.trained:
        return
    collector.work.append(work)
    # Their own hooks fire after the last work for them.
    collector.work += [
        Added(leaf) for leaf in work.leaves() if getattr(leaf, "_post_accumulate_grad_hooks", None)
    ]


def _of_w(work: Compiled) -> list[Any]:
    """The module's tensors that W needs: a recompute's copies of buffers may go."""
    needed = {*work.program.trained, *work.program.w_tensors}
    return [each if place in needed else None for place, each in enumerate(work.module_tensors)]


class Compiled(NamedTuple):
    """W of one call: one run of its graph adds the gradients of all its leaves."""

    program: Program
    module_tensors: Sequence[Tensor]
    held: list[Tensor]
    shared: Unchanged
    wanted: set[int] | None = None

    @property
    def leaf(self) -> Tensor:
        """One of them: see Added."""
        return self.module_tensors[self.program.trained[0]]

    def leaves(self) -> Iterator[Tensor]:
        return (self.module_tensors[place] for place in self.program.trained)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.held

    def accumulate(self) -> Tensor:
        self.shared.check()
        totals, late = [], []
        for leaf in self.leaves():
            total = leaf.grad
            if total is None or not _fits(leaf, total, self.wanted):
                total = torch.zeros_like(leaf, requires_grad=False)
                late.append((leaf, total))
            totals.append(total)
        values = [*self.held, *(self.module_tensors[place] for place in self.program.w_tensors), *totals]
        self.held.clear()  # what W has used goes while it runs
        self.shared.tensors.clear()
        with torch.no_grad():
            self.program.w(values)
        for leaf, gradient in late:
            if self.wanted is None or id(leaf) in self.wanted:
                _add_new(leaf, run_hooks(leaf, gradient))
        return self.leaf


class Added(NamedTuple):
    """A leaf that another's work adds to."""

    leaf: Tensor

    def tensors(self) -> Iterator[Tensor]:
        return iter(())

    def accumulate(self) -> Tensor:
        return self.leaf


def _fits(leaf: Any, total: Tensor, wanted: set[int] | None) -> bool:
    """Whether W's graph may add to `.grad`: is it where to, as compiled, and no hook comes before."""
    return (
        total.dtype is leaf.dtype
        and total.stride() == leaf.stride()
        and not leaf._backward_hooks
        and not hasattr(leaf, "main_grad")
        and (wanted is None or id(leaf) in wanted)
    )


def _add_new(leaf: Tensor, gradient: Tensor) -> None:
    """It is nobody else's: the first needs no copy."""
    if total_of(leaf) is None:
        leaf.grad = gradient.to(grad_dtype(leaf))
    else:
        add_to_grad(leaf, gradient)
