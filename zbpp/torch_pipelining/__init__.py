"""torch.distributed.pipelining with zbpp's engine: the same names, one import line.

    from zbpp.torch_pipelining import PipelineStage, ScheduleInterleavedZeroBubble

Every Schedule class here is a subclass of torch's class of that name. Constructors, splitting into chunks,
merging of outputs and CSV files stay torch's. Only `_step_microbatches` is replaced, which all of torch's
schedules go through: a step runs on a zbpp.Pipeline over the same stages, in torch's order.

    install()    replaces it in torch's own classes, for trainers that import these; uninstall() undoes that
    on_zbpp      the same for one schedule object of torch's
    use_plan     a schedule of zbpp's in place of torch's order, with the same stages on the same ranks
    doctor       what a schedule costs on torch's runtime and on zbpp, on one page
    fallbacks    why schedules run on torch's runtime, one text per schedule object

    order.py     torch's order of actions as a Timetable
    doctor.py    measures both runtimes
    recording.py runs and records the actions of torch's stages
    engine.py    a Pipeline for a schedule object
    features.py  what it does beside the core: dw_builder, keywords that torch adds to a forward
    refusal.py   why a schedule runs on torch's runtime
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch.distributed import pipelining
from torch.distributed.pipelining import Pipe, PipelineStage, SplitPoint, build_stage, pipe_split, pipeline
from torch.distributed.pipelining import schedules as torchs

from zbpp.torch_pipelining.doctor import doctor
from zbpp.torch_pipelining.engine import fallbacks, installed, run_step, use_plan
from zbpp.torch_pipelining.refusal import STEP

__all__ = [
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "build_stage",
    "doctor",
    "fallbacks",
    "get_schedule_class",
    "install",
    "on_zbpp",
    "pipe_split",
    "pipeline",
    "uninstall",
    "use_plan",
]


class _OnZbpp:
    """Runs the steps of a schedule of torch's on zbpp."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        run_step(self, super()._step_microbatches, *args, **kwargs)  # type: ignore[misc]  # of torch's class


class ScheduleGPipe(_OnZbpp, pipelining.ScheduleGPipe):
    """torch's ScheduleGPipe on zbpp."""


class Schedule1F1B(_OnZbpp, pipelining.Schedule1F1B):
    """torch's Schedule1F1B on zbpp."""


class ScheduleInterleaved1F1B(_OnZbpp, pipelining.ScheduleInterleaved1F1B):
    """torch's ScheduleInterleaved1F1B on zbpp."""


class ScheduleLoopedBFS(_OnZbpp, pipelining.ScheduleLoopedBFS):
    """torch's ScheduleLoopedBFS on zbpp."""


class ScheduleInterleavedZeroBubble(_OnZbpp, pipelining.ScheduleInterleavedZeroBubble):
    """torch's ScheduleInterleavedZeroBubble on zbpp."""


class ScheduleZBVZeroBubble(_OnZbpp, pipelining.ScheduleZBVZeroBubble):
    """torch's ScheduleZBVZeroBubble on zbpp."""


class ScheduleDualPipeV(_OnZbpp, pipelining.ScheduleDualPipeV):
    """torch's ScheduleDualPipeV on zbpp."""


Schedule = TypeVar("Schedule", bound=torchs._PipelineSchedule)


def on_zbpp(schedule: Schedule) -> Schedule:
    """Let this schedule object of torch's run its steps on zbpp from now on. Returns it."""
    kind = type(schedule)
    schedule.__class__ = type(kind.__name__, (kind,), {STEP: _on_zbpp(getattr(kind, STEP))})
    return schedule


def get_schedule_class(schedule_name: str) -> Any:
    """As torch's: the class of a name such as "1F1B", in any case. Raises ValueError for an unknown name."""
    theirs = torchs.get_schedule_class(schedule_name)
    return globals().get(theirs.__name__, theirs)


def __getattr__(name: str) -> Any:
    """torch's other names: a newer torch has more."""
    if name in pipelining.__all__:
        return getattr(pipelining, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install() -> None:
    """Let torch's own Schedule classes, and all that are derived from them, run their steps on zbpp."""
    for theirs in (
        torchs._ScheduleForwardOnly,
        torchs.ScheduleGPipe,
        torchs.Schedule1F1B,
        torchs.PipelineScheduleMulti,
        torchs._PipelineScheduleRuntime,
    ):
        if theirs not in installed:
            installed[theirs] = vars(theirs)[STEP]
            setattr(theirs, STEP, _on_zbpp(installed[theirs]))


def uninstall() -> None:
    """Give torch's classes their own method back."""
    while installed:
        theirs, method = installed.popitem()
        setattr(theirs, STEP, method)


def _on_zbpp(method: Any) -> Any:
    def _step_microbatches(self: Any, *args: Any, **kwargs: Any) -> None:
        run_step(self, lambda *given, **named: method(self, *given, **named), *args, **kwargs)

    return _step_microbatches
