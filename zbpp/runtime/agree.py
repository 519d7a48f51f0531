"""Plans made from what was measured: rank 0 plans, the text travels, so that ranks can't disagree."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from zbpp.runtime.world import broadcast
from zbpp.schedule import PlanError, Timetable


def planned_by_rank_0(make: Callable[[], Timetable], group: dist.ProcessGroup | None = None) -> Timetable:
    """What `make` plans on rank 0, on every rank. Raises rank 0's PlanError everywhere. Collective."""
    text = refusal = ""
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        try:
            text = str(make())
        except PlanError as error:
            refusal = str(error)
    text, refusal = broadcast((text, refusal), group)
    if refusal:
        raise PlanError(refusal)
    return Timetable.parse(text)
