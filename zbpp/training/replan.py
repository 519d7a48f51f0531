"""Replans after the first steps of a run, for the costs that were measured in them.

The cut of the model stays, so every loss stays equal to the last bit: only the order of the work changes.
With n measured steps, counted from 0 at the first step that this process runs:

    step 0          ranks agree on shapes; the inputs of each stage are kept
    1 to n          measured, under the first plan; then the links are measured, and the new plan is made
    n + 1           programs are made, and extras warm up
    n + 2 to 2n + 1 measured, to compare with the new plan's predicted makespan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn

from zbpp.features.fewer_bytes.codes import coded
from zbpp.features.fewer_bytes.fewer_bytes import FewerBytes, chosen_boundaries
from zbpp.features.head_at_once.head_at_once import HeadAtOnce
from zbpp.features.messages_ahead.messages_ahead import MessagesAhead
from zbpp.job.agreement import broadcast
from zbpp.measure import measured_costs
from zbpp.measure.link_times import message_bytes, timed_links, with_links
from zbpp.measure.microbatch_memory import first_inputs, memory_per_stage, static_per_stage
from zbpp.planning import messages_ahead
from zbpp.runtime import Pipeline
from zbpp.runtime.call.microbatch import into_microbatches
from zbpp.runtime.layout import Message
from zbpp.runtime.processes.mesh import planned_by_rank_0
from zbpp.schedule import Costs, Links, Timeline, Timetable, simulate

Metrics = dict[str, Any]


@dataclass(kw_only=True)
class Replan:
    """Lets a Trainer's pipeline follow another timetable after its first steps.

    Make this object before the first step: it records the inputs of each stage.

    plan(costs, limits): a timetable of the same cut; costs in ms and bytes, limits in bytes per rank.
    stages: this rank's. memory_limits: bytes that each rank may hold, with weights, gradients and optimizer
    states; None: as many as under the first plan, rank by rank. is_done: whether the new plan was made;
    is_over: whether it was measured, too, so that nothing is left to do. links: the measured ones; None if
    all are fast.
    timeout: seconds that a wait for another rank may last while links are measured. ahead: an extra of the
    pipeline, whose number becomes what the measured links need; None: the number of messages stays.
    """

    plan: Callable[[Costs, Sequence[float]], Timetable]
    loss_fn: Callable[..., Any]
    stages: Mapping[int, nn.Module]
    memory_limits: Sequence[float] | None = None
    num_measured: int = 3
    timeout: float = 600.0
    ahead: MessagesAhead | None = None

    def __post_init__(self) -> None:
        self._watching = ExitStack()
        self._inputs = self._watching.enter_context(first_inputs(self.stages))
        self._expected = 0.0
        self.links: Links | None = None
        self.is_done, self.is_over = False, False
        self._first: int | None = None  # the first step of this process: not 0 in a resumed run

    def is_measured(self, step: int) -> bool:
        """Whether a step must be recorded."""
        since, num = self._since_first(step), self.num_measured
        return not self.is_over and (1 <= since <= num or num + 2 <= since <= 2 * num + 1)

    def _since_first(self, step: int) -> int:
        if self._first is None:
            self._first = step
        return step - self._first

    def skip(self) -> None:
        """Plan no more: an earlier start of the run has done so, and goes on with its plan."""
        self._watching.close()
        self._inputs.clear()
        self.is_done = self.is_over = True

    def after(self, step: int, pipeline: Pipeline, timelines: Sequence[Timeline], target: Any) -> Metrics:
        """Let the pipeline follow the new plan when it is time; returns metrics to log.

        timelines: of all recorded steps so far; target: of the step's batch, on the last stage's owner.
        Raises PlanError if the limit can't hold a plan. Collective.
        """
        since = self._since_first(step)
        if self.is_over:
            return {}
        if since == self.num_measured:
            return self._switch(pipeline, timelines, target)
        if since == 2 * self.num_measured + 1:
            self.is_over = True
            return self._metrics(timelines[-self.num_measured :])
        return {}

    def _switch(self, pipeline: Pipeline, timelines: Sequence[Timeline], target: Any) -> Metrics:
        old = pipeline.timetable
        costs = self._costs(pipeline, timelines, target)
        held = simulate(old, costs).peak_memory
        limits = held if self.memory_limits is None else self.memory_limits
        new = planned_by_rank_0(lambda: self.plan(costs, limits), pipeline.place)
        self.links = costs.links
        self._expected, self.is_done = simulate(new, costs).makespan, True
        pipeline.use_timetable(new)
        if self.ahead is not None:
            self.ahead.change(broadcast(messages_ahead(new, costs), pipeline.group))
        return self._metrics(timelines)

    def _metrics(self, timelines: Sequence[Timeline]) -> Metrics:
        measured = median(timeline.makespan for timeline in timelines)
        return {"measured_makespan_ms": measured, "expected_makespan_ms": self._expected}

    def _costs(self, pipeline: Pipeline, timelines: Sequence[Timeline], target: Any) -> Costs:
        self._watching.close()
        num_microbatches = pipeline.timetable.num_microbatches
        held = memory_per_stage(
            self.stages,
            self._inputs,
            pipeline.timetable.num_stages,
            pipeline.device,
            loss_fn=self.loss_fn,
            target=None if target is None else into_microbatches("target", target, num_microbatches)[0],
            group=pipeline.group,
            head_at_once=any(isinstance(each, HeadAtOnce) for each in pipeline.extras),
        )
        sizes = message_bytes(self._inputs, pipeline.group, _codes(pipeline))
        self._inputs.clear()
        costs = measured_costs(*timelines).in_bytes(
            saved=[each.saved for each in held],
            deferred=[each.deferred for each in held],
            static=static_per_stage(self.stages, pipeline.timetable.num_stages, pipeline.group),
        )
        links = timed_links(pipeline.timetable, sizes, pipeline.device, self.timeout, pipeline.group)
        return with_links(costs, links, *sizes)


def _codes(pipeline: Pipeline) -> Callable[[int, Message], Message]:
    """What goes over a boundary in place of a message."""
    fewer = next((each for each in pipeline.extras if isinstance(each, FewerBytes)), None)
    if fewer is None:
        return lambda boundary, message: message
    form, chosen = fewer.form, chosen_boundaries(fewer.boundaries, pipeline.timetable.num_stages)
    return lambda boundary, message: coded(message, form) if boundary in chosen else message
