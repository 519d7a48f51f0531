"""What a pipeline of torch's costs on torch's runtime, and what it would cost on zbpp: one page.

Each runtime makes three steps of the batch: one to set up, one that is timed, one whose live tensors are
counted, which slows it down. Gradients, buffers and random states are afterwards as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules as torchs

from zbpp.autograd.leaf_grad import set_aside
from zbpp.devices import restored_generators
from zbpp.error_text import kind_of
from zbpp.job.agreement import gather
from zbpp.measure import measured_costs
from zbpp.measure.live_tensors import counter_of
from zbpp.observers.record import StepRecord
from zbpp.observers.timeline import measured_timeline
from zbpp.runtime.extra import Observer
from zbpp.runtime.layout import Run
from zbpp.runtime.restored import restored_buffers
from zbpp.schedule import Action, Op, Timeline, Timetable, simulate
from zbpp.schedule.program import Instruction
from zbpp.stage_api import blocks_of
from zbpp.torch_pipelining.engine import engine_of, installed, stages_of, without_engine
from zbpp.torch_pipelining.order import timetable_of
from zbpp.torch_pipelining.recording import Around, recording, stages_run_by
from zbpp.torch_pipelining.refusal import STEP

_MIB = 2**20
Changes = dict[tuple[int, Op], list[int]]
"""By stage and op: the bytes that each action has left alive, less what it freed."""
Observed = Callable[[Around], AbstractContextManager[Any]]
"""Inside of `observed(around)`, `around` runs each action of this rank."""


@dataclass
class Measured:
    """One runtime's steps, of all ranks.

    held: per stage, the bytes that a microbatch holds after its F, B and W (after BW, which is both), with
    messages that are not sent yet. peak: per rank, the most bytes alive beyond those before the step. runs:
    per stage, how often the forward of each block runs for a microbatch. timeline: of the timed step.
    planned: the schedule's order, simulated at the costs of the timed step, without messages.
    """

    held: Mapping[int, tuple[float, float, float]]
    peak: Sequence[int]
    runs: Mapping[int, Mapping[str, float]]
    timeline: Timeline
    planned: Timeline


@dataclass
class Diagnosis:
    """What `doctor` has found; str() is the page. on_zbpp: None if the schedule can't run there, for the
    reason `reason`. switch: the line that lets the schedule run on zbpp.
    """

    name: str
    on_torch: Measured
    on_zbpp: Measured | None
    reason: str
    switch: str = "zbpp.torch_pipelining.on_zbpp(schedule)"

    def __str__(self) -> str:
        runtimes = {"torch": self.on_torch} | ({"zbpp": self.on_zbpp} if self.on_zbpp else {})
        timetable = self.on_torch.timeline.timetable
        lines = [
            f"{self.name}: {timetable.num_ranks} ranks, {timetable.num_stages} stages, "
            f"{timetable.num_microbatches} microbatches",
            "",
            "a microbatch holds, MiB      after F   after B   after W",
        ]
        for stage in range(timetable.num_stages):
            for runtime, of in runtimes.items():
                held = "".join(f"{each / _MIB:>10.3f}" for each in of.held[stage])
                lines.append(f"stage {stage:<4} {runtime:<15}{held}")
        lines += [
            "",
            "most bytes in a step, MiB     " + "".join(f"rank {r:<5}" for r in range(timetable.num_ranks)),
        ]
        for runtime, of in runtimes.items():
            lines.append(f"{'':<10} {runtime:<15}" + "".join(f"{each / _MIB:>10.3f}" for each in of.peak))
        lines += ["", "forwards of a block for a microbatch"]
        for runtime, of in runtimes.items():
            lines.append(f"{'':<10} {runtime:<15} {_runs_text(of.runs)}")
        lines += ["", "bubble rate                   measured   planned   step, ms"]
        for runtime, of in runtimes.items():
            rates = f"{of.timeline.bubble_rate:>13.3f}{of.planned.bubble_rate:>10.3f}"
            lines.append(f"{'':<10} {runtime:<15}{rates}{of.timeline.makespan:>11.1f}")
        reason = f"this schedule can't run on zbpp: {self.reason}"
        return "\n".join([*lines, "", reason if self.reason else f"to run it on zbpp: {self.switch}"])


def _runs_text(runs: Mapping[int, Mapping[str, float]]) -> str:
    """The blocks that do not run once; "each once" if there are none."""
    often = [
        f"{name} of stage {stage} {number:g} times"
        for stage, blocks in sorted(runs.items())
        for name, number in blocks.items()
        if number != 1
    ]
    return ", ".join(often) + (", the others once" if often else "") or "each once"


def doctor(schedule: Any, batch: Sequence[Any], **keywords: Any) -> Diagnosis:
    """Measure a schedule of torch's on torch's runtime and on zbpp. Collective over the pipeline.

    schedule: an object of one of torch's Schedule classes, which has a loss_fn. batch: (*inputs, target), as
    `schedule.step` splits them; the same on all ranks. keywords: those of `schedule.step`. Returns the same
    on all ranks. Raises TypeError or ValueError, on every rank alike, for other kinds of arguments.
    """
    _check(schedule, batch, keywords)
    stages = stages_of(schedule)
    modules = [each.submod for each in stages]
    device = torch.device(stages[0].device)
    parameters = [each for module in modules for each in module.parameters()]
    with restored_buffers(modules), restored_generators(device), set_aside(parameters):
        on_torch, timetable = _on_torch(schedule), timetable_of(schedule)
        step = partial(_step, on_torch, stages, batch, keywords)
        found = _measured(partial(stages_run_by, stages), step, stages, timetable, device)
        for parameter in parameters:
            parameter.grad = None
        on_zbpp, reason = _measured_on_zbpp(schedule, stages, batch, keywords, device)
    return Diagnosis(type(schedule).__name__, found, on_zbpp, reason)


def _check(schedule: Any, batch: Any, keywords: Mapping[str, Any]) -> None:
    instead = "write doctor(schedule, (*inputs, target), **keywords)"
    if not isinstance(schedule, torchs._PipelineSchedule):
        raise TypeError(f"{kind_of(schedule)} is no schedule of torch's pipelining: {instead}")
    if not isinstance(batch, tuple | list):
        raise TypeError(f"batch is {kind_of(batch)}: {instead}")
    if "target" in keywords or len(batch) < (1 if keywords else 2):
        has = "the target is a keyword" if "target" in keywords else f"len(batch)={len(batch)}"
        raise ValueError(f"{has}: {instead}")
    if schedule._loss_fn is None:
        raise ValueError(f"{type(schedule).__name__} has no loss: make it with loss_fn=...")


def _measured_on_zbpp(
    schedule: Any,
    stages: Sequence[Any],
    batch: Sequence[Any],
    keywords: Mapping[str, Any],
    device: torch.device,
) -> tuple[Measured | None, str]:
    from zbpp.torch_pipelining import on_zbpp

    ours = on_zbpp(_on_torch(schedule))
    step = partial(_step, ours, stages, batch, keywords)
    step()
    engine = engine_of(ours)
    if engine.reason:
        return None, engine.reason
    pipeline = engine.pipeline
    try:
        observed = lambda around: pipeline.using(_RunBy(around))  # noqa: E731
        return _measured(observed, step, stages, pipeline.timetable, device), ""
    finally:
        engine.drop()


# ---- Schedules


def _on_torch(schedule: Any) -> Any:
    """A copy of the schedule that runs on torch's runtime, also if it or its class runs on zbpp."""
    theirs = next(each for each in type(schedule).__mro__ if each.__module__.startswith("torch."))
    owner = next(each for each in theirs.__mro__ if STEP in vars(each))
    method = installed.get(owner, vars(owner)[STEP])
    found: Any = object.__new__(type(theirs.__name__, (theirs,), {STEP: method}))
    vars(found).update(vars(without_engine(schedule)))
    return found


