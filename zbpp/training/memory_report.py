"""The memory of a run's last step: measured, beside the prediction, and what outlives the step.

Also what an out-of-memory error says.

predicted   computed before the run, from the bytes of its stages: see zbpp.planning.memory_budget
measured    the bytes held before, during and after each action of one step
outliving   memory that was allocated in the step and outlives it, for example a tensor that a hook keeps
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zbpp.job.errors import is_out_of_memory
from zbpp.planning.memory_budget import COMPONENTS, RankMemory
from zbpp.runtime import Pipeline
from zbpp.runtime.measure import peak_memory_bytes
from zbpp.runtime.measure.memory_record import MemoryRecord, Span
from zbpp.runtime.memory.weight_offload import offloaded_weights
from zbpp.training.optim.master_weights import MasterWeights


class RankReport(NamedTuple):
    """One rank's measured step, in bytes. highest: the peak. outliving: see MemoryRecord.

    how: how the bytes were counted, in words. is_validated_later: whether the step had a gate, where the
    previous update was validated.
    """

    rank: int
    spans: list[Span]
    highest: int
    outliving: int
    how: str
    is_validated_later: bool = False


class MemoryReport:
    """Records the memory of the Trainer's step with this number."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._record: MemoryRecord | None = None
        self._is_later = self._is_recording = False

    @contextmanager
    def recording(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        masters: MasterWeights | None,
        kept: Callable[[], Iterable[Any]],
    ) -> Iterator[None]:
        """Record the step that runs within this context.

        kept(): further tensors that stay on the device from step to step, in any nest.
        """
        record = self._record = MemoryRecord(pipeline.device)
        self._is_later, self._is_recording = pipeline.validation.pending is not None, True

        def staying() -> Iterator[Tensor]:
            yield from (each for each in tree_leaves([*kept()]) if isinstance(each, Tensor))
            yield from _staying(pipeline, optimizer, masters)

        with record.step(staying, lambda: _on_host(pipeline, optimizer)), pipeline.using(record.recorder):
            yield
        self._is_recording = False

    def count(self, batch: Any) -> None:
        """Count a step's batch, whose tensors no operator made. Does nothing if the step is not recorded."""
        if self._record is not None and self._is_recording:
            self._record.count(each for each in tree_leaves(batch) if isinstance(each, Tensor))

    def gathered(self, pipeline: Pipeline) -> list[RankReport]:
        """The reports of all ranks of the first pipeline. Collective."""
        record = self._record
        assert record is not None  # the recorded step has run
        mine = RankReport(
            pipeline.rank, record.spans, record.highest, record.outliving, record.how, self._is_later
        )
        reports: list[RankReport] = pipeline.place.gather(mine)
        return reports[: pipeline.timetable.num_ranks]


def _staying(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, masters: MasterWeights | None
) -> Iterator[Tensor]:
    """Buffers for messages, weights, gradients, masters and the optimizer's states on the device."""
    weights = offloaded_weights(pipeline.stages.values())
    yield from pipeline.receive_buffers()
    yield from (pipeline.released or {}).values()
    if weights is not None:
        yield from weights.on_device()
        yield from (each for stage in pipeline.stages.values() for each in stage.buffers())
        return
    for stage in pipeline.stages.values():
        for each in (*stage.parameters(), *stage.buffers()):
            found = each, each.grad, getattr(each, "main_grad", None)
            yield from (tensor for tensor in found if tensor is not None)
    if masters is not None:
        yield from masters.parameters()
    yield from _states(optimizer)


def _on_host(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All tensors that live in host memory."""
    weights = offloaded_weights(pipeline.stages.values())
    if weights is not None:
        yield from weights.on_host()
        yield from (each.grad for each in pipeline.parameters() if each.grad is not None)
        yield from _states(optimizer)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


# ---------------------------------------------------------------- beside the prediction


def figures(predicted: Sequence[RankMemory], measured: Sequence[RankReport]) -> dict[str, Any]:
    """The content of memory.json: for each rank both curves, both peaks and what outlives the step."""
    return {
        "unit": "bytes",
        "measured_by": measured[0].how,
        "components": list(COMPONENTS),
        "ranks": [_rank(own, found) for own, found in zip(predicted, measured, strict=True)],
    }


def _rank(predicted: RankMemory, measured: RankReport) -> dict[str, Any]:
    return {
        "rank": predicted.rank,
        "actions": [str(span.action) for span in measured.spans],
        "predicted": {
            "peak": max(predicted.during),
            "at": predicted.peak_at,
            "levels": predicted.levels.tolist(),
            "during": predicted.during.tolist(),
        },
        "measured": {
            "peak": measured.highest,
            "levels": [measured.spans[0].before, *(span.after for span in measured.spans)],
            "during": [span.highest for span in measured.spans],
        },
        "host": predicted.host,
        "outliving": measured.outliving,
    }


# ---------------------------------------------------------------- out of memory


@contextmanager
def out_of_memory_explained(rank: int, device: torch.device | None = None) -> Iterator[None]:
    """Note the rank, its peak so far and `zbpp memory` on an out-of-memory error, which keeps its type.

    The Executor has noted the action. device: None: the CPU.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            peak = peak_memory_bytes(device or torch.device("cpu"))
            error.add_note(f"rank {rank} is out of memory; its peak so far: {peak / 2**30:.3f} GiB")
            error.add_note(
                "`zbpp memory` with the arguments of this run shows each rank's curve, and each switch with "
                "its time"
            )
        raise
