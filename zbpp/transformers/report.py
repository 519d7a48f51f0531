"""What a Trainer in a pipeline prints once: at its start the cut, the plan and the weights; after its second,
warm step the measured bubble, and the other memory of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zbpp.autograd.storages import bytes_of
from zbpp.models.hf.quantize import statistics
from zbpp.planning.memory_limit import memory_text
from zbpp.runtime import Pipeline
from zbpp.schedule import Timeline, Timetable, simulate
from zbpp.schedule.costs import BYTES

_MORE = (4, 8)  # microbatches, to compare with fewer


class Held(NamedTuple):
    """Bytes that a rank holds. weights: with buffers, and with what quantized weights need beside them."""

    weights: int
    gradients: int
    optimizer: int


def held(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None = None) -> Held:
    """What this rank holds now, in bytes; a storage that two tensors share counts once."""
    parameters, stages = list(pipeline.parameters()), pipeline.stages.values()
    weights = [*parameters, *(each for stage in stages for each in stage.buffers())]
    weights += [each for stage in stages for each in statistics(stage)]
    states = tree_leaves(dict(optimizer.state)) if optimizer is not None else []
    return Held(
        bytes_of(weights),
        bytes_of(each.grad for each in parameters if each.grad is not None),
        bytes_of(each for each in states if isinstance(each, Tensor)),
    )


def report(
    name: str,
    timetable: Timetable,
    layers: Sequence[int],
    everyone: Sequence[Held],
    planned: Callable[[int], Timetable],
    num_replicas: int = 1,
    choice: str = "",
) -> str:
    """Lines to print at the start.

    name: of the schedule. layers: of each stage. everyone: what each rank of a pipeline holds. planned: the
    timetable for another number of microbatches. choice: of the cut, in words.
    """
    num_ranks, num_microbatches = timetable.num_ranks, timetable.num_microbatches
    counts = ", ".join(map(str, layers))
    pipelines = f"{num_replicas} pipelines of " if num_replicas > 1 else ""
    lines = [
        *choice.splitlines(),
        f"{name}: {pipelines}{num_ranks} ranks, stages of {counts} layers, "
        f"{num_microbatches} microbatches a step",
        f"weights: {_texts([each.weights for each in everyone])} on ranks 0 to {num_ranks - 1}",
        f"predicted bubble: {_percent(simulate(timetable))} if F, B and W take equally long",
    ]
    if num_ranks > 1 and num_microbatches < _MORE[0]:
        others = ", ".join(f"with {more} {_percent(simulate(planned(more)))}" for more in _MORE)
        lines.append(
            f"gradient_accumulation_steps={num_microbatches} are all microbatches that there are; the bubble "
            f"would be {others}: write more of them, with a smaller per_device_train_batch_size"
        )
    return _joined(lines)


def report_measured(timeline: Timeline, everyone: Sequence[Held]) -> str:
    """Lines to print after a measured step. everyone: what each rank holds then, before the update."""
    predicted = simulate(timeline.timetable)
    return _joined(
        [
            f"measured bubble: {_percent(timeline)} in the second step, predicted {_percent(predicted)}",
            f"gradients: {_texts([each.gradients for each in everyone])}; "
            f"optimizer states: {_texts([each.optimizer for each in everyone])}",
            f"peak memory of the processes: {_texts(timeline.peak_memory)}",
        ]
    )


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(f"zbpp: {line}" for line in lines)


def _percent(timeline: Timeline) -> str:
    return f"{100 * timeline.bubble_rate:.0f} %"


def _texts(sizes: Sequence[float]) -> str:
    return ", ".join(memory_text(each, BYTES) for each in sizes)
