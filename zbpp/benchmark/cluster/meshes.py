"""Pipelines with replicas, shards and tensor parallelism: do they compute plain autograd's losses?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from zbpp.benchmark.cluster.reference import Reference, against_reference, pipeline_losses, reference_for
from zbpp.benchmark.cluster.rows import NOT_RUN, OK
from zbpp.benchmark.cluster.settings import Settings
from zbpp.job.world import World
from zbpp.planning import plan
from zbpp.runtime.parallel.mesh import DIMENSIONS, Place, make_mesh

if TYPE_CHECKING:
    from zbpp.benchmark.cluster.parts import Found, Step

_DEGREES = (
    {"replicate": 2},
    {"shard": 2},
    {"tensor": 2},
    {"replicate": 2, "tensor": 2},
    {"shard": 2, "tensor": 2},
    {"replicate": 2, "shard": 2},
    {"replicate": 2, "shard": 2, "tensor": 2},
    {"tensor": 8},
)


def steps(settings: Settings, here: World) -> Iterator[Step]:
    """A row for each composition that the number of ranks allows. Collective."""
    fitting = [each for each in _DEGREES if here.size % math.prod(each.values()) == 0]
    if not fitting:
        yield "compositions", lambda: (NOT_RUN, f"{here.size} ranks can't be divided by 2", {})
        return
    reference = reference_for(here)
    for degrees in fitting:
        for schedule in ("zb_h1", "zb_v") if settings.heavy else ("zb_v",):
            name = f"{mesh_text(here.size, degrees)}, {schedule}"
            yield (
                name,
                lambda schedule=schedule, degrees=degrees: _row(  # type: ignore[misc]
                    schedule, degrees, reference, settings, here
                ),
            )


def mesh_text(size: int, degrees: Mapping[str, int]) -> str:
    """`pipeline 2 x replicate 2`."""
    sizes = {"pipeline": size // math.prod(degrees.values()), **degrees}
    return " x ".join(f"{name} {sizes[name]}" for name in DIMENSIONS if name in sizes)


def _row(
    schedule: str, degrees: Mapping[str, int], reference: Reference, settings: Settings, here: World
) -> Found:
    mesh = make_mesh(**degrees, device_type=here.device.type)
    timetable = plan(schedule, here.size // math.prod(degrees.values()), reference.num_microbatches)
    rank = Place(mesh).rank

    def find() -> list[float]:
        return pipeline_losses(
            reference.num_layers, timetable, here.device, rank=rank, mesh=mesh, timeout=settings.timeout
        )

    text, numbers = against_reference(find, reference.losses)
    return OK, text, numbers
