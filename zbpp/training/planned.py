"""The plan that a run begins with: made for a schedule's name, or read from a file."""

from __future__ import annotations

from zbpp.planning import RankCosts, compare, read_costs, read_memory_limit
from zbpp.schedule import PlanError, Timetable, read_timetable


def made_plan(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: str | None = None,
    memory_limit: float | str | None = None,
    placement: str | None = None,
    stages_per_rank: int | None = None,
) -> Timetable:
    """The plan that scripts/plan.py prints for the same arguments.

    costs: a file of scripts/measure.py. memory_limit: of each rank, in activations of its share of the
    model, or with a unit ("12GiB") where the costs are in bytes. Raises PlanError or OSError.
    """
    measured = RankCosts() if costs is None else read_costs(costs)[0]
    (outcome,) = compare(
        [name],
        num_ranks,
        num_microbatches,
        costs=measured,
        memory_limit=read_memory_limit(memory_limit, measured),
        placement=placement,
        stages_per_rank=stages_per_rank,
    ).values()
    if isinstance(outcome, PlanError):
        raise outcome
    return outcome.timetable


def read_plan(file: str, num_ranks: int, num_microbatches: int | None, **options: object) -> Timetable:
    """The plan in a file, in any form that scripts/plan.py writes; num_microbatches None: as many as it has.

    options: what would go with a schedule's name, and must be None here. Raises PlanError or OSError.
    """
    for option, value in options.items():
        if value is not None:
            raise PlanError(f"{file} is a plan already: leave schedule.{option}={value} out")
    found = read_timetable(file)
    if found.num_ranks != num_ranks:
        raise PlanError(
            f"{file} is a plan for {found.num_ranks} ranks, not for {num_ranks}: write "
            f"parallel.num_ranks={found.num_ranks}, or torchrun --nproc-per-node {found.num_ranks}"
        )
    if num_microbatches not in (None, found.num_microbatches):
        raise PlanError(
            f"{file} is a plan for {found.num_microbatches} microbatches, not for "
            f"num_microbatches={num_microbatches}: leave num_microbatches out"
        )
    return found
