"""What a step through a schedule of torch's does beside the core: two features of its Pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zbpp.runtime.extra import Feature
from zbpp.runtime.layout import Message, Run
from zbpp.schedule import Action, Op
from zbpp.schedule.program import Instruction

if TYPE_CHECKING:
    from zbpp.runtime.rank import Rank
    from zbpp.runtime.stage import StageWorker

FORWARD_KEYWORDS = "_stage_forward_kwargs"  # method of a newer torch's schedules


def forward_keywords(schedule: Any, stage: Any) -> list[str]:
    """The names of the keywords that a schedule of torch's adds to each forward."""
    make = getattr(schedule, FORWARD_KEYWORDS, None)
    return [] if make is None else [*(make(stage, 0, {}) or {})]


class WeightsByUser(Feature):
    """A stage's `dw_builder`: called after its B; what it returns runs in W."""

    name = "dw_builder"

    def __init__(self, builders: Mapping[int, Callable[[], Callable[[], None]]]) -> None:
        self._builders = builders
        self._waiting: dict[tuple[int, int], Callable[[], None]] = {}

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra."""
        if not isinstance(at, Action) or at.stage not in self._builders:
            return run
        key, build = (at.stage, at.microbatch), self._builders[at.stage]

        def bound(message: Message) -> Message:
            result = run(message)
            if at.op in (Op.B, Op.BW):
                self._waiting[key] = build()
            if at.op in (Op.W, Op.BW):
                self._waiting.pop(key)()
            return result

        return bound

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        self._waiting.clear()


class ForwardKeywords(Feature):
    """The keywords that a schedule of torch's adds to the forward of each stage and microbatch.

    With `pass_pipeline_stage_info=True` a forward is told its stage and its microbatch. The schedule's own
    method FORWARD_KEYWORDS makes the keywords, here as on torch's runtime.
    names: those of the keywords. A call is given the number of the microbatch under each of these names.
    """

    name = "forward_keywords"

    def __init__(self, schedule: Any, stages: Sequence[Any], names: Sequence[str]) -> None:
        self._schedule = weakref.ref(schedule)  # the schedule holds the Pipeline, which holds this
        self._stages = {each.stage_index: each for each in stages}
        self._names = names
        self._workers: Mapping[int, StageWorker] = {}

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._workers = rank.workers

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra."""
        if not (isinstance(at, Action) and at.op == Op.F):
            return run
        worker, stage = self._workers[at.stage], self._stages[at.stage]

        def forward(message: Message) -> Message:
            worker.keywords |= self._made(stage, worker.feed.kwargs[at.microbatch])
            return run(message)

        return forward

    def _made(self, stage: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a stage's forward of a microbatch."""
        of_user = {name: value for name, value in given.items() if name not in self._names}
        made: dict[str, Any] = getattr(self._schedule(), FORWARD_KEYWORDS)(
            stage, given[self._names[0]], of_user
        )
        return made
