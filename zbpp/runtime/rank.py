"""Rank: one rank's stages, links and programs. It runs calls, and ends the pipeline when one fails.

When a rank fails in a call:
1. It drops what is left of the call and closes its links (`_fail`, `end`).
2. On gloo, closing a link closes its connection. A rank that waits for a message of the failed rank gets a
   CommunicationError at once, with rank, instruction, value and peer. It fails, too, and so the failure goes
   on, link by link. On NCCL a rank can't see that the other end of a link is closed, and the device waits for
   the message, not the program: at the timeout torch's watchdog ends the waiting process.
3. Every later call raises RuntimeError with the first reason (`over`): make a new Pipeline on every rank.

If a process dies, its connections close with it on gloo, and the other ranks fail as in point 2. On NCCL they
wait until the timeout.

A rank that waits for no message of a failed rank does not notice the failure. Such a rank may have finished
the call, and wait for all ranks in the `gather` of `clip_grad_norm_`, `timeline` or `close`. The `gather`
runs on the group that the caller gave, which a failed rank does not close. If the failed rank's process stays
alive, the other rank waits there until that group's timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.autograd.leaf_grad import engine_adds_to_main_grad
from zbpp.error_text import error_text
from zbpp.runtime.call import Call, NamedLosses, Result
from zbpp.runtime.executor import BeginAgain, Executor
from zbpp.runtime.extra import Extra, Extras
from zbpp.runtime.groups import close_groups, link_groups, runs_on_device, set_timeout
from zbpp.runtime.links import OWN_LIMIT
from zbpp.runtime.mesh import Place
from zbpp.runtime.microbatch import Cutter
from zbpp.runtime.resolve import StageMethod
from zbpp.runtime.shared_hooks import SharedHooks
from zbpp.runtime.stage import Loss, StageWorker
from zbpp.runtime.ties import Tie
from zbpp.runtime.weights import Count, Weights, weights_of
from zbpp.schedule import Op, Timetable, lower
from zbpp.schedule.passes.posts import ON_DEVICE, ON_HOST
from zbpp.stage_api import mark_of

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT = 1800.0  # s that a wait may last in a step that may compile

METHODS: dict[str, dict[Op, StageMethod]] = {
    "step": {
        Op.F: StageWorker.forward,
        Op.B: StageWorker.backward_input,
        Op.W: StageWorker.backward_weight,
        Op.BW: StageWorker.backward,
    },
    "evaluate": {Op.F: StageWorker.evaluate},
    "predict": {Op.F: StageWorker.evaluate},
}


_FORWARDS = {"evaluate": Timetable.forward_only, "predict": Timetable.forward_of_one}


class Executors(dict[str, Executor]):
    """{call: its executor}. An executor is made before the first such call: a run may never evaluate."""

    def __init__(self, make: Callable[[str], Executor]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Executor:
        self[name] = made = self._make(name)
        return made


class Rank:
    """What one rank has of a pipeline; extras see it in `attach`.

    index: its number in the pipeline. group: of the pipeline, for its links; None: this rank is alone. key:
    the prefix of this pipeline's names in the job's store. ties: of all ranks. The other arguments are
    Pipeline's.

    modules: the stages and the loss, if that is a module. workers: by stage. programs: of all ranks, for a
    step. executors: this rank's, for the calls "step", "evaluate" and "predict". extras: after a change call
    `rebind`. num_steps: see Pipeline. count: of a microbatch's targets, if the loss says how, see weights.py.
    is_alone: whether no other process takes part in a call. receives_on_device: whether a receive that has
    started occupies the device. wait_limit: how many seconds a wait for another rank may last now: `timeout`,
    and more in a step that may compile.
    over: why no call may follow; empty until then.

    An extra may set five more. lost: for error messages, what a failed call has destroyed beside its
    messages; the pipeline then ends; empty: nothing. wrong_weights: for error messages, why the weights are
    those of no step; empty if they are those of one. name_of_step: the name that all ranks must give to the
    next step. released: {id of a parameter whose gradient the last step has used and dropped: the gradient's
    sum of squares}; it is empty if the sums are not kept; None: gradients stay in `.grad`. sum_over_data: a
    function that sums numbers, in place, over the processes that see different data; if one of these fails,
    the others stop waiting.
    """

    def __init__(
        self,
        timetable: Timetable,
        index: int,
        stages: Mapping[int, nn.Module],
        loss_fn: Loss | None,
        device: torch.device,
        place: Place,
        *,
        group: dist.ProcessGroup | None,
        key: str,
        ties: Sequence[Tie],
        timeout: float,
        compiles: bool,
        dynamic_shapes: bool,
        slice_bounds: Sequence[int] = (),
    ) -> None:
        self.slice_bounds = slice_bounds
        self.timetable, self.index, self.key, self.timeout = timetable, index, key, timeout
        self.wait_limit, self._compiles = timeout, compiles
        self.device, self.place, self.ties, self.dynamic_shapes = device, place, ties, dynamic_shapes
        self.num_steps, self.over, self.lost, self.wrong_weights = 0, "", "", ""
        self.name_of_step = "step"
        self.released: Mapping[int, Tensor] | None = None
        self.sum_over_data: Callable[[Tensor], None] = place.sum_over_data
        self.is_alone = timetable.num_ranks == 1 and not place.groups
        self.extras = Extras()
        self.count: Count | None = mark_of(loss_fn, "num_targets")
        self.modules = [*stages.values(), *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
        last = timetable.num_stages - 1
        self.workers = {
            stage: StageWorker(stage, module, is_last=stage == last, loss_fn=loss_fn, device=device)
            for stage, module in stages.items()
        }
        self._shared_hooks = SharedHooks(
            {
                stage: (module, *([loss_fn] if stage == last and isinstance(loss_fn, nn.Module) else []))
                for stage, module in stages.items()
            }
        )
        for stage in self._shared_hooks.stages:
            self.workers[stage].shared_hooks = self._shared_hooks
        self.programs = lower(timetable)
        pairs = self.programs.links
        self._links = link_groups(group, pairs, timeout, device) if pairs else {}
        self.receives_on_device = any(runs_on_device(each, device) for each in self._links.values())
        self._message_limit: timedelta | None = None  # how long a wait for a message lasts, if it was set
        self.executors = Executors(self._executor)
        self.executors["step"]  # made here, so that a program that can't run is refused before the first step

    def _executor(self, name: str) -> Executor:
        """Make the executor of this rank's program for the call `name`."""
        programs = self.programs if name == "step" else lower(_FORWARDS[name](self.timetable))
        made = Executor(
            programs[self.index],
            self.workers,
            METHODS[name],
            self.timetable.num_stages,
            self._links,
            self.device,
            dynamic_shapes=self.dynamic_shapes,
            postings=ON_DEVICE if self.receives_on_device else ON_HOST,
            extras=self.extras,
            call=name,
        )
        if self._message_limit is not None:
            made.limit_waits(self._message_limit)
        return made

    # ---- Extras

    def use(self, extra: Extra) -> None:
        """Take an extra, from the next call on. Raises ValueError if another one excludes it."""
        self.check_not_over()
        self.check(extra)
        extra.attach(self)
        self.extras.append(extra)
        try:
            self.rebind()
        except BaseException:
            self.leave(extra)
            raise

    def check(self, extra: Extra) -> None:
        """Raise ValueError if the extra excludes something that this pipeline has, or is excluded."""
        self.extras.check(extra, [*self.place.groups, *(["dynamic_shapes"] if self.dynamic_shapes else [])])

    def leave(self, extra: Extra) -> None:
        """From the next call on, run without this extra."""
        if not self.over:  # else all extras are closed already
            self.extras.remove(extra)
            self.rebind()
            extra.close()

    def rebind(self) -> None:
        """Make the programs of all calls anew, by the passes and functions of the extras of now."""
        for executor in self.executors.values():
            executor.rebind()

    def trained(self) -> list[nn.Parameter]:
        """The parameters that a step of this rank may add gradients to, each once."""
        return [*dict.fromkeys(each for module in self.modules for each in module.parameters())]

    def own_parameters_of_loss(self) -> list[nn.Parameter]:
        """The parameters of the loss that no stage of this rank has, where this rank computes the loss."""
        last = self.workers.get(self.timetable.num_stages - 1)
        if last is None or not isinstance(last.loss_fn, nn.Module):
            return []
        shared = {id(each) for worker in self.workers.values() for each in worker.module.parameters()}
        return [each for each in last.loss_fn.parameters() if id(each) not in shared]

    # ---- Calls

    def run(self, call: Call, seeds: Mapping[int, int]) -> Result:
        """Make one call; returns its losses. seeds: per stage, of its unit 0."""
        self.check_not_over()
        executor = self.executors[call.kind]
        try:
            if call.kind != "step":  # its shapes may differ from the last evaluation's
                executor.forget_layouts()
            # A backward that runs inside of a stage adds where W adds.
            with engine_adds_to_main_grad(self.trained()):
                self._limit_waits(executor)
                cutter, call = self._run(executor, call, seeds)
            ended = [worker.end() for worker in self.workers.values()]
            cutter.backward()
            losses = _per_microbatch([loss for each in ended for loss in each.losses], cutter.num_slices)
            result = Result(losses, NamedLosses([each.named for each in ended], cutter.num_microbatches))
            self.extras.end(call, result)
        except BaseException as error:
            self._fail(error)
            raise
        return result

    def _limit_waits(self, executor: Executor) -> None:
        """Let ranks wait longer for a step that may compile: the stages of all ranks may compile in turn."""
        seconds = max(self.timeout, COMPILE_TIMEOUT) if self._compiles and executor.may_wait else self.timeout
        if seconds == self.wait_limit:
            return
        self.wait_limit = seconds
        if seconds > self.timeout and self.index == 0:
            _log.info("stages compile in this step: ranks wait for each other up to %.0f s", seconds)
        self._message_limit = OWN_LIMIT if self.receives_on_device else timedelta(seconds=seconds)
        for each in self.executors.values():  # on gloo a wait has the limit, on NCCL a group
            each.limit_waits(self._message_limit)
        for group in (*self.place.mesh_groups(), *(self._links.values() if self.receives_on_device else ())):
            if isinstance(group, dist.ProcessGroup):
                set_timeout(group, seconds)

    def _run(self, executor: Executor, call: Call, seeds: Mapping[int, int]) -> tuple[Cutter, Call]:
        """Give the stages their parts of a call, and run its program, again if the step begins again."""
        self._shared_hooks.begin()
        is_whole = call.kind == "predict"
        cutter = Cutter(1) if is_whole else Cutter(self.timetable.num_microbatches, self.slice_bounds)
        last = self.timetable.num_stages - 1
        feeds = call.feeds(cutter, seeds, last_stage=last)
        targets = feeds[last].targets if last in feeds else None
        if self.count is not None and targets is not None:
            weights = call.weights or self._weights(call, targets, cutter.num_microbatches)
            call = call._replace(weights=weights)
            feeds[last] = feeds[last]._replace(weights=call.weights)
        for stage, worker in self.workers.items():
            worker.begin(feeds[stage])
        call = call._replace(rows=cutter.rows, has_graph=cutter.has_graph)
        executor.prepare()
        self.extras.begin(call)
        again: Call | None = None
        try:
            executor.run()
        except BeginAgain as error:
            again = error.call
            executor.drop_messages()
            self._abandon()
            self.extras.fail(error)
        return (cutter, call) if again is None else self._run(executor, again, seeds)

    def _weights(self, call: Call, targets: Sequence[Any], num_microbatches: int) -> Weights:
        """Return the weights of the losses. A step calls this on all processes that see different data."""
        assert self.count is not None
        if call.kind != "step":
            return weights_of(targets, self.count, self.device, num_microbatches)
        num_parts = self.place.num_data_parts
        return weights_of(targets, self.count, self.device, num_microbatches, num_parts, self.sum_over_data)

    def settle(self) -> None:
        """Let the extras make the weights final. Raises RuntimeError if the weights are those of no step."""
        if self.wrong_weights:
            raise RuntimeError(self.wrong_weights)
        self.extras.settle()

    # ---- The end

    def check_not_over(self) -> None:
        """Raise RuntimeError if no call may follow."""
        if self.over:
            raise RuntimeError(f"{self.over}: make a new Pipeline")

    def _abandon(self) -> None:
        """Drop what is left of a call in the stages."""
        for worker in self.workers.values():
            worker.abandon()
        self._shared_hooks.abandon()

    def _fail(self, error: BaseException) -> None:
        """Drop the microbatches of a failed call. A pipeline that other processes wait for ends here."""
        self._abandon()
        try:
            self.extras.fail(error)
        finally:
            lost = self.lost or ("" if self.is_alone else "its messages are lost")
            if lost and not self.over:
                self.end(f"an earlier call failed ({error_text(error)}), and {lost}")

    def end(self, why: str) -> None:
        """Close extras and links for good: on gloo, processes that wait for this one stop waiting."""
        if self.over:
            return
        self.over = why
        self.extras.close()
        for executor in self.executors.values():
            executor.close()
        close_groups(self._links.values())
        self._links.clear()


def _per_microbatch(losses: list[Tensor], num_slices: int) -> list[Tensor]:
    """The loss of each microbatch: the sum of its slices', which are weighted."""
    if num_slices == 1:
        return losses
    firsts = range(0, len(losses), num_slices)
    return [torch.stack(losses[first : first + num_slices]).sum() for first in firsts]
