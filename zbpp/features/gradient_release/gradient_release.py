"""Gradient release: weights are updated inside the step, and their gradients are dropped at once.

    ... 2W6  2W7 | update stage 2 | 1W6  1W7 | update stage 1 | ... the other parameters

    pipeline.use(zbpp.GradientRelease(optimizer))    from now on, `step` updates the weights

A stage is updated behind its last W, where the program has its Reduce. With replicas or shards, a stage's
gradients are complete only when its reduction has ended: so at the end of the step the rank waits for one
stage's reduction after the other, updates the stage, and drops its gradients. All other parameters are
updated last: those that several stages or ranks share, those of the loss, and any others that the optimizer
holds.

A weight is changed after the last F, B and W that read it. So the losses equal, to the last bit, those of a
loop that calls `optimizer.step()` after `pipeline.step()`. That needs an optimizer that updates each
parameter from this parameter's gradient alone, as torch's optimizers (LBFGS aside) and torch-optimi's do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.features.gradient_release.accumulation import Accumulation, refusal_of
from zbpp.features.gradient_release.restricted_update import is_optimi, parameters_of, update
from zbpp.features.gradient_release.updates import Accumulate, Update, with_accumulation, with_updates
from zbpp.features.squares import squares_of
from zbpp.job.agreement import refuse_together
from zbpp.runtime.call.batch import Batch
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.extra import Feature, Handler
from zbpp.runtime.rank import Rank
from zbpp.schedule import Program

_KNOWN = ("torch.optim.", "optimi.", "zbpp.")


NOT_WITH_ACCUMULATION = MappingProxyType(
    {
        "empty_microbatches": "the number of microbatches may change; write gradient_release=step",
        "replicate": "gradients would be reduced in each microbatch; write gradient_release=step",
        "shard": "gradients would be reduced in each microbatch; write gradient_release=step",
        "context": "gradients would be reduced in each microbatch; write gradient_release=step",
        "head_at_once": "its W's would mix microbatches; write gradient_release=step",
        "overlap_exchange": "its W's would mix microbatches; write gradient_release=step",
        "slices": "each W has a part of a microbatch's gradients; write gradient_release=step",
    }
)
"""What GradientRelease excludes with accumulate=True, too."""


class GradientRelease(Feature):
    """Updates each stage's parameters as soon as their gradients are final, then drops the gradients.

    Losses equal, to the last bit, those of a loop that calls `optimizer.step()` after each step. Remove that
    call and `zero_grad` from the loop. The learning rate may be changed between steps, also by torch's
    schedulers. Shared and tied parameters are updated at the end of the step.

    optimizer: of all or some of the pipeline's `parameters()`; the gradients of the other parameters stay.
    Its step hooks run at each update. accumulate: whether each microbatch's gradients go into the states of
    the optimizer, one of torch-optimi's, behind its W, and are dropped there; then the losses approximate
    those of summed gradients, see accumulation.py. keep_squares: whether to keep the squared norms of dropped
    gradients, from which the norm of all is computed. per_parameter: what the caller says of an optimizer
    that is none of torch.optim's or torch-optimi's: it updates each parameter from this parameter's gradient
    alone, and keeps no count of steps for several parameters.

    The gradients are gone when `step` returns: nothing can clip them by their norm, scale them, or skip an
    update because a gradient is infinite or NaN. A step that fails may have updated some weights, and no step
    may follow it. Raises ValueError, on every rank, for an optimizer, a stage or a mesh that gradient release
    can't go with.
    """

    name = "gradient_release"
    excludes = MappingProxyType(
        {"weight_offload": "the gradients of offloaded weights are on the host: leave one of them out"}
    )

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: bool = False,
        keep_squares: bool = False,
        per_parameter: bool = False,
    ) -> None:
        self.optimizer: Any = optimizer
        self._accumulates, self._accumulation = accumulate, Accumulation(optimizer, 1)
        if accumulate:
            self.excludes = MappingProxyType({**self.excludes, **NOT_WITH_ACCUMULATION})
        self._keeps_squares, self._per_parameter = keep_squares, per_parameter
        self._waits_for_graph, self._has_updated = False, False
        self.released: dict[int, Tensor] = {}

    def attach(self, rank: Rank) -> None:
        """See Extra. Raises ValueError on all ranks if one of them can't release gradients. Collective."""
        refusal = ""
        try:
            self._check(rank)
        except ValueError as error:
            refusal = str(error)
        refuse_together(refusal, rank.place.gather)
        self._rank, rank.released = rank, self.released

    def close(self) -> None:
        """Gradients stay from now on."""
        self._rank.released = None

    def _check(self, rank: Rank) -> None:
        """Find the parameters of this rank. Raises ValueError if their gradients can't be released."""
        if any(isinstance(each, GradientRelease) for each in rank.extras):
            raise ValueError(
                "gradients are released to an optimizer already, and a pipeline can have only one: make one "
                "optimizer with a group for each kind of parameters"
            )
        if is_optimi(self.optimizer) and not self.optimizer.defaults["gradient_release"]:
            name = type(self.optimizer).__name__
            raise ValueError(
                f"optimi's {name} counts steps for all its parameters together: make it with "
                f"{name}(..., gradient_release=True)"
            )
        if not (self._per_parameter or updates_each_alone(self.optimizer)):
            raise ValueError(
                f"{type(self.optimizer).__name__} is none of torch.optim's or torch-optimi's, which update "
                "each parameter from its own gradient alone: if yours does so, too, and keeps no count of "
                "steps for several parameters, write per_parameter=True "
                "(optimizer.per_parameter=true)"
            )
        if any(getattr(each, "main_grad", None) is not None for each in rank.trained()):
            raise ValueError(
                "parameters have a main_grad (MasterWeights), which stays allocated through all steps, so "
                "gradient release would free nothing: write precision=bfloat16 with "
                "optimizer=optimi_adamw, or parallel.shard=2 or more, where the float32 gradients can be "
                "released"
            )
        shared, of_loss = _shared(rank), _of_loss(rank)
        if self._accumulates and (refusal := refusal_of(self.optimizer, shared)):
            raise ValueError(refusal)
        not_own = set(map(id, (*shared, *of_loss)))
        self._parts = {
            index: [each for each in worker.module.parameters() if id(each) not in not_own]
            for index, worker in rank.workers.items()
        }
        if self._accumulates:
            self._accumulation = Accumulation(self.optimizer, rank.timetable.num_microbatches)
            if of_loss:  # the W's of the last stage complete these gradients
                self._parts[rank.timetable.num_stages - 1] += of_loss

    # ---- A step

    def rewrite(self, call: str, program: Program) -> Program:
        """See Feature."""
        return with_accumulation(program) if self._accumulates else with_updates(program)

    def handlers(self, call: str) -> Mapping[type, Handler]:
        """See Feature."""
        return {Update: self._complete, Accumulate: self._take}

    def announce(self, batch: Batch) -> None:
        """If a graph of the caller gets gradients at the end of the step, all updates wait for it."""
        self._waits_for_graph = batch.has_graph

    def begin(self, call: Call) -> None:
        """See Extra. Raises ValueError for a step with a loss scale, or with a gradient from before."""
        self._has_updated = False
        if call.kind != "step":
            return
        if call.loss_scale != 1:
            raise ValueError(
                f"loss_scale={call.loss_scale:g} with gradient release: the optimizer uses each gradient "
                "before the loss scale can be divided out; write pipeline.loss_scale = 1, and bfloat16 in "
                "place of float16"
            )
        if any(each.grad is not None for each in parameters_of(self.optimizer)):
            raise ValueError(
                "a parameter has a gradient before a step that releases gradients: each pipeline.step "
                "updates the weights, so gradients of several steps don't add up; call "
                "optimizer.zero_grad(), and use more microbatches for a larger batch"
            )
        self.released.clear()
        self._accumulation.clear()

    def end(self, call: Call, result: Result) -> None:
        """Update the other parameters: all gradients are final."""
        if call.kind == "step":
            self._update(list(parameters_of(self.optimizer)))
            self._has_updated = False

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        if self._has_updated:
            self._rank.lost = (
                "since gradients are released, some of its weights and optimizer states have been updated: "
                "load weights and optimizer states of an earlier step on every rank"
            )
            error.add_note(self._rank.lost)

    def _complete(self, at: Update) -> None:
        """The gradients of a stage are final.

        Its update may write what messages have carried. The last gradient of a stage comes after all messages
        to it and to later stages have been received.
        """
        self._rank.executors["step"].release_received(at.stage)
        if not self._waits_for_graph:
            self._update(self._optimized(at.stage))

    def _take(self, at: Accumulate) -> None:
        """The gradients of a microbatch are complete, and it is not the last one of the stage."""
        self._has_updated = True
        self._accumulation.take(self._optimized(at.stage))

    def _optimized(self, stage: int) -> list[nn.Parameter]:
        optimized = set(map(id, parameters_of(self.optimizer)))
        return [each for each in self._parts[stage] if id(each) in optimized]

    def _update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update those of the parameters that have a gradient, and drop it."""
        parameters = list(parameters)
        if self._accumulates:
            self._accumulation.make_ready(parameters)
        mine = [each for each in parameters if each.grad is not None]
        if not mine:
            return
        self._has_updated = True
        if self._keeps_squares:
            gradients = [each.grad for each in mine if each.grad is not None]
            squares = squares_of(gradients, gradients[0].device).unbind()
            self.released |= dict(zip(map(id, mine), squares, strict=True))
        update(self.optimizer, mine)
        for each in mine:
            each.grad = None


def _shared(rank: Rank) -> list[nn.Parameter]:
    """The parameters whose gradients are final only when all stages' are."""
    stages = {index: worker.module for index, worker in rank.workers.items()}
    places = (place for tie in rank.ties for place in tie if place[0] in stages)
    counts = Counter(each for stage in stages.values() for each in stage.parameters())
    return [
        *(stages[index].get_parameter(name) for index, name in places),
        *(parameter for parameter, count in counts.items() if count > 1),
    ]


def _of_loss(rank: Rank) -> list[nn.Parameter]:
    """The parameters of the loss, on the rank that computes it."""
    last = rank.workers.get(rank.timetable.num_stages - 1)
    return [*last.loss_fn.parameters()] if last and isinstance(last.loss_fn, nn.Module) else []


def updates_each_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is known to update each parameter from this parameter's gradient alone."""
    kind = type(optimizer)
    return f"{kind.__module__}.".startswith(_KNOWN) and kind is not torch.optim.LBFGS
