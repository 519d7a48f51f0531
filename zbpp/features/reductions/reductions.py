"""All reductions of one rank in a step: the gradients of its stages, then those of tied parameters.

when                          what                                                     by
before a step                 the first replica's buffers, to all replicas and shards  copy_buffers
after a stage's last W        the stage's gradients, over replicas or shards           AllReduce, FSDP2
                              those of spread experts, over the copies of each
when all of these have ended  tied parameters, over the pipeline's ranks               TiedGradients
then                          parameters of several stages, and of the loss, over      AllReduce
                              replicas and shards
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import filterfalse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.autograd.hooks import has_node_hooks, has_post_accumulate_hooks, hooked_nodes
from zbpp.devices import carried
from zbpp.features.reductions.instructions import ReduceShared, ZeroCopies, with_reductions
from zbpp.features.reductions.reduce import AllReduce, AllReduces, Reducer, can_average
from zbpp.features.reductions.shard_stages import shard_stages
from zbpp.features.reductions.tied_gradients import TiedGradients
from zbpp.job.agreement import refuse_together
from zbpp.job.errors import communicating
from zbpp.runtime.call.batch import Batch
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.extra import Feature, Handler
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.parameters import persistent_buffers
from zbpp.runtime.processes.dtensors import copy_to_replicas, is_sharded, is_spread, local_of
from zbpp.runtime.processes.groups import close_groups, group_like
from zbpp.runtime.processes.mesh import EXPERT_COPIES, SHARD, Reshard
from zbpp.runtime.rank import Rank
from zbpp.runtime.stage import RunW, StageWorker
from zbpp.schedule import Action, Op, Program, Reduce
from zbpp.schedule.program import Instruction, Reduced

_LOSS_SHARES = (
    "the loss is a module that shares a parameter with a stage, and shards put another one in its place in "
    "the stage: let the loss hold the stage's module instead of its parameter"
)


class Reductions(Feature):
    """The reducers of one rank's stages, its tied parameters, and the weights that FSDP2 gathers.

    `attach` gives all replicas of a stage the values of the first one. reshard, mp_policy: as in Pipeline.
    The gradients of a loss's own parameters are averaged, too.
    """

    name = "reductions"

    def __init__(self, *, reshard: Reshard, mp_policy: Any) -> None:
        self._reshard, self._mp_policy = reshard, mp_policy

    def attach(self, rank: Rank) -> None:
        """See Extra. Raises ValueError on every process for a stage that can't be sharded."""
        self._rank, place = rank, rank.place
        self._device = rank.device
        self._workers = rank.workers
        self._stages = stages = {index: worker.module for index, worker in rank.workers.items()}
        loss = _own_parameters_of_loss(rank)
        self._sharded = shard_stages(stages, place, rank.index, self._reshard, self._mp_policy)
        is_lost = len(_own_parameters_of_loss(rank)) > len(loss)
        refuse_together(_LOSS_SHARES if is_lost else "", place.gather)
        self._tied = TiedGradients(
            rank.ties, stages, rank.timetable.rank_of, rank.index, place.pipeline, rank.timeout
        )
        self._reducers: dict[int, Reducer] = dict(self._sharded)
        self._groups: list[dist.ProcessGroup] = []
        self._copies: dist.ProcessGroup | None = None  # of this process's experts, unless FSDP2 has them
        if EXPERT_COPIES in place.expert_groups and not self._sharded:
            self._copies = group_like(place.expert_groups[EXPERT_COPIES], rank.timeout)
            self._groups.append(self._copies)
        self._last: list[Reducer] = []  # they start when all stages and all ties are reduced
        self._ids = list(map(id, _parameters(stages)))  # of the parameters that are reduced
        for name in place.divided_over("step"):
            copied = [each for each in _parameters(stages) if name != SHARD or not is_sharded(each)]
            group = group_like(place.groups[name], rank.timeout)
            self._groups.append(group)
            rank.groups[name] = group
            self._replicate(stages, copied, loss, group, rank.index)

    def _of_data(self) -> list[dist.ProcessGroup]:
        return [each for each in self._groups if each is not self._copies]

    # ---- A step

    def announce(self, batch: Batch) -> None:
        """See Extra. Each step begins with the first replica's buffers, and leaves each replica its own.

        So does DistributedDataParallel: between two steps a caller may sum what replicas have counted.
        """
        if batch.call.kind == "step":
            for group in self._of_data():
                with communicating(f"rank {self._rank.index}, copying buffers of the first replica"):
                    copy_buffers(self._stages.values(), group)

    def rewrite(self, call: str, program: Program) -> Program:
        """See Feature."""
        return with_reductions(program, self._reducers)

    def handlers(self, call: str) -> Mapping[type, Handler]:
        """See Feature."""
        found: dict[type, Handler] = {ZeroCopies: self._zero_copies, ReduceShared: self._reduce_shared}
        if self._reducers:
            found[Reduce], found[Reduced] = self._start, self._finish
        return found

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """Gather the weights that an F may read, if FSDP2 has freed them."""
        if not (isinstance(at, Action) and at.op == Op.F and at.stage in self._sharded):
            return run
        sharded = self._sharded[at.stage]
        if not sharded.frees_before_w:
            return partial(sharded.run_f, run)
        if call != "step":
            return run
        return partial(_without_auxiliary_losses, run, self._workers[at.stage], at.microbatch)

    def around_w(self, stage: int, run_w: RunW) -> RunW:
        """Gather the weights that a W reads, if FSDP2 has freed them."""
        sharded = self._sharded.get(stage)
        return partial(sharded.run_w, run_w) if sharded is not None and sharded.frees_before_w else run_w

    def begin(self, call: Call) -> None:
        """See Extra."""
        if call.kind in ("evaluate", "predict"):
            return
        self._check_parameters()
        self._tied.check()
        for reducer in self._reducers.values():
            reducer.begin()

    def end(self, call: Call, result: Result) -> None:
        """See Extra."""
        if call.kind in ("evaluate", "predict"):
            for stage in self._sharded.values():
                stage.free()

    def loaded(self) -> None:
        """Give all copies of tied parameters the owner's values."""
        self._tied.copy_values()

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        for reducer in self._reducers.values():
            reducer.abandon()

    def close(self) -> None:
        """Close the groups that were made here: processes that wait for this one stop waiting."""
        self._tied.close()
        self._reducers.clear()  # gloo closes a group's connections once nothing refers to it
        self._last.clear()
        close_groups(self._groups)
        self._groups.clear()

    def _start(self, at: Reduce) -> None:
        """Start to reduce a stage, whose gradients are complete on this rank."""
        begin = self._rank.extras.background(at)
        self._reducers[at.stage].start(None if begin is None else begin())

    def _finish(self, at: Reduced) -> None:
        # Looked up: a program that held the reducer would hold its group, whose connections must close.
        self._reducers[at.stage].finish()

    def _zero_copies(self, at: ZeroCopies) -> None:
        self._tied.begin()

    def _reduce_shared(self, at: ReduceShared) -> None:
        """Afterwards copies of a parameter have one gradient."""
        self._tied.finish()
        for each in self._last:
            each.start(None)
            each.finish()

    def _replicate(
        self,
        stages: Mapping[int, nn.Module],
        copied: list[nn.Parameter],
        loss: list[nn.Parameter],
        group: dist.ProcessGroup,
        rank: int,
    ) -> None:
        """Make reducers that average over one group; give its processes the values of the first of them.

        FSDP2 averages the gradients of sharded stages itself: for these no reducer is made here.
        """
        averages = can_average(group, self._device)
        # The gradient of a parameter that several stages have is complete after the last W of all of them.
        late = [] if self._sharded else [*dict.fromkeys([*self._tied.parameters, *_shared_by(stages)])]
        late_ids = set(map(id, late))
        for index, stage in stages.items():
            if index not in self._sharded:
                own = [each for each in stage.parameters() if id(each) not in late_ids]
                what = f"rank {rank}, averaging the gradients of stage {index} over its replicas"
                self._reducers[index] = self._mean(own, group, what, averages)
        buffers = [buffer for stage in stages.values() for buffer in stage.buffers()]
        copy_to_replicas((*filterfalse(is_spread, copied), *loss, *buffers), group)
        if self._copies is not None:
            copy_to_replicas(filter(is_spread, copied), self._copies)
        what = f"rank {rank}, averaging the gradients of tied parameters and of the loss over replicas"
        self._last.append(self._mean([*late, *loss], group, what, averages))

    def _mean(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup, what: str, averages: bool
    ) -> Reducer:
        """Averages gradients over a group.

        A spread expert has copies on some processes of the group only; their sum is already that over the
        rows of all processes, since each process sends its rows to one copy.
        """
        num = dist.get_world_size(group)
        experts = [each for each in parameters if is_spread(each)]
        others = filterfalse(is_spread, parameters)
        whole = AllReduce(others, group, divisor=num, what=what, averages=averages)
        if not experts:
            return whole
        return AllReduces([AllReduce(experts, self._copies, divisor=num, what=what), whole])

    def _check_parameters(self) -> None:
        """Raise ValueError for parameters that the user has changed in a way that reductions don't allow."""
        if not (self._reducers or self._tied.parameters):
            return
        parameters = _parameters(self._stages)
        if self._ids != list(map(id, parameters)):
            raise ValueError(
                "parameters were added or replaced after the Pipeline was made, and their gradients would "
                "not be reduced: make a new Pipeline"
            )
        if any(is_sharded(each) and getattr(each, "main_grad", None) is not None for each in parameters):
            raise ValueError(
                "a parameter has a main_grad and is sharded by FSDP2, which would leave main_grad as it is: "
                "delete main_grad, and write mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                "reduce_dtype=torch.float32) for float32 gradients of 16-bit weights"
            )
        if self._groups and _have_hooks_on_sums([each for each in parameters if not is_sharded(each)]):
            raise ValueError(
                "a parameter has a hook by register_post_accumulate_grad_hook or on its AccumulateGrad node, "
                "which would run in W, before the gradient is reduced over replicas: read gradients after "
                "step() instead"
            )


