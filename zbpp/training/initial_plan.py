"""The plan that a run begins with: made for a schedule's name, or read from a file."""

from __future__ import annotations

import numpy as np

from zbpp.planning import RankCosts, compare, read_costs, read_memory_limit
from zbpp.schedule import Op, PlanError, Timetable, read_timetable


def plan_by_name(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: str | None = None,
    memory_limit: float | str | None = None,
    placement: str | None = None,
    stages_per_rank: int | None = None,
) -> Timetable:
    """The plan that `zbpp plan` prints for the same arguments.

    costs: a file that `zbpp measure` wrote. memory_limit: what each rank may hold, in activations of its
    share of the model, or with a unit ("12GiB") where the costs are in bytes. Raises PlanError or OSError.
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


def plan_from_file(file: str, num_ranks: int, num_microbatches: int | None, **options: object) -> Timetable:
    """The plan in a file, in any form that `zbpp plan` writes; num_microbatches None: as many as it has.

    options: the arguments of `plan_by_name`; a file leaves nothing to plan, so each must be None. Raises
    PlanError or OSError.
    """
    for option, value in options.items():
        if value is not None:
            raise PlanError(f"{file} is a plan already: leave schedule.{option}={value} out")
    timetable = read_timetable(file)
    if not all(np.isin(row.ops, (Op.W, Op.BW)).any() for row in timetable.rows):
        raise PlanError(f"{file} is no plan to train by: a rank has no W and no BW")
    if timetable.num_ranks != num_ranks:
        raise PlanError(
            f"{file} is a plan for {timetable.num_ranks} ranks, not for {num_ranks}: write "
            f"-n {timetable.num_ranks}, or torchrun --nproc-per-node {timetable.num_ranks} (times replicate, "
            "shard and tensor)"
        )
    if num_microbatches not in (None, timetable.num_microbatches):
        raise PlanError(
            f"{file} is a plan for {timetable.num_microbatches} microbatches, not for "
            f"num_microbatches={num_microbatches}: leave num_microbatches out"
        )
    return timetable
