"""What one rank has of a pipeline: its stages, its links, and a program for each kind of call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from zbpp.autograd import WeightGrads
from zbpp.runtime.call_order import CallOrder, neighbours_of
from zbpp.runtime.executor import Executor
from zbpp.runtime.extra import Extras
from zbpp.runtime.groups import close_groups, job_store, link_groups
from zbpp.runtime.mesh import Place
from zbpp.runtime.resolve import StageMethod
from zbpp.runtime.stage import Loss, StageWorker
from zbpp.runtime.weight_offload import offloaded_weights
from zbpp.schedule import Op, Programs, Timetable, lower

_STEP: dict[Op, StageMethod] = {
    Op.F: StageWorker.forward,
    Op.B: StageWorker.backward_input,
    Op.W: StageWorker.backward_weight,
    Op.BW: StageWorker.backward,
}
METHODS: dict[str, dict[Op, StageMethod]] = {
    "step": _STEP,
    "evaluate": {Op.F: StageWorker.evaluate},
    "predict": {Op.F: StageWorker.evaluate},
}


class RankParts:
    """The parts of one rank; they are made once.

    key: the prefix of this pipeline's names in the job's store. The other arguments are Pipeline's.

    modules: the stages and the loss, if that is a module. workers: by stage. executors: of the calls "step",
    "evaluate" and "predict". order_of_ranks: checks that all ranks make the same calls; None where no rank is
    linked to another. num_steps: see Pipeline. weights_on_host: None where no weights are there.
    extras: of the pipeline; after a change call `rebind`.
    """

    def __init__(
        self,
        timetable: Timetable,
        rank: int,
        stages: Mapping[int, nn.Module],
        loss_fn: Loss | None,
        device: torch.device,
        place: Place,
        *,
        group: dist.ProcessGroup | None,
        key: str,
        timeout: float,
        dynamic_shapes: bool,
    ) -> None:
        self.timetable, self.rank, self.key, self.timeout = timetable, rank, key, timeout
        self.device, self.place, self.num_steps = device, place, 0
        self.extras = Extras()
        self.modules = [*stages.values(), *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
        self.weights_on_host = offloaded_weights(stages.values())
        self.workers = self._workers(stages, loss_fn, device)
        programs = self._programs()
        pairs = programs["step"].links
        self.order_of_ranks: CallOrder | None = None
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        if pairs:
            self.order_of_ranks = CallOrder(
                job_store(key), rank, neighbours_of(rank, pairs, timetable), device
            )
            self._links = link_groups(group, pairs, timeout, device)
        self.dynamic_shapes = dynamic_shapes
        self.executors = {
            name: self.executor(name, program, METHODS[name]) for name, program in programs.items()
        }

    def executor(self, name: str, program: Programs, methods: Mapping[Op, StageMethod]) -> Executor:
        """An executor of this rank's program for the call `name`."""
        timetable, rank = self.timetable, self.rank
        return Executor(
            program[rank],
            self.workers,
            methods,
            timetable.num_stages,
            self._links,
            self.device,
            dynamic_shapes=self.dynamic_shapes,
            gate=lambda: lower(timetable).gate(rank),
            extras=self.extras,
            call=name,
        )

    def rebind(self) -> None:
        """Let the programs of all calls have what the extras make of them now."""
        for executor in self.executors.values():
            executor.rebind()

    def _workers(
        self, stages: Mapping[int, nn.Module], loss_fn: Loss | None, device: torch.device
    ) -> dict[int, StageWorker]:
        run_w = WeightGrads.accumulate if self.weights_on_host is None else self.weights_on_host.accumulate
        return {
            stage: StageWorker(
                stage,
                module,
                is_last=stage == self.timetable.num_stages - 1,
                loss_fn=loss_fn,
                device=device,
                run_w=run_w,
            )
            for stage, module in stages.items()
        }

    def _programs(self) -> dict[str, Programs]:
        """The program of all ranks for each kind of call."""
        return {
            "step": lower(self.timetable),
            "evaluate": lower(self.timetable.forward_only()),
            "predict": lower(self.timetable.forward_of_one()),
        }

    def abandon(self) -> None:
        """Drop what is left of a call in the stages and their reductions."""
        for worker in self.workers.values():
            worker.abandon()

    def close(self) -> None:
        """Close links, reductions and extras for good."""
        self.extras.close()
        for executor in self.executors.values():
            executor.close()
        close_groups(self._links.values())
        self._links.clear()