def _without_auxiliary_losses(run: Run, worker: StageWorker, microbatch: int, message: Message) -> Message:
    """F of a stage whose weights are freed after F. Raises ValueError for an auxiliary loss."""
    result = run(message)
    if worker.has_auxiliary_losses(microbatch):
        raise ValueError(
            "an auxiliary loss needs the stage's weights in B, and reshard=microbatch frees them after F: "
            "write reshard=step"
        )
    return result


def copy_buffers(stages: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Give all persistent buffers the values that they have on the group's first process. Collective.

    All of them, because changed buffers can't be told apart: BatchNorm's kernel changes its statistics and
    does not raise their count of in-place changes. Buffers with persistent=False, which no checkpoint holds,
    are constants (rotary tables) or one process's own.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for stage in stages:
        for _, buffer in persistent_buffers(stage):
            by_dtype.setdefault(buffer.dtype, []).append(local_of(buffer))
    for buffers in by_dtype.values():
        values = carried(torch.cat([each.reshape(-1) for each in buffers]), group)
        dist.broadcast(values, group=group, group_src=0)
        for buffer, part in zip(buffers, values.split([each.numel() for each in buffers]), strict=True):
            buffer.copy_(part.view(buffer.shape))


def _have_hooks_on_sums(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether one of the parameters has a hook that runs when its gradient has been added up."""
    trained = [each for each in parameters if each.requires_grad]
    hooked = hooked_nodes(trained)
    return any(
        has_post_accumulate_hooks(each) or has_node_hooks(hooked[id(each)])
        for each in trained
        if id(each) in hooked
    )


def _parameters(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    return [*dict.fromkeys(each for stage in stages.values() for each in stage.parameters())]


def _shared_by(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    """The parameters that more than one of the stages have."""
    counts = Counter(each for stage in stages.values() for each in stage.parameters())
    return [parameter for parameter, count in counts.items() if count > 1]


def _own_parameters_of_loss(rank: Rank) -> list[nn.Parameter]:
    """The parameters of the loss that no stage of this rank has, where this rank computes the loss."""
    last = rank.workers.get(rank.timetable.num_stages - 1)
    if last is None or not isinstance(last.loss_fn, nn.Module):
        return []
    shared = {id(each) for worker in rank.workers.values() for each in worker.module.parameters()}
    return [each for each in last.loss_fn.parameters() if id(each) not in shared]
