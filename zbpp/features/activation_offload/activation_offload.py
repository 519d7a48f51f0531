"""Offload of activations: executes the program's Offload, Drop, Fetch and Await.

    Offload saved(0,3)    stage 0: offload(3)    start to copy to host memory
    Drop saved(0,3)       stage 0: drop(3)       wait for the copy, free the device memory
    Fetch saved(0,3)      stage 0: fetch(3)      start to copy back
    Await saved(0,3)      stage 0: wait(3)       wait for the copy

Where the program offloads the activations of a microbatch, `StageOffload.forward` is around its F; any other
F runs as without offload. No message depends on what a rank offloads, so each rank plans for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.autograd.offload.host_copier import Copier, Watch
from zbpp.autograd.offload.saved_activations import LEAST_BYTES, SavedActivations
from zbpp.features.activation_offload.choice import choose_rank_offload
from zbpp.features.activation_offload.copies import Await, Drop, Fetch, Offload, RankOffload, with_copies
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.extra import Feature, Handler
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.rank import Rank
from zbpp.runtime.stage import StageWorker
from zbpp.schedule import Action, Costs, Op, Program, Timeline, Timetable, Value, simulate
from zbpp.schedule.costs import BYTES
from zbpp.schedule.program import Instruction

if TYPE_CHECKING:
    from zbpp.runtime.pipeline import Pipeline

_GIB = 2**30


@dataclass
class ActivationOffload(Feature):
    """Which activations are in host memory (pinned, if the device is a GPU) between F and B: an extra.

    costs: the times to plan with, as `zbpp measure` finds them; `host` among them.
    gib: "auto": those that can leave and come back without making an action late. A number: at most so many
        GiB of a rank are away at a time, and actions may wait for the copies; memory in `costs` is then in
        bytes.
    least_bytes: storages below this size stay.
    Raises ValueError for costs without `host`, and for a number with costs that are not in bytes.

    chosen: in a pipeline, for each rank what leaves and when. It is computed when it is read.
    """

    name = "activation_offload"
    excludes = MappingProxyType(
        {
            "weight_offload": "both pack saved tensors; leave one out, and recompute blocks "
            "(zbpp.checkpoint)",
            "empty_microbatches": "its copies are planned for one timetable: leave it out",
        }
    )

    costs: Costs
    gib: float | Literal["auto"] = "auto"
    least_bytes: int = LEAST_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.costs, Costs):
            raise ValueError(f"costs={self.costs!r}: write Costs(f=..., b=..., w=..., host=...)")
        if not self.costs.has_host:
            raise ValueError(
                "the costs have no time of a copy to host memory: give those that `zbpp measure` writes "
                "(schedule.costs=FILE)"
            )
        if self.gib == "auto":
            return
        if isinstance(self.gib, bool) or not isinstance(self.gib, int | float) or not self.gib > 0:
            raise ValueError(
                f'gib={self.gib!r}: write "auto", or how many GiB may leave, above 0; for none, leave the '
                "extra out"
            )
        if self.costs.memory_unit != BYTES:
            raise ValueError(
                f"gib={self.gib:g} is a limit in bytes, and the costs count {self.costs.memory_unit}: give "
                "costs in bytes (Costs.in_bytes), as `zbpp measure` writes them"
            )

    def plan(self, timetable: Timetable) -> tuple[RankOffload, ...]:
        """For each rank, what leaves and when."""
        without = simulate(timetable, self.costs)
        return tuple(self._of_rank(rank, without) for rank in range(timetable.num_ranks))

    def _of_rank(self, rank: int, without: Timeline) -> RankOffload:
        """What leaves one rank, and when. without: the simulated step without offload."""
        limit = math.inf if self.gib == "auto" else float(self.gib) * _GIB
        return choose_rank_offload(without, rank, self.costs, limit, late=self.gib != "auto")

    @property
    def chosen(self) -> tuple[RankOffload, ...]:
        """See the class."""
        return self.plan(self._rank.timetable)

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._rank = rank
        self._placed = self._of_rank(rank.index, simulate(rank.timetable, self.costs))
        copies = (each.instruction for each in self._placed)
        self._leaving = frozenset(each.value for each in copies if isinstance(each, Offload))
        self._copier = Copier(rank.device)
        self._stages = {
            index: StageOffload(worker, self._copier, self.least_bytes)
            for index, worker in rank.workers.items()
        }

    @property
    def nbytes(self) -> dict[int, int]:
        """{stage of this rank: the most bytes that left of one of its microbatches}."""
        return {stage: each.nbytes for stage, each in self._stages.items()}

    def rewrite(self, call: str, program: Program) -> Program:
        """Put the copies into the program of a step."""
        return with_copies(program, self._placed) if call == "step" else program

    def handlers(self, call: str) -> Mapping[type, Handler]:
        """See Feature."""
        return {Offload: self._offload, Drop: self._drop, Fetch: self._fetch, Await: self._await}

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra."""
        match at:
            case Action(stage, Op.F, microbatch) if (
                call == "step" and Value("saved", stage, microbatch) in self._leaving
            ):
                return partial(self._stages[stage].forward, run, microbatch)
        return run

    def _offload(self, at: Offload) -> None:
        value = at.value
        self._stages[value.stage].offload(value.microbatch, self._rank.extras.background(at))

    def _drop(self, at: Drop) -> None:
        self._stages[at.value.stage].drop(at.value.microbatch)

    def _fetch(self, at: Fetch) -> None:
        value = at.value
        self._stages[value.stage].fetch(value.microbatch, self._rank.extras.background(at))

    def _await(self, at: Await) -> None:
        self._stages[at.value.stage].wait(at.value.microbatch)

    def end(self, call: Call, result: Result) -> None:
        """Free the host memory that the call did not use.

        Raises RuntimeError if an offloaded value has had no Await.
        """
        left = [f"saved({stage},{each})" for stage, own in self._stages.items() for each in own.held]
        if left:
            raise RuntimeError(f"a call ended with offloaded values left over: {', '.join(left)}")
        self._copier.end_step()

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        for each in self._stages.values():
            each.abandon()

    def close(self) -> None:
        """End the copies."""
        for each in self._stages.values():
            each.abandon()
        self._copier.close()