def _step(schedule: Any, stages: Sequence[Any], batch: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    *inputs, target = batch
    is_last = any(each.is_last for each in stages)
    schedule.step(
        *(inputs if any(each.is_first for each in stages) else ()),
        target=target if is_last else None,
        losses=[] if is_last else None,
        return_outputs=False,
        **keywords,
    )


# ---- Measuring


class _RunBy(Observer):
    """Lets `around` run each action of a Pipeline."""

    name = "doctor"

    def __init__(self, around: Around) -> None:
        self._around = around

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra."""
        return (lambda message: self._around(at, lambda: run(message))) if isinstance(at, Action) else run


def _measured(
    observed: Observed,
    step: Callable[[], None],
    stages: Sequence[Any],
    timetable: Timetable,
    device: torch.device,
) -> Measured:
    group = stages[0].group
    step()  # sets up; afterwards gradients have their memory
    timeline = _timed(observed, step, device, group)
    with ExitStack() as stack:
        runs = [stack.enter_context(_counted_runs(each.submod)) for each in stages]
        changes, peak = _counted(observed, step, device)
    number = timetable.num_microbatches
    own = [
        (each.stage_index, _held(changes, each.stage_index), {name: n / number for name, n in of.items()})
        for each, of in zip(stages, runs, strict=True)
    ]
    parts = gather((own, peak), group)
    everywhere = [each for part, _ in parts for each in part]
    return Measured(
        {stage: held for stage, held, _ in everywhere},
        [peak for _, peak in parts],
        {stage: blocks for stage, _, blocks in everywhere},
        timeline,
        simulate(timetable, measured_costs(timeline)),
    )


def _timed(observed: Observed, step: Callable[[], None], device: torch.device, group: Any) -> Timeline:
    """When each action of a step ran. Collective."""
    record, row = StepRecord(device), list[Action]()
    with observed(recording(record, row)):
        step()
    return measured_timeline(record, Timetable(gather(row, group)), group)


def _counted(observed: Observed, step: Callable[[], None], device: torch.device) -> tuple[Changes, int]:
    """What the actions of a step have left alive, and the most bytes that were alive beyond those before."""
    changes: Changes = {}
    with counter_of(device) as counter:

        def around(action: Action, run: Callable[[], Any]) -> Any:
            before = counter.now
            result = run()
            changes.setdefault((action.stage, action.op), []).append(counter.now - before)
            return result

        with observed(around):
            before = counter.mark()
            step()
            return changes, counter.highest - before


def _held(changes: Changes, stage: int) -> tuple[float, float, float]:
    of = {op: median(changes.get((stage, op), [0])) for op in Op}
    after_b = of[Op.F] + (of[Op.B] if (stage, Op.B) in changes else of[Op.BW])
    return of[Op.F], after_b, after_b + of[Op.W]


@contextmanager
def _counted_runs(module: nn.Module) -> Iterator[dict[str, int]]:
    """Inside, the forwards of the module's blocks are counted, also those of recomputes."""
    blocks = set(map(id, blocks_of(module)))
    counts = {name: 0 for name, each in module.named_modules() if id(each) in blocks}

    def count(name: str) -> None:
        counts[name] += 1

    hooks = [
        module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: count(name))
        for name in counts
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
