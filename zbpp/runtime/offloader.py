"""One rank's offload of activations: chosen before the first step, or after two measured steps.

Without costs, the first two steps offload as much as possible: what a microbatch holds between F and B leaves
if an action runs between them, and likewise between B and W. The second step is measured. Its times, the
bytes that left and the times of their copies give the plan of all further steps. All ranks measure together.
Then each rank plans for itself, since no message depends on what another rank offloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbpp.autograd.copies import Copier, OffloadError, copier_for
from zbpp.runtime.activation_offload import ActivationOffload
from zbpp.runtime.measure.costs import measured_costs
from zbpp.runtime.measure.record import StepRecord
from zbpp.runtime.measure.timeline import measured_timeline
from zbpp.runtime.mesh import Place
from zbpp.runtime.offload import DeferredOffload, SavedOffload, StageOffload
from zbpp.runtime.stage import StageWorker
from zbpp.runtime.weight_offload import offloaded_weights
from zbpp.runtime.world import gather
from zbpp.schedule import Costs, Timetable, Value, choose_offload, offload_of, simulate
from zbpp.schedule.copies import CopySpan
from zbpp.schedule.offload import RankOffload

_MEASURED_STEPS = 2  # the second is measured; the first one fills the pools and loads kernels


def check_one_offload(options: ActivationOffload | None, stages: Iterable[nn.Module], place: Place) -> None:
    """Raise ValueError on all ranks if one rank offloads both activations and weights. Collective.

    Both pack saved tensors by hooks, and a saved tensor can have only one pair of hooks.
    """
    has_both = options is not None and offloaded_weights(stages) is not None
    if any(place.gather(has_both)):
        raise ValueError(
            "offload=ActivationOffload(...) doesn't go with OffloadedWeights, since both pack saved tensors: "
            "leave offload out, and let blocks recompute (zbpp.checkpoint) to hold less"
        )


def offload_maker(
    options: ActivationOffload | None, timetable: Timetable, device: torch.device, place: Place
) -> Callable[[Mapping[int, StageWorker]], Offloader] | None:
    """A function that makes the Offloader of this rank's stages; None without offload.

    Raises OffloadError on all ranks if one rank can't make its Copier. Raises ValueError on all ranks if some
    ranks measure for the plan and others do not. Collective over the mesh.
    """
    copier, refusal = None, ""
    if options is not None:
        try:
            copier = options.to if isinstance(options.to, Copier) else copier_for(device, options.to)
        except OffloadError as error:
            refusal = str(error)
    found = place.gather((options is not None and options.is_measured, refusal))
    refusals = [each for _, each in found if each]
    if refusals:
        raise OffloadError(refusals[0])
    if len({is_measured for is_measured, _ in found}) > 1:
        raise ValueError(
            "offload has costs or values on some ranks only: give them on all ranks, or on none, since ranks "
            "without them measure and plan together"
        )
    if options is None or copier is None:
        return None
    return partial(Offloader, options, timetable, copier, place.pipeline)


class Offloader:
    """Measures one rank's steps if it has to, chooses what leaves, and holds the StageOffloads that do it.

    plan: for each rank, what leaves in the next step. offloads: {(name of the value, stage): StageOffload},
    for this rank's stages. group: the pipeline's ranks, which measure together. Raises PlanError for values
    that can't leave.
    """

    def __init__(
        self,
        options: ActivationOffload,
        timetable: Timetable,
        copier: Copier,
        group: dist.ProcessGroup | None,
        workers: Mapping[int, StageWorker],
    ) -> None:
        self._options, self._timetable, self._group = options, timetable, group
        self.copier = copier
        self.copier.most_bytes = options.most_bytes
        self.offloads: dict[tuple[str, int], StageOffload[Any]] = {
            (kind.name, index): kind(worker, self.copier, options.least_bytes)
            for index, worker in workers.items()
            for kind in (SavedOffload, DeferredOffload)
        }
        self._recorder = StepRecord(copier.device)
        self._num_steps = 0
        self.costs: Costs | None = options.costs
        self.plan = self._first_plan()

    @property
    def is_measuring(self) -> bool:
        """Whether the costs for the plan are still to be measured."""
        return self.costs is None and self._options.is_measured

    @property
    def recorder(self) -> StepRecord | None:
        """The record of the next step, if that step is measured for the plan; else None."""
        return self._recorder if self.is_measuring and self._num_steps >= _MEASURED_STEPS - 1 else None

    def nbytes(self, name: str) -> dict[int, int]:
        """{stage of this rank: the most bytes that left of one of its values of this name}."""
        return {stage: each.nbytes for (kind, stage), each in self.offloads.items() if kind == name}

    def _first_plan(self) -> tuple[RankOffload, ...]:
        if self._options.values is not None:
            return offload_of(self._timetable, map(_value, self._options.values))
        return self._choose(self.costs or Costs(host=1e-6), everything=self.costs is None)

    def _choose(self, costs: Costs, *, everything: bool = False) -> tuple[RankOffload, ...]:
        # While the bytes are unknown, the plan can't keep to the limit: the copier's has_room does.
        limit = math.inf if everything else self._options.most_bytes
        is_late = everything or self._options.gib != "auto"
        return choose_offload(simulate(self._timetable, costs), costs, limit, late=is_late)

    def step_done(self, recorder: StepRecord | None) -> bool:
        """Called after each step. Returns whether there is a new plan. Collective over the pipeline."""
        self._num_steps += 1
        if not self.is_measuring or self._num_steps < _MEASURED_STEPS:
            return False
        if recorder is None or recorder.is_empty:  # a MemoryRecorder took levels of memory instead of times
            return False
        timeline = measured_timeline(recorder, self._timetable, self._group)
        saved, deferred = (self._bytes_per_stage(name) for name in ("saved", "deferred"))
        host = _host_ms(timeline.copies, self._timetable, {"saved": saved, "deferred": deferred})
        times = measured_costs(timeline)
        self.costs = type(times)(**{**times.numbers, "host": host}).in_bytes(saved, deferred)
        self.plan = self._choose(self.costs)
        self.copier.clear()  # more left in the first steps, so their spaces are too many
        return True

    def _bytes_per_stage(self, name: str) -> list[int]:
        """For each stage of the pipeline, the bytes that left of its values of this name. Collective."""
        found = {
            stage: each for some in gather(self.nbytes(name), self._group) for stage, each in some.items()
        }
        return [found[stage] for stage in range(self._timetable.num_stages)]

    def end(self) -> None:
        """End a step: trim the pool. Raises RuntimeError if an offloaded value has had no Await."""
        for each in self.offloads.values():
            each.end()
        self.copier.trim()

    def abandon(self) -> None:
        """Let all stages drop the tensors that a failed step has left."""
        for each in self.offloads.values():
            each.abandon()

    def close(self) -> None:
        """Free the host memory, or delete the file. A Copier that the caller made stays usable."""
        self.abandon()
        if self.copier is self._options.to:
            self.copier.clear()
        else:
            self.copier.close()


def _value(given: tuple[int, int] | Value) -> Value:
    return given if isinstance(given, Value) else Value("saved", *given)


def _host_ms(
    copies: Sequence[CopySpan], timetable: Timetable, nbytes: Mapping[str, Sequence[int]]
) -> list[float]:
    """Costs.host from measured copies: for each stage, the time of a copy in the slower direction.

    0 for the stages of a rank that copied nothing. nbytes: {name of the value: bytes of each stage}.
    """
    ms_per_byte = []
    for rank in range(timetable.num_ranks):
        speeds: dict[bool, list[float]] = {}
        for each in copies:
            if each.rank == rank and (size := nbytes[each.value.name][each.value.stage]):
                speeds.setdefault(each.is_out, []).append((each.end - each.start) / size)
        ms_per_byte.append(max(map(median, speeds.values()), default=0.0))
    sizes = [saved or deferred for saved, deferred in zip(nbytes["saved"], nbytes["deferred"], strict=True)]
    return [ms_per_byte[timetable.rank_of[stage]] * size for stage, size in enumerate(sizes)]
