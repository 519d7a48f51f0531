"""Do tensor-parallel processes compute the same losses?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from zbpp.job.agreement import gather
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.extra import Observer
from zbpp.runtime.processes.mesh import TENSOR
from zbpp.runtime.rank import Rank


class LossesAlike(Observer):
    """Raises ValueError if tensor-parallel processes computed different losses in the first step.

    A loss of a part of an activation differs from process to process, and so do its gradients, which are then
    wrong. Auxiliary losses are compared, too.
    """

    name = "losses_alike"

    def __init__(self) -> None:
        self._is_done = False

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._group = rank.place.groups[TENSOR]

    def end(self, call: Call, result: Result) -> None:
        """Compare the losses of the first step. Collective over the tensor dimension."""
        if not self._is_done and call.kind == "step":
            self._is_done = True
            _check_alike(
                {"the loss": [each.item() for each in result.losses], **result.named.means()}, self._group
            )


def _check_alike(mine: Mapping[str, Sequence[float]], group: dist.ProcessGroup) -> None:
    for other in gather(mine, group):
        for name, values in other.items():
            if not _are_close(values, mine.get(name, [])):
                raise ValueError(
                    f"{name} differs between tensor-parallel processes ({values}, {mine.get(name)}). Either "
                    "they were given different data: give all with the same place.data_part the same. Or the "
                    "loss is computed on a part of an activation, and its gradients are wrong: compute it on "
                    "the whole one, that is, before a colwise layer or after a rowwise one"
                )


def _are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether numbers differ by rounding alone; NaN is close to NaN."""
    if len(some) != len(others):
        return False
    pairs = zip(some, others, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
