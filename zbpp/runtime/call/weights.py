"""The weight of each microbatch's loss in the loss of a step, if all targets of the step weigh the same.

The loss of such a step is the mean over the targets of all microbatches, on all processes that see different
tokens. Its loss function says how many targets a microbatch has (`mean_over` in zbpp/stage_api.py). Before B
starts, a microbatch's loss is multiplied by

    targets of the microbatch x number of microbatches x number of parts / targets of the step

where the parts are those of the step's tokens, one for each process that sees different ones. Gradients are
averaged over microbatches and parts, as without weights. So the plain mean of the
weighted losses is the step's loss. If all microbatches have the same number of targets, the factor is exactly
1. A slice of a microbatch has the formula with its own targets: the weighted losses of a microbatch's slices
add up to the microbatch's. The rank that computes the loss counts the targets before its first F.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Count = Callable[[Any], Tensor | float]


class Weights(NamedTuple):
    """The weights of the losses of one call: float64, without dimensions, on the device of the stages.

    of_means: per unit, the factor of a loss that is a mean over the unit's targets. of_sum: the factor of a
    loss that is a sum over them. counts: per unit, the number of targets.
    """

    of_means: Sequence[Tensor]
    of_sum: Tensor
    counts: Sequence[Tensor]


def weights_of(
    targets: Sequence[Any],
    count: Count,
    device: torch.device,
    num_microbatches: int,
    num_parts: int = 1,
    sum_over_parts: Callable[[Tensor], object] = lambda total: None,
) -> Weights:
    """The weights of the losses of units with these targets.

    count: the number of targets of one unit. num_microbatches: to which the units belong, with the empty
    ones. num_parts: how many processes see different tokens. sum_over_parts: sums a tensor over these
    processes, in place; collective.
    """
    with torch.no_grad():
        found = [torch.as_tensor(count(each)).to(device, torch.float64) for each in targets]
        total = torch.stack(found).sum()
        sum_over_parts(total)
        of_sum = num_microbatches * num_parts / total.clamp(min=1)
        # In this order equal counts give exactly 1.
        of_means = [each * (num_microbatches * num_parts) / total.clamp(min=1) for each in found]
    return Weights(of_means, of_sum, found)


def weighed(loss: Tensor, factor: Tensor) -> Tensor:
    """The loss times a factor, in float32 at least; 0 for a factor of 0, whose mean over no target is NaN."""
    product = loss * factor.to(torch.promote_types(loss.dtype, torch.float32))
    return torch.where(factor == 0, torch.zeros_like(product), product)
