"""What a caller gives to one call of a pipeline, and what a stage gets of it (batch.py makes it)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.call.marks import mapped
from zbpp.runtime.call.weights import Weights
from zbpp.stage_api import TargetNames

Observe = Callable[[Any, Any], None]  # (output, target)
Metrics = Callable[[Any, Any], Mapping[str, float | Tensor]]  # (output, target)


class Call(NamedTuple):
    """One call on this rank, as the caller made it.

    args, target, kwargs: of the whole batch, see Pipeline.step. kind: the program that the call runs: "step",
    "evaluate" or "predict", whose batch is one microbatch. name: ranks compare it, and refuse the call where
    it differs; "": the kind. slice_bounds: the tokens at which the sequences are cut, see Pipeline; (): they
    are not. observe: called for each microbatch of an evaluation. returns_outputs, metrics: see
    Pipeline.evaluate.
    """

    args: tuple[Any, ...]
    target: Any
    kwargs: Mapping[str, Any]
    kind: str = "step"
    name: str = ""
    loss_scale: float = 1.0
    slice_bounds: Sequence[int] = ()
    observe: Observe | None = None
    returns_outputs: bool = False
    metrics: Metrics | None = None

    @property
    def called(self) -> str:
        """What ranks compare: the name, or the kind."""
        return self.name or self.kind


def named_target(
    names: TargetNames, target: Any, kwargs: Mapping[str, Any], *, is_read: bool
) -> tuple[Any, Mapping[str, Any]]:
    """Return a call's target, which may be given as a keyword of another name, and the other keywords.

    is_read: whether this rank has the last stage; else a target under another name is dropped. Raises
    ValueError if the target is given twice.
    """
    given = [name for name in names if name in kwargs]
    if not given:
        return target, kwargs
    name, *more = given
    if more or target is not None:
        raise ValueError(
            f"the target is given twice, as {name}= and as {more[0] if more else 'target'}=: give one of them"
        )
    others = {key: value for key, value in kwargs.items() if key != name}
    return mapped(names[name], kwargs[name]) if is_read else None, others


class LossGradients:
    """The gradients that B starts from at the losses of a stage: one tensor for each kind of loss."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self._made: dict[Any, Tensor] = {}

    def of(self, loss: Tensor) -> Tensor:
        """The gradient of a loss."""
        kind = type(loss), loss.dtype, loss.device
        if kind not in self._made:
            self._made[kind] = torch.full_like(loss, self.value, requires_grad=False)
        return self._made[kind]

    def set(self, value: float) -> None:
        """Give all of them another value, in the same memory."""
        self.value = value
        for each in self._made.values():
            each.fill_(value)


class Feed(NamedTuple):
    """One stage's arguments from outside the pipeline. Each sequence has one entry per unit.

    A unit is a microbatch, or a slice of one where the timetable has slices.
    """

    args: Sequence[tuple[Any, ...]]  # empty for a stage whose inputs come from the stage before it
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    seeds: Sequence[int] | None  # of the random numbers that F draws; None: F seeds no generator
    loss_grads: LossGradients
    observe: Observe | None = None  # in an evaluation: called by the last stage
    weights: Weights | None = None  # of the losses, see weights.py; None: all weigh the same
    shares: Sequence[float] | None = None  # of each unit in its microbatch's tokens; None: it has all
    lengths: Sequence[int] = ()  # of each microbatch's sequences, where slices cut several lengths
    called: str = "step"  # what an error advises to write: pipeline.step or pipeline.evaluate


NO_FEED = Feed((), (), None, (), LossGradients())
