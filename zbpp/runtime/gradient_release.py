"""Gradient release: weights are updated inside the step, and their gradients are dropped at once.

    ... 2W6  2W7 | update stage 2 | 1W6  1W7 | update stage 1 | ... the other parameters

A stage is updated behind its last W, where the program has its Reduce. With replicas or shards, a stage's
gradients are complete only when its reduction has ended: so at the end of the step the rank waits for one
stage's reduction after the other, updates the stage, and drops its gradients. All other parameters are
updated last: those that several stages or ranks share, those of the loss, and any others that the optimizer
holds.

A weight is changed after the last F, B and W that read it. So the losses equal, to the last bit, those of a
loop that calls `optimizer.step()` after `pipeline.step()`. That needs an optimizer that updates each
parameter from this parameter's gradient alone, as torch's optimizers (LBFGS aside) and torch-optimi's do.

Accumulation: each microbatch's gradients go into the optimizer's states, and are dropped.

    2W0  weight a: gradient -> states, dropped; weight b: gradient -> states, dropped; ...
    ...
    2W7  weight a: gradient -> states, weight updated, gradient dropped; ...

So only one parameter's gradient exists at a time. torch-optimi's optimizers support this: with
`optimizer_accumulation` set, their step changes the states and not the weight. Their moving averages treat
each microbatch as a step, and expect the gradient of the microbatch's mean loss. So the factor
1 / num_microbatches, which the pipeline's gradients have, is taken out again. The result only approximates
that of summed gradients, since a beta applies per microbatch. It equals the result of optimi's own
accumulation over the same microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.mesh import REPLICATE, SHARD, Place
from zbpp.runtime.squares import square_of

Done = Callable[[Tensor], None]
Parts = Mapping[int, Sequence[nn.Parameter]]

_KNOWN = ("torch.optim.", "optimi.", "zbpp.")
_WRITE_STEP = "write gradient_release=step (accumulate=False)"


class GradientRelease:
    """Updates each stage's parameters as soon as their gradients are final, then drops the gradients.

    parts: {stage: its parameters that belong to no other stage, no other rank and no loss}. keep_squares:
    whether to fill `squares`.

    squares: {id of a parameter that the last step updated: its gradient's sum of squares}. has_updated:
    whether the current step has changed weights or optimizer states; kept when the step fails.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Parts, *, keep_squares: bool = False) -> None:
        if is_optimi(optimizer) and not optimizer.defaults["gradient_release"]:
            name = type(optimizer).__name__
            raise ValueError(
                f"optimi's {name} counts steps for all its parameters together: make it with "
                f"{name}(..., gradient_release=True)"
            )
        self.optimizer: Any = optimizer
        self._parts, self._keeps_squares = parts, keep_squares
        self._waits_for_graph = False
        self.squares: dict[int, Tensor] = {}
        self.has_updated = False

    def begin(self, loss_scale: float, *, has_graph: bool) -> None:
        """Called before a step. has_graph: whether a graph of the caller gets gradients at the step's end.

        With such a graph, all updates wait for it. Raises ValueError if there is a loss scale, or if a
        parameter has a gradient already.
        """
        if loss_scale != 1:
            raise ValueError(
                f"loss_scale={loss_scale:g} with gradient release: the optimizer uses each gradient before "
                "the loss scale can be divided out; write pipeline.loss_scale = 1, and bfloat16 in place of "
                "float16"
            )
        if any(each.grad is not None for each in parameters_of(self.optimizer)):
            raise ValueError(
                "a parameter has a gradient before a step that releases gradients: each pipeline.step "
                "updates the weights, so gradients of several steps don't add up; call "
                "optimizer.zero_grad(), and use more microbatches for a larger batch"
            )
        self.has_updated, self._waits_for_graph = False, has_graph
        self.squares.clear()

    def leaf_done(self, stage: int, microbatch: int) -> Done | None:
        """The function that W of a microbatch calls with each leaf whose gradient is complete; None: none."""
        return None

    def complete(self, stage: int) -> None:
        """Called when the gradients of a stage are final: behind its last W, or after its reduction."""
        if not self._waits_for_graph:
            optimized = set(map(id, parameters_of(self.optimizer)))
            self._update([each for each in self._parts[stage] if id(each) in optimized])

    def finish(self) -> None:
        """Called at the end of a step, when all gradients are final: update the other parameters."""
        self._update(list(parameters_of(self.optimizer)))

    def _update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update those of the parameters that have a gradient, and drop it."""
        mine = [each for each in parameters if each.grad is not None]
        if not mine:
            return
        self.has_updated = True
        if self._keeps_squares:
            self.squares |= {id(each): square_of(each.grad) for each in mine if each.grad is not None}
        update(self.optimizer, mine)
        for each in mine:
            each.grad = None


class OptimizerAccumulation(GradientRelease):
    """Gives each microbatch's gradients to the optimizer, each leaf's as soon as it is complete.

    parts: {stage: the parameters that get gradients from its W's}. Raises ValueError for an optimizer that
    can't accumulate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Parts, num_microbatches: int) -> None:
        if not is_optimi(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} can't take gradients into its states without an update: "
                "accumulate needs an optimizer of torch-optimi (pip install torch-optimi), such as "
                f"optimi.AdamW(..., gradient_release=True); or {_WRITE_STEP}"
            )
        if any(group.get("momentum") == 0 for group in optimizer.param_groups):
            raise ValueError(
                "SGD without momentum has no state that could take up gradients, so only the last "
                f"microbatch's would count: write momentum=0.9, dampening=True, or {_WRITE_STEP}"
            )
        super().__init__(optimizer, parts)
        self._num_microbatches = num_microbatches
        self._optimized: set[int] = set()  # ids of the parameters that the optimizer holds
        self._accumulated: set[int] = set()  # ids of parameters with gradients in the states, not updated yet

    def begin(self, loss_scale: float, *, has_graph: bool) -> None:
        """See GradientRelease."""
        super().begin(loss_scale, has_graph=has_graph)
        self._accumulated.clear()
        self._optimized = set(map(id, parameters_of(self.optimizer)))

    def leaf_done(self, stage: int, microbatch: int) -> Done:
        """Let W update the weights in the last microbatch, and only the optimizer's states before that."""
        self.optimizer.optimizer_accumulation = microbatch + 1 < self._num_microbatches
        return self._take

    def complete(self, stage: int) -> None:
        """Update the parameters that got no gradient in the last microbatch, as with a gradient of zero."""
        self.optimizer.optimizer_accumulation = False
        for parameter in self._parts[stage]:
            if id(parameter) in self._accumulated:
                parameter.grad = torch.zeros_like(parameter)
                self._take(parameter)

    def finish(self) -> None:
        """Nothing is left: each gradient was used in its W."""

    def _take(self, leaf: Tensor) -> None:
        if leaf.grad is None or id(leaf) not in self._optimized:
            return
        leaf.grad.mul_(self._num_microbatches)
        if self.optimizer.optimizer_accumulation:
            self._accumulated.add(id(leaf))
        else:
            self._accumulated.discard(id(leaf))
        self._update([leaf])  # type: ignore[list-item]  # a leaf that the optimizer holds


