"""Part kernels: what an action launches, by torch.profiler, and the host's time for it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__

from zbpp.benchmark.gpu.rows import Row
from zbpp.benchmark.gpu.settings import Settings
from zbpp.benchmark.gpu.workload import llama, stages_of, tokens
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.measure import ProfilerNames, Recorder, StepRecord
from zbpp.runtime.measure.memory import _silence

_NUM_MICROBATCHES = 4
_ACTION = re.compile(r"\d+(F|BW|B|W)\d+")


def rows(settings: Settings) -> Iterator[Row]:
    """Per kind of action, the medians over microbatches."""
    hidden, num_layers = (32, 1) if settings.is_small else (1024, 4)
    launches = "kernels" if settings.is_cuda else "operators"
    yield Row(f"a stage of {num_layers} Llama layers of hidden {hidden}, {settings.dtype}, eager")
    for schedule in ("zb_h1", "gpipe"):
        pipeline, x, target = _pipeline(schedule, hidden, num_layers, settings)
        with pipeline:
            for _ in range(3):
                pipeline.step(x, target=target)
            host = _host_times(pipeline, x, target, settings)
            counts = _counts(pipeline, x, target, settings)
        for op in [op for op in ("F", "B", "W", "BW") if op in host and (schedule == "zb_h1" or op == "BW")]:
            yield Row(
                f"{op} under {schedule}",
                {launches: median(counts.get(op) or [0]), "host us": 1e3 * median(host[op])},
                form=".0f",
            )


def _pipeline(
    schedule: str, hidden: int, num_layers: int, settings: Settings
) -> tuple[Pipeline, Tensor, Tensor]:
    model, timetable = llama(num_layers, hidden, settings), plan(schedule, 1, _NUM_MICROBATCHES)
    pipeline = Pipeline(stages_of(model, timetable, settings), timetable, model.loss)
    drawn = tokens(_NUM_MICROBATCHES, settings)
    return pipeline, drawn[:, :-1], drawn[:, 1:]


def _host_times(pipeline: Pipeline, x: Tensor, target: Tensor, settings: Settings) -> dict[str, list[float]]:
    """{op: ms in which the host did each action of a step}: the host's clock, whatever the device."""
    record = StepRecord(torch.device("cpu"))
    settings.synchronize()
    with pipeline.using(Recorder(record)):
        pipeline.step(x, target=target)
    settings.synchronize()
    found = defaultdict(list)
    for action, (begin, end) in zip(pipeline.timetable.rows[0], record.times().tolist(), strict=True):
        found[action.op.name].append(end - begin)
    return found


def _counts(pipeline: Pipeline, x: Tensor, target: Tensor, settings: Settings) -> dict[str, list[int]]:
    """{op: what each action of a step launched}."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if settings.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with pipeline.using(ProfilerNames()):
        pipeline.step(x, target=target)
        settings.synchronize()
        profiler = torch.profiler.profile(activities=activities, acc_events=True)
        with _silence():
            profiler.start()
        pipeline.step(x, target=target)
        settings.synchronize()
        with _silence():
            profiler.stop()
    events = [each for each in profiler.events() or [] if each.device_type == DeviceType.CPU]
    return counted(events, on_device=settings.is_cuda)


def counted(events: Sequence[Any], *, on_device: bool) -> dict[str, list[int]]:
    """{op: per action, the launches in its range of time}.

    Time decides, not the thread: on a GPU, autograd runs B in a thread of its own. events: of the profiler,
    on the host. on_device: count the launches of kernels, else the operators that call no other one.
    """
    ranges = sorted(
        (each.time_range.start, each.time_range.end, match[1])
        for each in events
        if (match := _ACTION.fullmatch(each.name))
    )
    starts, numbers = [begin for begin, _, _ in ranges], [0] * len(ranges)
    for each in events:
        is_leaf = each.name.startswith("aten::") and not each.cpu_children
        is_launch = "Launch" in each.name if on_device else is_leaf
        place = bisect_right(starts, each.time_range.start) - 1
        if is_launch and place >= 0 and each.time_range.start <= ranges[place][1]:
            numbers[place] += 1
    found = defaultdict(list)
    for (_, _, op), number in zip(ranges, numbers, strict=True):
        found[op].append(number)
    return found