class StageOffload:
    """Offload of the tensors that F of one stage keeps for B.

    held: by microbatch, what may be away. nbytes: the most bytes that left of one microbatch so far.
    """

    def __init__(self, worker: StageWorker, copier: Copier, least_bytes: int) -> None:
        self._worker, self._copier, self._least_bytes = worker, copier, least_bytes
        self.held: dict[int, SavedActivations] = {}
        self.nbytes = 0

    def forward(self, run: Run, microbatch: int, message: Message) -> Message:
        """Run F so that the tensors that it saves may leave."""
        activations = SavedActivations(self._copier, least_bytes=self._least_bytes)
        activations.keep(self._stays(microbatch))
        with activations.saving():
            result = run(message)
        # Others hold a message, too: the pool of receive buffers, a send, the next stage on this rank. To
        # offload a message would free no memory, and the copy back would be a second copy of it.
        activations.leave_out(each for each in (*message, *result) if each is not None)
        self.held[microbatch] = activations
        return result

    def offload(self, microbatch: int, watch: Watch | None = None) -> None:
        """Start to copy to host memory what the stage holds of the microbatch. watch: see `Watch`."""
        held = self.held[microbatch]
        held.offload(watch)
        self.nbytes = max(self.nbytes, held.nbytes)

    def drop(self, microbatch: int) -> None:
        """Wait until the copy has ended; then free the device memory."""
        self.held[microbatch].drop()

    def fetch(self, microbatch: int, watch: Watch | None = None) -> None:
        """Start to copy back. watch: see `Watch`."""
        self.held[microbatch].fetch(watch)

    def wait(self, microbatch: int) -> None:
        """Wait until the microbatch's tensors are back. From here on the StageWorker alone holds them."""
        self.held.pop(microbatch).wait()

    def abandon(self) -> None:
        """Drop the tensors that a failed step has left."""
        self.held.clear()

    def _stays(self, microbatch: int) -> Iterator[Tensor]:
        """Tensors that others hold anyway: weights, buffers, and what the caller gave for the microbatch."""
        for module in (self._worker.module, self._worker.loss_fn):
            if isinstance(module, nn.Module):
                yield from module.parameters()
                yield from module.buffers()
        args, kwargs, targets, *_ = self._worker.feed
        given = [args and args[microbatch], kwargs[microbatch], targets and targets[microbatch]]
        yield from (each for each in tree_leaves(given) if isinstance(each, Tensor))


def offload_of(pipeline: Pipeline) -> ActivationOffload | None:
    """The pipeline's offload of activations, if it has one."""
    return next((each for each in pipeline.extras if isinstance(each, ActivationOffload)), None)


def offload_plan_of(pipeline: Pipeline) -> tuple[RankOffload, ...]:
    """What leaves in each step, for every rank: an argument of `with_copies`; () without offload."""
    offload = offload_of(pipeline)
    return () if offload is None else offload.chosen
