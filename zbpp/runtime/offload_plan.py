"""What leaves, decided: at once where costs are given, else after two measured steps.

Without costs, every microbatch leaves in the first two steps if any action runs between its F and its B: that
is where the least is on the device. The second step's times, the bytes that left, and the speed of a copy
then give the plan of all further steps. All ranks measure and plan together, but each plans for itself: what
leaves one rank concerns no message.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from zbpp.autograd.copies import Copier, OffloadError, copier_for
from zbpp.autograd.offload import LEAST_BYTES
from zbpp.runtime.measure import Recorder, measured_costs, measured_timeline
from zbpp.runtime.mesh import Place
from zbpp.runtime.offload import StageOffload
from zbpp.runtime.stage import StageWorker
from zbpp.runtime.weight_offload import offloaded_weights
from zbpp.runtime.world import gather
from zbpp.schedule import Costs, Timetable, Value, choose_offload, offload_of, simulate
from zbpp.schedule.offload import RankOffload

_SAMPLE_BYTES = 64 * 2**20
_GIB = 2**30
_MEASURED_STEPS = 2  # the second is measured; in the first, pools are filled and kernels are loaded


@dataclass(frozen=True)
class ActivationOffload:
    """Which activations leave device memory between F and B.

    gib: "auto": those whose copies take no time beside the computation. A number: up to so many GiB of a
    rank are away at a time, even if actions wait for copies.
    to: "host" (on a GPU pinned memory), or a folder for a file without a name; or a Copier of your own.
    costs: what to plan with, `host` and bytes among them; None: what two steps measure.
    values: exactly these (stage, microbatch) leave, whatever gib and costs say.
    least_bytes: smaller storages stay.
    """

    gib: float | Literal["auto"] = "auto"
    to: str | Path | Copier = "host"
    costs: Costs | None = None
    values: Iterable[tuple[int, int]] | None = None
    least_bytes: int = LEAST_BYTES

    def __post_init__(self) -> None:
        if self.gib == "auto":
            return
        if isinstance(self.gib, bool) or not isinstance(self.gib, int | float) or not self.gib > 0:
            raise ValueError(
                f'gib={self.gib!r}: write "auto", or how many GiB may leave, above 0; offload=None for none'
            )

    @property
    def most_bytes(self) -> float:
        """The most that may be away from a rank at a time."""
        return math.inf if self.gib == "auto" else float(self.gib) * _GIB

    @property
    def is_measured(self) -> bool:
        """Whether two steps decide."""
        return self.costs is None and self.values is None


def check_one_offload(options: ActivationOffload | None, stages: Iterable[nn.Module], place: Place) -> None:
    """Raise ValueError on all ranks if one has both activations and weights that leave. Collective.

    A saved tensor has one pair of hooks, and offloaded weights need theirs.
    """
    has_both = options is not None and offloaded_weights(stages) is not None
    if any(place.gather(has_both)):
        raise ValueError(
            "offload=ActivationOffload(...) doesn't go with offloaded weights, which pack saved weights "
            "themselves: leave offload out, and let blocks recompute (zbpp.checkpoint) to hold less"
        )


def offload_maker(
    options: ActivationOffload | None, timetable: Timetable, device: torch.device, place: Place
) -> Callable[[Mapping[int, StageWorker]], OffloadPlan] | None:
    """What makes the OffloadPlan of this rank's stages; None without offload. Collective over the mesh.

    Raises OffloadError on all ranks if one can't make its own, ValueError if they don't all measure, or all
    not.
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
        raise ValueError("offload needs costs or values on all ranks or on none: some would wait for others")
    if options is None or copier is None:
        return None
    return partial(OffloadPlan, options, timetable, copier, place.pipeline)


class OffloadPlan:
    """One rank's offload. plan: what leaves in the next step; stages: of this rank, by index.

    group: of the pipeline, for measuring. Raises PlanError for values that can't leave.
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
        self.stages = {
            index: StageOffload(worker, self.copier, options.least_bytes) for index, worker in workers.items()
        }
        self._recorder = Recorder(copier.device)
        self._num_steps = 0
        self.costs: Costs | None = options.costs
        self.plan = self._first_plan()
        self._ms_per_byte = _ms_per_byte(self.copier) if self.is_measuring else 0.0

    @property
    def is_measuring(self) -> bool:
        """Whether the plan is still to be made."""
        return self.costs is None and self._options.is_measured

    @property
    def recorder(self) -> Recorder | None:
        """What has to record the next step."""
        return self._recorder if self.is_measuring and self._num_steps == _MEASURED_STEPS - 1 else None

    def _first_plan(self) -> tuple[RankOffload, ...]:
        if self._options.values is not None:
            return offload_of(self._timetable, (Value("saved", *each) for each in self._options.values))
        return self._chosen(self.costs or Costs(host=1e-6), everything=self.costs is None)

    def _chosen(self, costs: Costs, *, everything: bool = False) -> tuple[RankOffload, ...]:
        # Without measured bytes the limit can't be planned for: the copier alone keeps to it.
        limit = math.inf if everything else self._options.most_bytes
        is_late = self._options.gib != "auto"
        return choose_offload(simulate(self._timetable, costs), costs, limit, late=is_late)

    def step_done(self, recorder: Recorder | None) -> bool:
        """Called after each step: returns whether there is a new plan. Collective over the pipeline."""
        self._num_steps += 1
        if not self.is_measuring or self._num_steps < _MEASURED_STEPS or recorder is None:
            return False
        times = measured_costs(measured_timeline(recorder, self._timetable, self._group))
        mine = {index: (stage.nbytes, self._ms_per_byte) for index, stage in self.stages.items()}
        found = {index: each for some in gather(mine, self._group) for index, each in some.items()}
        nbytes, speeds = zip(*[found[index] for index in range(self._timetable.num_stages)], strict=True)
        host = [count * speed for count, speed in zip(nbytes, speeds, strict=True)]
        self.costs = type(times)(**{**times.numbers, "host": host}).in_bytes(nbytes, 0.0)
        self.plan = self._chosen(self.costs)
        self.copier.clear()  # the spaces of the first steps, in which more left
        return True

    def end(self) -> None:
        """Raise RuntimeError if the step left anything over."""
        for stage in self.stages.values():
            stage.end()

    def abandon(self) -> None:
        """Let all stages drop the activations that a failed step has left."""
        for stage in self.stages.values():
            stage.abandon()

    def close(self) -> None:
        """Give up host memory, or the file."""
        self.abandon()
        self.copier.close()


def _ms_per_byte(copier: Copier) -> float:
    """The time of the slower direction, of a second copy each way."""
    storage, space = copier.new_storage(_SAMPLE_BYTES), copier.space(_SAMPLE_BYTES)
    times = []
    for start in (copier.out, copier.back) * 2:
        begin = time.perf_counter()
        start([(storage, space)]).wait()
        if copier.device.type == "cuda":
            torch.cuda.synchronize(copier.device)
        times.append(time.perf_counter() - begin)
    copier.give_back(space, _SAMPLE_BYTES)
    copier.clear()
    return max(times[2:]) * 1e3 / _SAMPLE_BYTES
