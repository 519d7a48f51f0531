"""What one rank has of a pipeline: its stages, its links, and a program for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from zbpp.autograd import WeightGrads
from zbpp.runtime.call_order import CallOrder, neighbours_of
from zbpp.runtime.executor import Executor, StageMethod
from zbpp.runtime.groups import close_groups, job_store, link_groups
from zbpp.runtime.offload_plan import OffloadPlan
from zbpp.runtime.reductions import Reductions
from zbpp.runtime.stage import Loss, StageWorker
from zbpp.runtime.weight_offload import offloaded_weights
from zbpp.schedule import Op, Timetable, lower

MakeOffload = Callable[[Mapping[int, StageWorker]], OffloadPlan]

_METHODS: dict[str, dict[Op, StageMethod]] = {
    "step": {
        Op.F: StageWorker.forward,
        Op.B: StageWorker.backward_input,
        Op.W: StageWorker.backward_weight,
        Op.BW: StageWorker.backward,
    },
    "evaluate": {Op.F: StageWorker.evaluate},
    "predict": {Op.F: StageWorker.evaluate},
}


class RankParts:
    """The parts of one rank; they are made once. The arguments are the Engine's.

    workers: by stage. executors: of the calls "step", "evaluate" and "predict". order_of_ranks: checks that
    all ranks make the same calls; None where no rank is linked to another. activations, weights_on_host: what
    leaves the device; None where nothing does.
    """

    def __init__(
        self,
        timetable: Timetable,
        rank: int,
        stages: Mapping[int, nn.Module],
        loss_fn: Loss | None,
        device: torch.device,
        reductions: Reductions,
        *,
        group: dist.ProcessGroup | None,
        key: str,
        timeout: float,
        dynamic_shapes: bool,
        make_offload: MakeOffload | None,
    ) -> None:
        self.reductions = reductions
        last = timetable.num_stages - 1
        self.weights_on_host = offloaded_weights(stages.values())
        run_w = WeightGrads.accumulate if self.weights_on_host is None else self.weights_on_host.accumulate
        self.workers = {
            stage: StageWorker(
                stage,
                module,
                is_last=stage == last,
                loss_fn=loss_fn,
                device=device,
                around_w=reductions.around_w(stage),
                run_w=run_w,
            )
            for stage, module in stages.items()
        }
        self.activations = None if make_offload is None else make_offload(self.workers)
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.order_of_ranks: CallOrder | None = None
        leaving = () if self.activations is None else self.activations.plan
        programs = {
            "step": lower(timetable, leaving),
            "evaluate": lower(timetable.forward_only()),
            "predict": lower(timetable.forward_of_one()),
        }
        pairs = programs["step"].links
        if pairs:
            neighbours = neighbours_of(rank, pairs, timetable)
            self.order_of_ranks = CallOrder(job_store(key), rank, neighbours, device)
            self._links = link_groups(group, pairs, timeout, device)
        self.executors = {
            name: Executor(
                lowered[rank],
                self.workers,
                _METHODS[name],
                timetable.num_stages,
                self._links,
                device,
                dynamic_shapes=dynamic_shapes,
                reductions=reductions if name == "step" else None,
                gate=lambda: lower(timetable).gate(rank),
                offloads={} if self.activations is None else self.activations.offloads,
            )
            for name, lowered in programs.items()
        }

    def abandon(self) -> None:
        """Drop what is left of a call in the stages and their reductions."""
        for worker in self.workers.values():
            worker.abandon()
        if self.activations is not None:
            self.activations.abandon()
        self.reductions.abandon()

    def close(self) -> None:
        """Close links and reductions for good."""
        for executor in self.executors.values():
            executor.close()
        close_groups(self._links.values())
        self._links.clear()
        self.reductions.close()
        if self.activations is not None:
            self.activations.close()
