"""Small models under every schedule and mesh, beside plain autograd in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from cluster_check.rows import Check
from zbpp.autograd.compiled import compile_stage
from zbpp.job.agreement import broadcast
from zbpp.models.gpt import Gpt
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.mesh import MeshPosition, make_mesh, planned_by_rank_0
from zbpp.runtime.processes.tensor_parallel import parallelize
from zbpp.schedule import PlanError, Timetable

STEPS, RATE, TOLERANCE = 2, 0.5, 1e-11  # steps, SGD's learning rate, relative difference
Case = tuple[str, Mapping[str, int], str]
"""What it is called, degrees of the mesh, schedule."""


def rows(check: Check, cases: Sequence[Case], *, is_compiled: bool = False) -> None:
    """A row for each case."""
    here = check.here
    num_microbatches = max(4, 2 * here.size)
    expected = plain_losses(2 * here.size, num_microbatches, here.rank)

    def row(degrees: Mapping[str, int], name: str) -> str:
        num_ranks = here.size // math.prod(degrees.values())
        try:
            timetable = planned_by_rank_0(lambda: plan(name, num_ranks, num_microbatches, time_limit=5.0))
        except PlanError as error:
            return f"not with {num_ranks} ranks: {error}"
        return compared(pipeline_losses(check, timetable, degrees, is_compiled=is_compiled), expected)

    for text, degrees, name in cases:
        check.row(text, partial(row, degrees, name), f"differ by at most {TOLERANCE:g}")


def small_gpt(num_layers: int) -> Gpt:
    return Gpt(vocab_size=64, num_layers=num_layers, hidden_size=32, num_heads=8, sequence_length=8)


def tokens(step: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of a whole step: four rows per microbatch, divisible among replicas and shards."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(64, (4 * num_microbatches, 9), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def plain_losses(num_layers: int, num_microbatches: int, rank: int) -> list[float]:
    """The losses of plain autograd in one process, computed on rank 0. Collective.

    The second step's depends on the gradients of the first: an update with plain SGD stands between them.
    """
    losses = []
    if rank == 0:
        model = small_gpt(num_layers)
        whole = model.build_stage(0, 1).double()
        optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)
        for step in range(STEPS):
            inputs, target = tokens(step, num_microbatches)
            loss = model.loss(whole(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    found: list[float] = broadcast(losses)
    return found


def pipeline_losses(
    check: Check, timetable: Timetable, degrees: Mapping[str, int], *, is_compiled: bool = False
) -> list[float]:
    """The loss of each step under a pipeline, the mean over all data. Collective."""
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
    losses = []
    with Pipeline(stages, timetable, model.loss, mesh=mesh, timeout=check.timeouts.waiting) as pipeline:
        place = pipeline.place
        # On a GPU torch takes `foreach` by itself, which refuses DTensors and plain tensors together.
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=RATE, foreach=False)
        for step in range(STEPS):
            batch = tokens(step, timetable.num_microbatches)
            inputs, target = (
                each.chunk(place.num_data_parts)[place.data_part].to(here.device) for each in batch
            )
            args = (inputs,) if 0 in stages else ()
            has_loss = timetable.num_stages - 1 in stages
            mine = [each.item() for each in pipeline.step(*args, target=target if has_loss else None)]
            optimizer.step()
            optimizer.zero_grad()
            parts = [sum(each) / len(each) for each in place.gather(mine) if each]
            losses.append(sum(parts) / len(parts))
    return losses


def compared(losses: Sequence[float], expected: Sequence[float]) -> str:
    """Says that losses are the expected ones. Raises ValueError if they differ by more than rounding."""
    pairs = zip(losses, expected, strict=True)
    difference = max(abs(one - other) / abs(other) for one, other in pairs)
    if not difference <= TOLERANCE:
        raise ValueError(f"losses {losses} differ from plain autograd's {list(expected)} by {difference:.1e}")
    return f"losses as plain autograd's (differ by {difference:.0e})"
