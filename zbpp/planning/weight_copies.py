"""What offloaded weights cost: F, B and W with the copies of a stage's weights and gradients.

A stage of n equal blocks, whose weights take c ms to the device, computes block by block; while a block runs,
the next one's weights are copied. So F, and B likewise, takes

    c/n   +   (n-1)/n max(F, c)   +   F/n
    the first block's copy        the last block's computation

W brings the gradients that exist to the device, and takes them back: 2 c in which nothing else runs. So a
schedule with fewer, larger microbatches copies less for the same work. The first block of an action may be on
the device from the action before, and the first W of a step finds no gradients: the costs here are upper
bounds.
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

    costs: without offload. weight_copy: ms of copying a stage's weights one way. overlaps: whether copies run
    beside the computation, as on a GPU; on the CPU they do not.
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
    """F or B of one stage."""
    if not overlaps:
        return time + copy
    return (copy + (num_blocks - 1) * max(time, copy) + time) / num_blocks
