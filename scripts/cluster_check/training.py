"""Small models under every schedule and mesh, beside plain autograd in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from cluster_check.rows import Check
from zbpp.autograd.compiled import compile_stage
from zbpp.models.gpt import Gpt
from zbpp.parity_check import parity
from zbpp.parity_check.report import Report
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.mesh import MeshPosition, make_mesh, planned_by_rank_0
from zbpp.runtime.processes.tensor_parallel import parallelize
from zbpp.schedule import PlanError, Timetable

RATE, TOLERANCE = 0.5, 1e-11  # SGD's learning rate, relative difference
Case = tuple[str, Mapping[str, int], str]
"""What it is called, degrees of the mesh, schedule."""


def rows(check: Check, cases: Sequence[Case], *, is_compiled: bool = False) -> None:
    """A row for each case."""
    here = check.here
    num_microbatches = max(4, 2 * here.size)

    def row(degrees: Mapping[str, int], name: str) -> str:
        num_ranks = here.size // math.prod(degrees.values())
        try:
            timetable = planned_by_rank_0(lambda: plan(name, num_ranks, num_microbatches, time_limit=5.0))
        except PlanError as error:
            return f"not with {num_ranks} ranks: {error}"
        return summary(report_of(check, timetable, degrees, is_compiled=is_compiled))

    for text, degrees, name in cases:
        check.row(text, partial(row, degrees, name), f"differ by at most {TOLERANCE:g}")


def small_gpt(num_layers: int) -> Gpt:
    return Gpt(vocab_size=64, num_layers=num_layers, hidden_size=32, num_heads=8, sequence_length=8)


def tokens(num_microbatches: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of a whole step: four rows per microbatch, divisible among replicas and shards."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(64, (4 * num_microbatches, 9), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def report_of(
    check: Check, timetable: Timetable, degrees: Mapping[str, int], *, is_compiled: bool = False
) -> Report:
    """What zbpp.parity says of a pipeline and of updates with plain SGD. Collective."""
    here = check.here
    model = small_gpt(2 * here.size)
    mesh = make_mesh(**degrees, device_type=here.device.type) if degrees else None
    rank = here.rank if mesh is None else MeshPosition(mesh).rank
    stages: dict[int, nn.Module] = {
        index: model.build_stage(index, timetable.num_stages).to(here.device, torch.float64)
        for index in timetable.stages_of(rank)
    }
    parallelize(model, stages, mesh)
    for stage in stages.values() if is_compiled else ():
        compile_stage(stage, whole=False, backend="eager" if check.is_small else "inductor")
    with Pipeline(stages, timetable, model.loss, mesh=mesh, timeout=check.timeouts.waiting) as pipeline:
        place = pipeline.place
        return parity(
            partial(step, pipeline),
            pipeline,
            whole=lambda: model.build_stage(0, 1),
            batch=[
                each.chunk(place.num_data_parts)[place.data_part].to(here.device)
                for each in tokens(timetable.num_microbatches)
            ],
            loss_fn=model.loss,
            # On a GPU torch takes `foreach` by itself, which refuses DTensors and plain tensors together.
            optimizer=partial(torch.optim.SGD, lr=RATE, foreach=False),
            tolerance=TOLERANCE,
        )


def step(pipeline: Pipeline, batch: Sequence[Tensor]) -> list[Tensor]:
    """Each rank passes what its stages read."""
    inputs, target = batch
    args = (inputs,) if 0 in pipeline.stages else ()
    has_loss = pipeline.timetable.num_stages - 1 in pipeline.stages
    return pipeline.step(*args, target=target if has_loss else None)


def summary(report: Report) -> str:
    """Says that all is equal. Raises ValueError if more than rounding differs."""
    if not report.is_equal:
        raise ValueError(report.verdict)
    error = max(report.checks.values())
    return f"losses, gradients and updates as plain autograd's (differ by {error:.0e})"
