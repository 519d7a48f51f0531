"""The model whose losses are checked, and its losses under plain autograd in one process, all in float64.

Losses of the second step depend on the gradients of the first: an update with plain SGD stands between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.job.agreement import broadcast
from zbpp.job.world import World
from zbpp.models.gpt import Gpt
from zbpp.runtime import Pipeline
from zbpp.runtime.parallel.tensor_parallel import parallelize
from zbpp.schedule import Timetable

STEPS, RATE, TOLERANCE = 2, 0.5, 1e-11
_HIDDEN, _HEADS, _SEQUENCE, _VOCAB = 32, 8, 8, 64
_LARGEST_PART = 4  # into how many parts a step's rows can be divided among replicas and shards


def small_gpt(num_layers: int) -> Gpt:
    """A GPT whose layers can be split over up to 8 ranks."""
    return Gpt(
        vocab_size=_VOCAB,
        num_layers=num_layers,
        hidden_size=_HIDDEN,
        num_heads=_HEADS,
        sequence_length=_SEQUENCE,
    )


def tokens(step: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of a whole step."""
    generator = torch.Generator().manual_seed(step)
    rows = _LARGEST_PART * num_microbatches
    drawn = torch.randint(_VOCAB, (rows, _SEQUENCE + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


class Reference(NamedTuple):
    """The sizes of a run on all ranks, and the losses that plain autograd has for it."""

    num_layers: int
    num_microbatches: int
    losses: list[float]


def reference_for(here: World) -> Reference:
    """Two layers and two microbatches a rank, but four microbatches at least. Collective."""
    num_layers, num_microbatches = 2 * here.size, max(4, 2 * here.size)
    return Reference(num_layers, num_microbatches, plain_losses(num_layers, num_microbatches, here.rank))


def plain_losses(num_layers: int, num_microbatches: int, rank: int) -> list[float]:
    """The loss of each step in one process, computed on rank 0. Collective."""
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
    num_layers: int,
    timetable: Timetable,
    device: torch.device,
    *,
    rank: int,
    mesh: Any = None,
    timeout: float,
) -> list[float]:
    """The loss of each step under a pipeline, the mean over all data. Collective. rank: in the pipeline."""
    model = small_gpt(num_layers)
    stages: dict[int, nn.Module] = {
        index: model.build_stage(index, timetable.num_stages).to(device, torch.float64)
        for index in timetable.stages_of(rank)
    }
    parallelize(model, stages, mesh)
    losses = []
    with Pipeline(stages, timetable, model.loss, mesh=mesh, timeout=timeout) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=RATE)
        for step in range(STEPS):
            args, target = _own_rows(pipeline, tokens(step, timetable.num_microbatches), device)
            mine = [loss.item() for loss in pipeline.step(*args, target=target)]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(_mean([_mean(each) for each in pipeline.place.gather(mine) if each]))
    return losses


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _own_rows(
    pipeline: Pipeline, batch: tuple[Tensor, Tensor], device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    place, stages = pipeline.place, pipeline.stages
    inputs, target = (each.chunk(place.num_data_parts)[place.data_part].to(device) for each in batch)
    last = pipeline.timetable.num_stages - 1
    return (inputs,) if 0 in stages else (), target if last in stages else None


def compared(losses: Sequence[float], expected: Sequence[float]) -> tuple[float, bool]:
    """(the largest relative difference, whether it is only rounding)."""
    pairs = zip(losses, expected, strict=True)
    worst = max(abs(one - other) / abs(other) for one, other in pairs)
    return worst, worst <= TOLERANCE


def against_reference(
    find: Callable[[], list[float]], expected: Sequence[float]
) -> tuple[str, dict[str, Any]]:
    """(in words, numbers) of a run whose losses are the reference's. Raises ValueError if they are not."""
    losses = find()
    difference, is_equal = compared(losses, expected)
    numbers = {"losses": losses, "expected": list(expected), "difference": difference}
    if not is_equal:
        raise ValueError(f"losses {losses} differ from plain autograd's {list(expected)} by {difference:.1e}")
    return f"losses as plain autograd's (differ by {difference:.0e})", numbers
