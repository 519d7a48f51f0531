"""What the loss of a microbatch weighs in the loss of its step, where targets weigh alike.

The loss of a step is the mean over its targets: those of all microbatches, and of all replicas and shards.
A loss that says how many targets a microbatch has (`mean_over` in zbpp/stage_api.py) is multiplied by

    count of the microbatch x number of microbatches x number of replicas and shards / count of the step

before B starts. Microbatches, replicas and shards are averaged elsewhere, as if all weighed the same. So the
mean of the losses that a step returns is the step's loss. If all counts are equal the factor is exactly 1.
The counts are known before the first F, where the targets are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Count = Callable[[Any], Tensor | float]


class Weights(NamedTuple):
    """Factors of the losses of one call: float64, without dimensions, on the device of the targets.

    of_means: of each microbatch's mean. of_sum: of a sum over a microbatch's targets. counts: of each.
    """

    of_means: Sequence[Tensor]
    of_sum: Tensor
    counts: Sequence[Tensor]


def weights_of(
    targets: Sequence[Any],
    count: Count,
    device: torch.device,
    num_parts: int = 1,
    sum_over_parts: Callable[[Tensor], None] = lambda total: None,
) -> Weights:
    """The weights of microbatches with these targets.

    num_parts: how many replicas and shards see different data. sum_over_parts: sums a number over them, in
    place; collective.
    """
    with torch.no_grad():
        found = [torch.as_tensor(count(each)).to(device, torch.float64) for each in targets]
        total = torch.stack(found).sum()
        sum_over_parts(total)
        of_sum = len(targets) * num_parts / total.clamp(min=1)
        # In this order equal counts give exactly 1.
        of_means = [each * (len(targets) * num_parts) / total.clamp(min=1) for each in found]
    return Weights(of_means, of_sum, found)


def weighed(loss: Tensor, factor: Tensor) -> Tensor:
    """The loss times a factor, in float32 at least."""
    return loss * factor.to(torch.promote_types(loss.dtype, torch.float32))