def make_gradient_release(
    optimizer: torch.optim.Optimizer,
    stages: Mapping[int, nn.Module],
    late: Iterable[nn.Parameter],
    of_loss: Iterable[nn.Parameter],
    place: Place,
    num_microbatches: int,
    *,
    accumulate: bool,
    keep_squares: bool,
    per_parameter: bool,
) -> GradientRelease:
    """The GradientRelease of one rank's stages.

    late: the parameters that several stages or ranks share. of_loss: all parameters of the loss, on the rank
    that computes it. per_parameter: the caller says that the optimizer updates each parameter by itself.
    Raises ValueError for an optimizer, a stage or a mesh that gradient release can't go with.
    """
    of_loss = list(of_loss)
    if not (per_parameter or updates_each_alone(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} is none of torch.optim's or torch-optimi's optimizers, which update "
            "each parameter from its own gradient alone: if yours does so, too, and keeps no count of steps "
            "for several parameters, write per_parameter=True (optimizer.per_parameter=true)"
        )
    parts = {index: [*stage.parameters()] for index, stage in stages.items()}
    if any(getattr(each, "main_grad", None) is not None for part in parts.values() for each in part):
        raise ValueError(
            "parameters have a main_grad (MasterWeights), which stays allocated through all steps, so "
            "gradient release would free nothing: write precision=bfloat16 with optimizer.kahan_sum=true, or "
            "parallel.shard=2 or more, where the float32 gradients can be released"
        )
    if not accumulate:
        not_own = {id(each) for each in (*late, *of_loss)}
        alone = {index: [each for each in part if id(each) not in not_own] for index, part in parts.items()}
        return GradientRelease(optimizer, alone, keep_squares=keep_squares)
    for name in (REPLICATE, SHARD):
        if name in place.groups:
            raise ValueError(
                f"accumulate with {name}={place.size(name)}: a gradient would have to be reduced over all "
                f"processes in each microbatch before it enters the optimizer's state; {_WRITE_STEP}"
            )
    if of_loss:  # this rank has the last stage, whose W's complete the gradients of the loss
        parts[max(parts)] = list(dict.fromkeys([*parts[max(parts)], *of_loss]))
    optimized = {id(each) for each in parameters_of(optimizer) if each.requires_grad}
    counts = Counter(id(each) for part in parts.values() for each in part)
    if any(counts[each] > 1 for each in optimized) or not optimized.isdisjoint(map(id, late)):
        raise ValueError(
            "accumulate with a parameter that several stages share (tied weights): its gradient in a "
            f"microbatch is complete only when all these stages have run their W; untie it, or {_WRITE_STEP}"
        )
    return OptimizerAccumulation(optimizer, parts, num_microbatches)


def updates_each_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is known to update each parameter from this parameter's gradient alone."""
    kind = type(optimizer)
    return f"{kind.__module__}.".startswith(_KNOWN) and kind is not torch.optim.LBFGS


def is_optimi(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch-optimi's."""
    return type(optimizer).__module__.startswith("optimi.")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    """The parameters that the optimizer holds now; groups may be added between steps."""
    return (each for group in optimizer.param_groups for each in group["params"])


def update(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Run the optimizer's step for these parameters alone, from their `.grad`."""
    if not (is_optimi(optimizer) and optimizer.defaults["gradient_release"]):
        with _restricted(optimizer, set(map(id, parameters))):
            optimizer.step()
        return
    group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    for each in parameters:
        # After load_state_dict this would be a copy of the group, which learning rate schedules don't change.
        optimizer.state[each]["group"] = group_of[id(each)]
        optimizer.step(param=each)


@contextmanager
def _restricted(optimizer: torch.optim.Optimizer, wanted: set[int]) -> Iterator[None]:
    """Within this context the optimizer's groups hold only the parameters with these ids."""
    whole = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, parameters in whole:
            group["params"] = [each for each in parameters if id(each) in wanted]
        yield
    finally:
        for group, parameters in whole:
            group["params"] = parameters
