"""The norm of all ranks' gradients, and clipping by it.

Each parameter's squared norm is computed where the parameter is, in float64; the sum over the model is exact
(`math.fsum` rounds once). So the norm is the same to the last bit on every rank, however the model is cut
into stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zbpp.autograd.leaf_grad import total_of
from zbpp.error_text import kind_of
from zbpp.features.squares import squares_of
from zbpp.job.agreement import gather
from zbpp.runtime.pipeline import Pipeline
from zbpp.runtime.processes.dtensors import local_of


def is_bound(value: Any) -> bool:
    """Whether a norm can be limited to this: a number, 0 or more. A negative one would reverse gradients."""
    return hasattr(value, "__float__") and not isinstance(value, bool) and float(value) >= 0


def clip_grad_norm_(pipeline: Pipeline, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Scale the gradients of all ranks together, in place, so that their 2-norm is at most `max_norm`.

    Returns the norm before scaling, a float64 scalar on the CPU, equal on every rank of the pipeline or its
    mesh. Collective.

    The result is that of `torch.nn.utils.clip_grad_norm_` over the whole model in one process. A parameter
    that several stages share counts once; a parameter with a `main_grad` counts with its `main_grad`. If the
    norm is infinite or NaN and `error_if_nonfinite` is set, RuntimeError is raised on every rank and nothing
    is scaled. It is raised, too, for a pipeline that releases gradients. ValueError for a max_norm that is
    negative or no number; TypeError for a list of parameters, which does not say which ones are copies.
    """
    if not is_bound(max_norm):
        raise ValueError(f"max_norm={max_norm!r}: write a number, 0 or more")
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"zbpp.clip_grad_norm_ takes a Pipeline, not {kind_of(pipeline)}")
    if pipeline.released is not None:
        raise RuntimeError(
            "the pipeline releases gradients: they are used and gone when step returns. Leave clipping out, "
            "and take an optimizer that limits its updates itself, such as optimi.StableAdamW"
        )
    norm = norm_of(gather(squares_in_mesh(pipeline), pipeline.group))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of the gradients is {norm}, so they were not clipped; error_if_nonfinite=False lets "
            "it pass"
        )
    factor = clip_factor(norm, max_norm)
    if factor != 1:
        scale_gradients(gradients_of(pipeline.parameters()), factor)
    return torch.tensor(norm, dtype=torch.float64)


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by, as by torch's clip_grad_norm_; NaN for a norm of NaN."""
    factor = max_norm / (norm + 1e-6)
    return factor if not factor >= 1 else 1.0


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradient of each parameter, `main_grad` or else `.grad`; one that comes twice counts once."""
    totals = map(total_of, {id(each): each for each in parameters}.values())
    return [total for total in totals if total is not None]


def squares_in_mesh(pipeline: Pipeline) -> list[float]:
    """The sum of squares of the gradient of each of this rank's parameters; 0 where another rank counts it.

    A gradient that the last step has released counts with the sum that was kept of it. The parts of a
    gradient on shards and tensor-parallel processes are added up first, in float64. Collective over these.
    """
    counted = set(map(id, pipeline.counted_parameters()))
    parameters = [*pipeline.parameters()]
    totals = [total_of(each) if id(each) in counted else None for each in parameters]
    none = torch.empty(0)
    squares = squares_of([none if each is None else each for each in totals], pipeline.device)
    released = pipeline.released or {}
    for place, parameter in enumerate(parameters):
        if totals[place] is None and id(parameter) in counted and id(parameter) in released:
            squares[place] = released[id(parameter)]
    pipeline.place.sum_over(pipeline.place.dimensions_of_parts, squares)
    return squares.tolist()


def norm_of(squares: Iterable[Iterable[float]]) -> float:
    """The norm over all ranks from the squared norms of each; rounded once."""
    return math.sqrt(math.fsum(number for each in squares for number in each))


def scale_gradients(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient in place."""
    tensors = list(map(local_of, gradients))
    if tensors:
        with torch.no_grad():
            torch._foreach_mul_(tensors, factor)
