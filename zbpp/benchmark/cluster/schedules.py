"""All schedules on one pipeline over all ranks: do they compute the losses of plain autograd?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zbpp.benchmark.cluster.reference import Reference, against_reference, pipeline_losses, reference_for
from zbpp.benchmark.cluster.rows import NOT_RUN, OK
from zbpp.benchmark.cluster.settings import Settings
from zbpp.job.world import World
from zbpp.planning import SCHEDULES, plan
from zbpp.runtime.parallel.mesh import planned_by_rank_0
from zbpp.schedule import PlanError

if TYPE_CHECKING:
    from zbpp.benchmark.cluster.parts import Found, Step


def steps(settings: Settings, here: World) -> Iterator[Step]:
    """A row for each schedule. Collective."""
    reference = reference_for(here)
    for name in SCHEDULES:
        yield name, lambda name=name: _row(name, reference, settings, here)  # type: ignore[misc]


def _row(name: str, reference: Reference, settings: Settings, here: World) -> Found:
    try:
        timetable = planned_by_rank_0(
            lambda: plan(name, here.size, reference.num_microbatches, time_limit=settings.search)
        )
    except PlanError as error:
        return NOT_RUN, f"no plan for {here.size} ranks: {error}", {}

    def find() -> list[float]:
        return pipeline_losses(
            reference.num_layers, timetable, here.device, rank=here.rank, timeout=settings.timeout
        )

    text, numbers = against_reference(find, reference.losses)
    return OK, text, numbers
