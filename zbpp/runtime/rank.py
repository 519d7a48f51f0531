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
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.autograd.leaf_grad import engine_adds_to_main_grad
from zbpp.devices import sum_over
from zbpp.error_text import error_text
from zbpp.job.errors import communicating
from zbpp.runtime.call.batch import Batch
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.call.sizes import Announcer, Sizes, ways_of_sizes
from zbpp.runtime.call.weights import Count
from zbpp.runtime.executor import BeginAgain, Executor
from zbpp.runtime.extra import EMPTY_MICROBATCHES, Extra, Extras, Observer
from zbpp.runtime.host_links import OWN_LIMIT
from zbpp.runtime.layouts import Layouts
from zbpp.runtime.lowering import Lowerings
from zbpp.runtime.processes.groups import close_groups, link_groups, runs_on_device, set_timeout
from zbpp.runtime.processes.mesh import MeshPosition
from zbpp.runtime.processes.ties import Tie
from zbpp.runtime.resolve import StageMethod
from zbpp.runtime.stage import Loss, StageWorker
from zbpp.schedule import Op, Timetable
from zbpp.schedule.passes.posts import ON_DEVICE, ON_HOST, Postings
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

    followed: the timetable of the last call, without the microbatches that it left out.
    modules: the stages and the loss, if that is a module. workers: by stage. programs: of all ranks, for a
    step. executors: this rank's, for the calls "step", "evaluate" and "predict". extras: after a change call
    `rebind`. num_steps: see Pipeline. count: of a microbatch's targets, if the loss says how, see weights.py.
    is_alone: whether no other process takes part in a call. receives_on_device: whether a receive that has
    started occupies the device. wait_limit: how many seconds a wait for another rank may last now: `timeout`,
    and more in a step that may compile.
    over: why no call may follow; empty until then.

    An extra may set three more.
    lost: text for an error message: why the weights belong to no step; empty if they belong to one. If it is
    not empty, a failed call ends the pipeline, and `finish_update` raises.
    released: None if gradients stay in `.grad`. Otherwise {id of a parameter: the sum of squares of its last
    gradient}, for each parameter whose gradient the last step has used and dropped; empty if nobody needs
    sums.
    groups: {dimension of the mesh: a process group with the same processes as the mesh's}. These groups close
    with the pipeline, so that no process waits in them for a process that has failed.
    """

    def __init__(
        self,
        timetable: Timetable,
        index: int,
        stages: Mapping[int, nn.Module],
        loss_fn: Loss | None,
        device: torch.device,
        place: MeshPosition,
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
        self.followed = timetable
        self.wait_limit, self._compiles = timeout, compiles
        self.device, self.place, self.ties, self.dynamic_shapes = device, place, ties, dynamic_shapes
        self.num_steps, self.over, self.lost = 0, "", ""
        self.released: Mapping[int, Tensor] | None = None
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.is_alone = timetable.num_ranks == 1 and not place.groups
        self.extras = Extras()
        self.count: Count | None = mark_of(loss_fn, "num_targets")
        self.modules = [*stages.values(), *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
        last = timetable.num_stages - 1
        self.workers = {
            stage: StageWorker(stage, module, is_last=stage == last, loss_fn=loss_fn, device=device)
            for stage, module in stages.items()
        }
        self._lowerings = Lowerings(index)
        self._lowering = self._lowerings.of(timetable)
        self.programs = self._lowering.programs
        pairs = self.programs.links
        self._links = link_groups(group, pairs, timeout, device) if pairs else {}
        self.receives_on_device = any(runs_on_device(each, device) for each in self._links.values())
        # Beside links that run on the device: they would let the host wait for all that the device has to do.
        ways = ways_of_sizes(timetable.rank_of) if self.receives_on_device else []
        self._host_links = link_groups(group, ways, timeout, torch.device("cpu"), "gloo") if ways else {}
        in_job = dist.get_process_group_ranks(place.pipeline) if dist.is_initialized() else [0]
        self._announcer = Announcer(timetable.rank_of, index, self._host_links or self._links, in_job)
        self._message_limit: timedelta | None = None  # how long a wait for a message lasts, if it was set
        self.executors = Executors(self._executor)
        self.executors["step"]  # made here, so that a program that can't run is refused before the first step

    def _executor(self, name: str) -> Executor:
        """Make the executor of this rank's program for the call `name`."""
        made = Executor(
            self._lowering.program(name),
            self.workers,
            METHODS[name],
            self.timetable.num_stages,
            self._links,
            self.device,
            layouts=Layouts(is_dynamic=self.dynamic_shapes),
            postings=self._postings(),
            extras=self.extras,
            call=name,
        )
        if self._message_limit is not None:
            made.limit_waits(self._message_limit)
        return made

    def _postings(self) -> Postings:
        """Where receives start. What is compiled may be compiled again, and tuned, in any step."""
        if not self.receives_on_device:
            return ON_HOST
        return Postings(ON_DEVICE.may_wait, ON_DEVICE.may_wait) if self._compiles else ON_DEVICE

    # ---- Extras

    def use(self, extra: Extra) -> None:
        """Take an extra, from the next call on. Raises ValueError if another one excludes it."""
        self.check_not_over()
        self.check(extra)
        extra.attach(self)
        self.extras.append(extra)
        try:
            self._rebind_for(extra)
        except BaseException:
            self.leave(extra)
            raise

    def check(self, extra: Extra) -> None:
        """Raise ValueError if the extra excludes something that this pipeline has, or is excluded."""
        others = [*self.place.dimensions, *(["dynamic_shapes"] if self.dynamic_shapes else [])]
        self.extras.check(extra, others)

    def leave(self, extra: Extra) -> None:
        """From the next call on, run without this extra."""
        if not self.over:  # else all extras are closed already
            self.extras.remove(extra)
            self._rebind_for(extra)
            extra.close()

    def rebind(self, *, may_wait: bool = True) -> None:
        """Make the programs of all calls anew, by the passes and functions of the extras of now.

        may_wait: whether the next call may therefore wait for the whole device.
        """
        self.extras.bind_w(self.workers.values())
        for executor in self.executors.values():
            executor.rebind(may_wait=may_wait)

    def _rebind_for(self, extra: Extra) -> None:
        """An observer changes nothing, so it sees an ordinary step: one whose receives start ahead."""
        self.rebind(may_wait=not isinstance(extra, Observer))

    def trained(self) -> list[nn.Parameter]:
        """The parameters that a step of this rank may add gradients to, each once."""
        return [*dict.fromkeys(each for module in self.modules for each in module.parameters())]

    # ---- Calls

    def run(self, call: Call, seeds: Mapping[int, int]) -> Result:
        """Make one call. seeds: per stage, of its unit 0."""
        self.check_not_over()
        executor = self.executors[call.kind]
        try:
            call = self.extras.take(call)
            # A backward that runs inside of a stage adds where W adds.
            with engine_adds_to_main_grad(self.trained()):
                batch = self._batch(call, seeds)
                self._execute(executor, batch)
            self._announcer.end()
            ended = [worker.end() for worker in self.workers.values()]
            batch.backward()
            result = self.extras.give(call, batch.result(ended))
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
        self._announcer.limit = timedelta(seconds=seconds)
        for each in self.executors.values():  # on gloo a wait has the limit, on NCCL a group
            each.limit_waits(self._message_limit)
        for group in (*self.place.mesh_groups(), *(self._links.values() if self.receives_on_device else ())):
            if isinstance(group, dist.ProcessGroup):
                set_timeout(group, seconds)

    def _batch(self, call: Call, seeds: Mapping[int, int]) -> Batch:
        """Cut a call's arguments, in the order that all ranks are told, and weigh its losses. Collective."""
        num_microbatches = 1 if call.kind == "predict" else self.timetable.num_microbatches
        batch = Batch(call, num_microbatches, seeds, self.timetable.num_stages - 1, self.count)
        self.extras.announce(batch)
        own = batch.sizes(self._lowering.number)
        if self._announcer.compares and self.timetable.num_ranks > 1:
            own = own._replace(given=batch.fingerprints())
        sizes = self._announcer.told(own)
        if sizes.left_out:
            self._check_leaves_out()
        batch.arrange(sizes)
        dimensions = self.place.divided_over(call.kind)
        batch.weigh(self.device, math.prod(dimensions.values()), partial(self._sum, [*dimensions]))
        return batch

    def tell_close(self) -> None:
        """Tell all ranks that no call follows. Collective.

        Raises AgreementError if one of them is in a call.
        """
        self.extras.announce_close()
        self._announcer.told(Sizes("close", self._lowering.number, (), ()))
        self._announcer.end()

    def _sum(self, dimensions: Sequence[str], values: Tensor) -> None:
        """Sum the values, in place, over these dimensions of the mesh. Collective."""
        for name in dimensions:
            with communicating(f"rank {self.index}, summing the numbers of targets over {name}"):
                sum_over(self.groups.get(name) or self.place.group(name), values)

    def _execute(self, executor: Executor, batch: Batch) -> None:
        """Give the stages their parts of a batch, and run the program; again, if the step begins again."""
        for stage, worker in self.workers.items():
            worker.begin(batch.feed(stage))
        sizes = batch.told
        lowering = self._lowering.without_last(len(sizes.left_out))
        self.followed = lowering.timetable
        executor.use(lowering.text, lowering.program(batch.call.kind))
        executor.begin(batch.sizes_of_units)
        self._limit_waits(executor)
        self.extras.begin(batch.call)
        begins_again = False
        try:
            executor.run()
        except BeginAgain as error:
            begins_again = True
            executor.drop_messages()
            self._abandon()
            self.extras.fail(error)
            batch.begin_again(error.loss_scale)
        except Exception as error:
            if not sizes.is_plain:
                error.add_note(f"the microbatches go in this order, by the caller's numbers: {sizes.order}")
            raise
        if begins_again:
            self._execute(executor, batch)

    # ---- Timetables

    def use_timetable(self, timetable: Timetable | str) -> None:
        """Follow another timetable from the next call on. Raises ValueError if that is not possible.

        Collective with an extra that is made for one timetable.
        """
        self.check_not_over()
        lowering = self._lowerings.of(timetable)
        given, expected = lowering.timetable.rank_of, self.timetable.rank_of
        if given != expected:
            raise ValueError(
                "the timetable places the stages on other ranks than this pipeline's: rank_of "
                f"{list(given)} instead of {list(expected)}"
            )
        if lowering.timetable.num_slices != self.timetable.num_slices:
            raise ValueError(
                f"the timetable has {lowering.timetable.num_slices} slices, and this pipeline "
                f"{self.timetable.num_slices}: make a new Pipeline with its slice_bounds"
            )
        lowering.program("step")
        if lowering is not self._lowering:
            again = [each for each in self.extras if EMPTY_MICROBATCHES in each.excludes]
            if again:
                self.finish_update()
            self._lowering, self.timetable, self.programs = lowering, lowering.timetable, lowering.programs
            self._attach_again(again)

    def _attach_again(self, extras: Sequence[Extra]) -> None:
        """Close these extras, and attach them in their places. A refusal ends the pipeline."""
        if not extras:
            return
        everything = [*self.extras]
        try:
            for each in reversed(extras):
                self.extras.remove(each)
                each.close()
            for each in extras:
                each.attach(self)
                self.extras.insert(everything.index(each), each)
        except BaseException as error:
            self.end(f"it could not follow another timetable ({error_text(error)})")
            raise
        for name, executor in self.executors.items():
            executor.use(self._lowering.text, self._lowering.program(name))
        self.rebind()

    def _check_leaves_out(self) -> None:
        """Raise ValueError if an extra is made for steps with all microbatches."""
        for each in self.extras:
            if EMPTY_MICROBATCHES in each.excludes:
                why = each.excludes[EMPTY_MICROBATCHES]
                raise ValueError(f"{each.name} doesn't go with empty microbatches: {why}")

    @property
    def source_of_sizes(self) -> int | None:
        """The rank that this one gets the sizes of microbatches from; None for the owner of stage 0."""
        return self._announcer.source

    def finish_update(self) -> None:
        """Let the extras make the weights final. Raises RuntimeError if the weights are those of no step."""
        if self.lost:
            self.check_not_over()
        self.extras.finish_update()

    # ---- The end

    def check_not_over(self) -> None:
        """Raise RuntimeError if no call may follow."""
        if self.over:
            raise RuntimeError(f"{self.over}: make a new Pipeline")

    def _abandon(self) -> None:
        """Drop what is left of a call in the stages."""
        for worker in self.workers.values():
            worker.abandon()

    def _fail(self, error: BaseException) -> None:
        """Drop the microbatches of a failed call. A pipeline that other processes wait for ends here."""
        self._abandon()
        try:
            self.extras.fail(error)
        except BaseException as cause:
            error = cause
            raise
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
        self._announcer.close()
        for links in (self._links, self._host_links):
            close_groups(links.values())
            links.clear()
