"""torch.distributed.pipelining as a runner: the schedules of the same names, on the same stages."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from zbpp.benchmark.workload import Workload
from zbpp.job.agreement import gather
from zbpp.observers.record import StepRecord
from zbpp.observers.timeline import measured_timeline
from zbpp.schedule import Action, Timeline, Timetable
from zbpp.torch_pipelining.recording import recording, stages_run_by

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
_SINGLE = ("gpipe", "1f1b")  # take one stage; the other schedules take a list of stages


class TorchRunner:
    """torch's runtime. torch makes its own order for `name`; `timetable` says which rank has which stages.

    Its messages have a process group of their own, so that its failure leaves the other runners' connections
    alone.
    """

    runtime = "torch"

    def __init__(self, workload: Workload, name: str, timetable: Timetable) -> None:
        self.timetable = timetable
        self._device = workload.here.device
        self._record, self._row = StepRecord(self._device), list[Action]()
        self._group = dist.new_group(timeout=timedelta(seconds=workload.timeout))
        self._stages = [
            pipelining.PipelineStage(module, index, timetable.num_stages, self._device, group=self._group)
            for index, module in sorted(workload.stages(timetable).items())
        ]
        self._schedule = getattr(pipelining, SCHEDULES[name])(
            self._stages[0] if name in _SINGLE else self._stages,
            n_microbatches=workload.num_microbatches,
            loss_fn=workload.model.loss,
        )

    def step(self, args: tuple[Tensor, ...], target: Tensor | None) -> list[Tensor]:
        """As `ZbppRunner.step`. Raises whatever torch raises."""
        losses: list[Tensor] = []
        self._row.clear()
        with stages_run_by(self._stages, recording(self._record, self._row)), _without_torchs_log():
            # return_outputs=False: zbpp keeps no logits either, unless asked.
            self._schedule.step(*args, target=target, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]

    def timeline(self) -> Timeline:
        """The last step, in torch's own order. Collective."""
        return measured_timeline(self._record, Timetable(gather(self._row)))

    def close(self) -> None:
        """Close the connections; also after a failure, when other ranks would wait until the timeout.

        gloo closes them once nothing refers to the group any more.
        """
        dist.destroy_process_group(self._group)
        del self._group, self._schedule, self._stages
        gc.collect()


@contextmanager
def _without_torchs_log() -> Iterator[None]:
    """Silence torch's log of a failure, which prints the whole schedule: the table says what failed."""
    logger = logging.getLogger("torch.distributed.pipelining")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
