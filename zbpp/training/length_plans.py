"""Which sequences of a batch share a microbatch, and in which order the microbatches go.

The first rank of a pipeline plans a batch in a thread while the step before it runs. All ranks get the plan
with the batch: two of them read sequences, and must read the same. A plan depends on the lengths of the
sequences, on the timetable and on costs that stay. So a run that goes on makes the plans that an
uninterrupted one would have made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from zbpp.data.token_batches import Group, MicrobatchShape, TokenBatches, replica_of
from zbpp.job.agreement import broadcast, gather
from zbpp.planning import MemoryLimit
from zbpp.planning.order import BestOrder, least_excess
from zbpp.planning.work import Work
from zbpp.runtime.processes.mesh import TENSOR, MeshPosition
from zbpp.schedule import Costs, Timetable

_NUM_ROUNDS = 16  # of the search for an order: as many milliseconds for 4 ranks and 16 microbatches


class StepPlan(NamedTuple):
    """One replica's part of a step.

    groups: the microbatches that run, in the order in which they go. lengths: theirs, see Lengths.
    next_first: the number of the sequence with which the next batch begins. num_tokens: of the whole step,
    without padding. padding: the share of padding in all tokens of the step. over_limit: what the step needs
    if no order of its microbatches is within the memory limit; else "".
    """

    groups: list[Group]
    lengths: list[float]
    next_first: int
    num_tokens: int
    padding: float
    over_limit: str = ""


class Lengths:
    """The length of a microbatch for `Costs.of_lengths`, in multiples of the microbatch of length 1.

    Costs have one length per microbatch. Several rows cost less than one row of their tokens, since attention
    grows with the square of a row. So the length is that of one row which takes as long on all stages
    together.
    costs: without lengths. shape: (rows, tokens of a row) at length 1.
    """

    def __init__(self, costs: Costs, shape: tuple[int, int]) -> None:
        self._work, (self._rows, self._tokens) = Work.of(costs), shape

    def of(self, given: MicrobatchShape) -> float:
        """The length of a microbatch; 0 for an empty one."""
        if not given.filled:
            return 0.0
        tokens = self.size_of(given)
        squares = given.squares / (self._rows * self._tokens**2)
        return self._work.length(self._work.time(tokens, squares))

    def size_of(self, given: MicrobatchShape) -> float:
        """What the memory of a microbatch grows with, its tokens, in multiples of those at length 1."""
        return given.tokens / (self._rows * self._tokens) if given.filled else 0.0


class LengthPlanner:
    """Plans the steps of one replica ahead, each in a thread.

    costs: the times at length 1, without lengths; None: equal F, B and W, which grow with the tokens.
    shape: (rows, tokens of a row) at length 1; None: costs are those of a mean microbatch. memory_limit: see
    `order_microbatches`; a step that fits in no order has the one that exceeds the limit least. leaves_out:
    whether steps run those microbatches alone that have sequences, or one without; else the others go last.
    """

    def __init__(
        self,
        batches: TokenBatches,
        timetable: Timetable,
        costs: Costs | None = None,
        shape: tuple[int, int] | None = None,
        *,
        memory_limit: MemoryLimit = None,
        part: int = 0,
        num_parts: int = 1,
    ) -> None:
        self._memory_limit = memory_limit
        self.batches, self._timetable, self._part, self._num_parts = batches, timetable, part, num_parts
        self._costs = costs or Costs()
        number = timetable.num_microbatches * num_parts
        usual = (1, max(1, batches.tokens_per_batch // number))
        self._lengths = Lengths(self._costs, shape or usual)
        self.leaves_out = True
        self._ahead: tuple[int, Future[StepPlan]] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def of_step(self, step: int) -> StepPlan:
        """The plan of a step; the next step's is begun."""
        number, future = self._ahead or (None, None)
        found = future.result() if future and number == step else self.plan(self.batches.first_of(step))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="plan of the next batch")
        self._ahead = step + 1, self._thread.submit(self.plan, found.next_first)
        return found

    def plan(self, first: int) -> StepPlan:
        """The plan of the batch that begins with sequence `first`."""
        number = self._timetable.num_microbatches
        cut = self.batches.cut(first, number * self._num_parts)
        own = replica_of(cut, self._part, self._num_parts)
        full = [each for each, (group, _) in enumerate(own) if group] or [0]
        best = self._ordered([own[each][1] for each in full])
        order = [full[each] for each in best.order]
        order += [] if self.leaves_out else sorted({*range(number)} - {*full})
        lengths = [self._lengths.of(shape) for _, shape in own]
        filled, tokens = (
            sum(each) for each in zip(*((s.filled, s.tokens) for group, s in cut if group), strict=True)
        )
        return StepPlan(
            groups=[own[each][0] for each in order],
            lengths=[lengths[each] for each in order],
            next_first=first + sum(len(group) for group, _ in cut),
            num_tokens=filled,
            padding=1 - filled / tokens,
            over_limit=best.refusal(self._costs.memory_unit),
        )

    def _ordered(self, shapes: Sequence[MicrobatchShape]) -> BestOrder:
        """The order of the microbatches that have sequences, in the timetable without the others."""
        timetable = self._timetable.first(len(shapes))
        costs = Costs.of_lengths(map(self._lengths.of, shapes), self._costs)
        sizes = [self._lengths.size_of(shape) for shape in shapes]
        return least_excess(timetable, costs, math.inf, self._memory_limit, sizes, num_rounds=_NUM_ROUNDS)

    def close(self) -> None:
        """End the thread; a later step plans again."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = self._ahead = None


def agreed_plan(plan: StepPlan | None, place: MeshPosition) -> StepPlan:
    """The plan of the pipeline's rank that has one, on all its ranks. Collective.

    The pipelines of tensor-parallel processes read the same batch: they take the first one's plan.
    """
    found = next(each for each in gather(plan, place.pipeline) if each is not None)
    group = place.group(TENSOR)
    return found if group is None else broadcast(found, group)
