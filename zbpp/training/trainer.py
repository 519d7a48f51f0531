"""The training loop: batch, pipeline step, norm over all stages, optimizer step, metrics.

It knows no schedule and no config. All ranks run it in lockstep; one gather per step exchanges the losses and
the squared norms of the gradients.

Callbacks do what happens around the steps beside training: saving, leaving early, profiling.

    for each step:    before_step   the step   after_step
    at the end:       finish        if the run does its last step, or is left early
                      stopped       if NaN or infinite values stop the run
                      (neither)     if the run fails

All ranks have the same callbacks in the same order, and call them at the same places: so a callback may
communicate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zbpp.checkpoints import Stateful
from zbpp.data import Data
from zbpp.devices import synchronize
from zbpp.observers.recorder import Recorder
from zbpp.runtime import Pipeline
from zbpp.schedule import Links, Timeline, Timetable
from zbpp.training.batches import Batches
from zbpp.training.evaluation import MetricsOf, evaluate_held_out
from zbpp.training.length_plans import LengthPlanner, StepPlan
from zbpp.training.non_finite import BegunSteps, Values
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.post_validated_update import PostValidatedUpdate
from zbpp.training.optim.precision import LossScale, let_layers_cast
from zbpp.training.optim.update import Metrics, ReleasedUpdate, Result, Update
from zbpp.training.replan import Replan

_KEPT = 5  # measured steps, or as many as num_recorded


class Callback:
    """The base of all callbacks; each method does nothing until it is overridden. Steps count from 0."""

    def needs_weights(self, step: int) -> bool:
        """Whether `after_step` of this step needs the final weights and this step's metrics.

        With post-validation both are known during the next step only, unless the trainer waits for them.
        """
        return False

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Called before a step reads its batch."""

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Called after a step.

        known: the metrics of the steps whose outcome has become known, oldest first. The callback may add
        entries to these dicts. If `needs_weights(step)` is true, the last dict is this step's.
        """

    def stopped(self, trainer: Trainer) -> None:
        """Called instead of `finish` on all ranks if values that are not finite stop the run."""

    def finish(self, trainer: Trainer) -> None:
        """Called once after the last step, whose number is `trainer.next_step - 1`."""


@dataclass(kw_only=True)
class Trainer:
    """Trains the stages of one rank together with the other ranks.

    learning_rate(step): the factor on the optimizer's rate; scheduler: one of torch's, which sets the rate
    instead, and whose state a checkpoint holds. clip_norm: the largest norm of the gradients of all stages
    together. metrics(output, target): further numbers of a held-out microbatch, beside its loss.

    num_recorded: how many of the last steps are measured action by action. record_every=n: the second step,
    the third and every n-th are measured, too; 0: none. replan: may replace the pipeline after the first
    steps. links: of the pipeline's ranks, where they are known: steps are predicted with them. A replan that
    measures slow ones sets them.

    masters: master weights of all trainable parameters; the optimizer must then be over
    `masters.parameters()`, and floating-point targets are cast to float32. loss_scale: chooses the pipeline's
    loss_scale before each step; None: pipeline.loss_scale stays as it is. Either way norm and gradients are
    divided by pipeline.loss_scale. gradient_release: the pipeline's step updates the weights itself.
    zbpp.GradientRelease explains this argument, `accumulate` and `per_parameter`. post_validation: the update
    does not wait for the norm, see zbpp.PostValidation; a step's metrics then come one step later.

    planner: of batches of so many tokens, on ranks that read them (data.is_shared); see length_plans.py. The
    metrics of such a step have `padding`, the share of its tokens that fill rows up.

    non_finite: skip, stop or continue where a loss or the norm of the gradients is NaN or infinite, see
    non_finite.py. callbacks: called around the steps.
    Raises ValueError for options that exclude each other.
    """

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    data: Data
    learning_rate: Callable[[int], float] | None = None
    scheduler: LRScheduler | None = None
    clip_norm: float | None = None
    evaluate_every: int = 0
    metrics: MetricsOf | None = None
    num_recorded: int = 5
    record_every: int = 0
    replan: Replan | None = None
    links: Links | None = None
    masters: MasterWeights | None = None
    loss_scale: LossScale | None = None
    gradient_release: bool = False
    accumulate: bool = False
    per_parameter: bool = False
    post_validation: bool = False
    planner: LengthPlanner | None = None
    callbacks: Sequence[Callback] = ()
    non_finite: str = "skip"

    def __post_init__(self) -> None:
        if (self.learning_rate is None) == (self.scheduler is None):
            raise ValueError("give the trainer one of learning_rate and scheduler: each sets the rate")
        place = self.pipeline.place
        self.values = Values(
            self.non_finite,
            is_scaled=self.loss_scale is not None,
            has_updated=self.gradient_release,
            is_shown=place.is_first and place.rank == 0,
        )
        self._update = self._made_update()
        self.timelines: dict[int, Timeline] = {}  # of the last measured steps, which are counted from 1
        self.lengths: dict[int, list[float]] = {}  # of their microbatches, where these differ in length
        self._recorder = Recorder()
        self.next_step = 0  # the step that `run` begins with
        self.leaving: str | None = None  # why the run ends early; the same on all ranks
        self.first_step = 0  # the first step of the last `run`
        self._agreed: str | None = None  # the reason that all ranks know
        self._is_over_limit = False  # some step so far, in every order
        target_dtype = None if self.masters is None else torch.float32
        self._batches = Batches(self.pipeline, self.data, target_dtype, self.planner)
        for stage in self.pipeline.stages.values():  # inputs come in float32
            if any(each.is_floating_point() and each.itemsize == 2 for each in stage.parameters()):
                let_layers_cast(stage)
        self._begun = BegunSteps(self.values)

    def _made_update(self) -> Update:
        common: Any = {"clip_norm": self.clip_norm, "masters": self.masters, "loss_scale": self.loss_scale}
        made: Update | None = None
        if self.gradient_release:
            how: Any = {"accumulate": self.accumulate, "per_parameter": self.per_parameter}
            made = ReleasedUpdate(self.pipeline, self.optimizer, **how, **common)
        if self.post_validation:  # the pipeline refuses it beside gradient release
            made = PostValidatedUpdate(
                self.optimizer, pipeline=self.pipeline, skips=self.values.skips, **common
            )
        return made or Update(self.optimizer, skips=self.values.skips, **common)

    def run(self, num_steps: int) -> Iterator[Metrics]:
        """Train from `next_step` until `num_steps` steps are done, or until a callback wants to leave.

        Yields each step's metrics when they are known. All but the times are equal on all ranks. Raises
        NonFiniteError, on all ranks, where `non_finite` says that the run has to stop.
        """
        self.leaving = self._update.wish = self._agreed = None
        self.first_step = self.next_step
        self._tell_optimizer("train")
        try:
            while self.next_step < num_steps and self.leaving is None:
                yield from self._run_step(self.next_step, num_steps=num_steps)
                self._check_values()
            yield from self._finish_update()
            self._check_values()
        finally:
            self._batches.close()
        self._call_each("finish")

    def leave(self, reason: str, *, agreed: bool = False) -> None:
        """End the run early, on all ranks. One rank may call this, at any time and from any thread.

        The reason goes to the other ranks with the loss of the step that runs, or of the next one. The run
        ends after that step, with post-validation one step later. It ends after the present step if this is
        the only process, or if `agreed`, which says that all ranks call this in the same after_step.
        """
        self._update.wish = self._update.wish or reason
        if agreed or (not self.pipeline.place.groups and self.pipeline.timetable.num_ranks == 1):
            self._agreed = self._agreed or reason

    def states(self) -> dict[str, Stateful]:
        """What a checkpoint has to hold beside the pipeline, the optimizer and the step."""
        found: dict[str, Stateful] = {"update": self._update, "values": self.values}
        if self.loss_scale is not None:
            found["loss_scale"] = self.loss_scale
        if self.scheduler is not None:
            found["scheduler"] = self.scheduler
        found["data"] = self.data
        return found | _states_of(self.callbacks)

    @property
    def messages_ahead(self) -> int:
        """How many messages more the links hold, if the replanner has chosen that; else 0."""
        return self.replan.ahead.number if self.replan is not None and self.replan.ahead else 0

    def go_on_after(self, step: int, replanned: Timetable | None = None, ahead: int = 0) -> None:
        """Let `run` begin after `step` steps; the weights and the optimizer's states are those after them.

        replanned: the plan that a replanner made in an earlier start. It is used if it places the stages as
        this pipeline does and has as many microbatches; else the replanner measures again. ahead: the
        messages_ahead of that start.
        """
        self.next_step = step
        old = self.pipeline.timetable
        if self.replan is None or replanned is None or replanned.rank_of != old.rank_of:
            return
        if replanned.num_microbatches == old.num_microbatches:
            self.replan.skip()
            self.pipeline.use_timetable(replanned)
            if self.replan.ahead is not None:
                self.replan.ahead.change(ahead)

    def _run_step(self, step: int, *, num_steps: int) -> list[Metrics]:
        is_last = step + 1 == num_steps
        recorded = self._is_recorded(step, num_steps=num_steps)
        evaluated = self.evaluate_every and ((step + 1) % self.evaluate_every == 0 or is_last)
        self._call_each("before_step", step)
        known = self._finish_update() if recorded else []
        with self.pipeline.using(self._recorder) if recorded else nullcontext():
            known += self._step(step)
        self.next_step = step + 1
        needed = any(callback.needs_weights(step) for callback in self.callbacks)
        if recorded or evaluated or is_last or needed or self._replanner:
            known += self._finish_update()  # so that the last one is this step's
        if evaluated:
            known[-1] |= self.evaluate()
        if recorded:
            self._keep_timeline(step + 1)
        self._call_each("after_step", step, known)
        self.leaving = None if is_last else self._agreed  # after its last step a run has not ended early
        if not is_last:
            self._replan(step, known)
        return known

    def _keep_timeline(self, number: int) -> None:
        """Keep the timeline of a recorded step, and the lengths of its microbatches. Collective."""
        self.timelines[number] = self._recorder.timeline()
        if self._batches.lengths is not None:
            self.lengths[number] = self._batches.lengths
        if len(self.timelines) > max(self.num_recorded, _KEPT):
            oldest = min(self.timelines)
            del self.timelines[oldest]
            self.lengths.pop(oldest, None)

    @property
    def items_per_step(self) -> int:
        """Tokens or rows of a step's data, those of all replicas and shards together."""
        return self.data.items_per_batch * self._batches_per_step

    @property
    def filled_per_step(self) -> float:
        """The items of a step that are no padding, on average."""
        return self.data.filled_items * self._batches_per_step

    @property
    def _batches_per_step(self) -> int:
        return self.data.batches_per_step(self.pipeline.place.num_data_parts)

    @property
    def is_replanned(self) -> bool:
        """Whether the plan that was made for the first steps' costs is running."""
        return self.replan is not None and self.replan.is_done

    def evaluate(self) -> Metrics:
        """`evaluation_loss`, and one for each of `metrics`: means over all held-out targets, on every rank.

        {} without held-out data.
        """
        with self.averaged():
            return evaluate_held_out(
                self.pipeline,
                self._batches,
                self.data.num_evaluation_batches,
                self.data.num_evaluation_rest,
                self.metrics,
                after_step=self.next_step,
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which a schedule-free optimizer has its averages in place of the weights.

        Evaluations and saved weights are made of them. Other optimizers have one kind of weights.
        """
        self._tell_optimizer("eval")
        try:
            yield
        finally:
            self._tell_optimizer("train")

    def _tell_optimizer(self, mode: str) -> None:
        """Call `train` or `eval` of an optimizer that has both."""
        method = getattr(self.optimizer, mode, None)
        if callable(method):
            method()
            if self.masters is not None:
                self.masters.cast()

    def _step(self, step: int) -> list[Metrics]:
        """Train on one batch; returns the metrics of all steps whose outcome is known by now."""
        begin = time.perf_counter()
        self._update.begin(self.pipeline, None if self.learning_rate is None else self.learning_rate(step))
        args, target = batch = self._batches.of_step(step)
        losses = self.pipeline.step(*args, target=target)
        results = self._update.end(self.pipeline, losses)
        if self.scheduler is not None:
            # An update may have been skipped or may be later: torch's schedulers warn before the first one.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # the schedulers' own
            self.scheduler.step()
        synchronize(self.pipeline.device)
        seconds = time.perf_counter() - begin
        plan = self._batches.plan
        self._show_over_limit(step, plan)
        filled = self.filled_per_step if plan is None else plan.num_tokens
        times = {f"{self.data.unit}_per_second": filled / seconds, "step_seconds": seconds}
        times |= {} if plan is None else {"padding": plan.padding}
        self._begun.add(step, times, batch, self.pipeline)
        return self._finished(results)

    def _show_over_limit(self, step: int, plan: StepPlan | None) -> None:
        """Say once that a step exceeds the memory limit in every order of its microbatches."""
        if plan is None or not plan.over_limit or self._is_over_limit:
            return
        self._is_over_limit, place = True, self.pipeline.place
        if place.is_first and place.rank == 0:
            print(
                f"MEMORY LIMIT: step {step + 1}: {plan.over_limit}. Such steps run in the order that exceeds "
                "it least; smaller microbatches (tokens_per_batch, num_microbatches) hold less",
                flush=True,
            )

    def _finish_update(self) -> list[Metrics]:
        """Wait until the weights are right; returns the metrics that have become known."""
        return self._finished(self._update.finish_update())

    def _finished(self, results: Iterable[Result]) -> list[Metrics]:
        """The metrics of the oldest steps that were begun, with their results."""
        finished = []
        for outcome, figures in results:
            self._agreed = self._agreed or outcome.wish
            finished.append(self._begun.finish(outcome, figures, self.pipeline))
        return finished

    def _call_each(self, method: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, method)(self, *args)

    def _check_values(self) -> None:
        if self.values.error is not None:
            self._call_each("stopped")
            raise self.values.error

    def _is_recorded(self, step: int, *, num_steps: int) -> bool:
        """Whether a step is measured action by action: some early ones, some between, the last ones."""
        if self._replanner and self._replanner.is_measured(step):
            return True
        since = step - self.first_step  # in the first one ranks agree on shapes
        is_between = self.record_every and (since in (1, 2) or (since and step % self.record_every == 0))
        return bool(is_between) or step >= num_steps - self.num_recorded

    @property
    def _replanner(self) -> Replan | None:
        """The replanner, as long as it has something to do."""
        return None if self.replan is None or self.replan.is_over else self.replan

    def _replan(self, step: int, known: Sequence[Metrics]) -> None:
        """Let the replanner, if there is one, change the timetable; its metrics are added to the step's."""
        replanner = self._replanner
        if not replanner:
            return
        _, target = self._batches.of_step(step)
        old, timelines = self.pipeline.timetable, list(self.timelines.values())
        known[-1].update(replanner.after(step, self.pipeline, timelines, target))
        self.links = replanner.links or self.links
        if self.pipeline.timetable != old:
            self.timelines.clear()


def _states_of(callbacks: Iterable[Callback]) -> dict[str, Stateful]:
    """The callbacks with a state, by their names in a checkpoint: `callback.Count`, `callback.Count#2`."""
    found: dict[str, Stateful] = {}
    for callback in callbacks:
        if isinstance(callback, Stateful):
            name = f"callback.{type(callback).__name__}"
            number = sum(each.partition("#")[0] == name for each in found)
            found[f"{name}#{number + 1}" if number else name] = callback
    return found
