"""The times of F, B and W with offloaded weights, that is, with the copies of weights and gradients.

A stage of n equal blocks computes block by block; while a block runs, the next block's weights are copied. If
the copy of all the stage's weights takes c ms, F takes the following time, and B likewise:

    c/n   +   (n-1)/n max(F, c)   +   F/n
    the first block's copy        the last block's computation

W copies the gradients to the device and back: 2 c in which nothing else runs. So fewer, larger microbatches
copy less for the same work. The times are upper bounds: the first block of an action may still be on the
device from the action before, and the first W of a step finds no gradients to copy to the device.
"""

from __future__ import annotations

from dataclasses import replace

from zbpp.schedule import Costs
from zbpp.schedule.costs import PerStage
from zbpp.schedule.timetable import Op


def with_weight_copies(
    costs: Costs, weight_copy: PerStage, *, num_stages: int, num_blocks: int, overlaps: bool = True
) -> Costs:
    """The costs of stages whose weights are offloaded, with two buffers on the device.

    costs: without offloaded weights. weight_copy: ms of copying a stage's weights one way. overlaps: whether
    copies run beside the computation, as on a GPU; on the CPU they do not.
    """
    given = costs.per_stage(num_stages)
    copies = replace(Costs(), host=weight_copy).per_stage(num_stages).host

    def passed(op: Op) -> list[float]:
        return [
            _pass_ms(time, copy, num_blocks, overlaps=overlaps)
            for time, copy in zip(given.duration[op], copies, strict=True)
        ]

    b, w = passed(Op.B), [w + 2 * copy for w, copy in zip(given.duration[Op.W], copies, strict=True)]
    extra = [
        bw - own_b - own_w
        for bw, own_b, own_w in zip(*(given.duration[op] for op in (Op.BW, Op.B, Op.W)), strict=True)
    ]
    bw = [sum(each) for each in zip(b, w, extra, strict=True)]
    return replace(costs, f=passed(Op.F), b=b, w=w, bw=[max(0.0, each) for each in bw])


def _pass_ms(time: float, copy: float, num_blocks: int, *, overlaps: bool) -> float:
    """The time of F or B of one stage, with the copy of its weights."""
    if not overlaps:
        return time + copy
    return (copy + (num_blocks - 1) * max(time, copy) + time) / num_blocks
