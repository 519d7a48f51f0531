"""Run the parts of a check in one job; a step that fails is a row, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from zbpp.benchmark.cluster.rows import FAILED, OK, Journal, Row
from zbpp.benchmark.cluster.settings import Settings
from zbpp.job.agreement import gather
from zbpp.job.world import World

Found = tuple[str, str, dict[str, Any]]  # outcome, in words, numbers
Step = tuple[str, Callable[[], "Found"]]


def run_part(part: str, settings: Settings, here: World) -> None:
    """Run one part of the job. Collective."""
    journal = Journal(settings.out, part)
    for name, step in _steps(part, settings, here):
        journal.begin(part, name)
        journal.end(attempt(part, name, step))


def attempt(part: str, name: str, step: Callable[[], Found]) -> Row:
    """The row of a step, the same on every rank; FAILED if it raised on any. Collective.

    After a failure on one rank the others stop waiting, since its links close; on NCCL torch may end them.
    """
    begin = time.perf_counter()
    problem: str | None = None
    found: Found = (OK, "", {})
    try:
        found = step()
    except Exception as error:  # whatever it is belongs into the table
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    everyone = gather((problem, found))
    for rank, (each, _) in enumerate(everyone):
        if each is not None:
            return Row(part, name, FAILED, f"rank {rank}: {each}", {})
    outcome, text, numbers = everyone[0][1]
    return Row(part, name, outcome, text, numbers | {"seconds": round(time.perf_counter() - begin, 2)})


def _steps(part: str, settings: Settings, here: World) -> Iterable[Step]:
    if part == "links":
        from zbpp.benchmark.cluster import links, machines, placement

        yield from machines.steps(here)
        yield from links.steps(settings, here)
        yield from placement.steps()
    elif part == "schedules":
        from zbpp.benchmark.cluster import schedules

        yield from schedules.steps(settings, here)
    elif part == "meshes":
        from zbpp.benchmark.cluster import meshes

        yield from meshes.steps(settings, here)
    elif part == "speed":
        from zbpp.benchmark.cluster import speed

        yield from speed.steps(settings, here)
