"""Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zbpp.schedule.render.titled import Timelines, beginning, titled
from zbpp.schedule.simulate import Timeline

Event = dict[str, Any]


def chrome_trace(timelines: Timelines) -> dict[str, Any]:
    """The JSON object of a trace: one process per rank, one slice per action, times in microseconds.

    Each timeline begins at 0. The first one's process ids are its ranks; each further one's
    follow on, so that every title has its own group of processes.
    """
    events: list[Event] = []
    first_id = 0
    for title, timeline in titled(timelines):
        for rank in range(timeline.timetable.num_ranks):
            events += _names(first_id + rank, f"{title} rank {rank}")
            events += _slices(timeline, rank, first_id + rank)
        first_id += timeline.timetable.num_ranks
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, name: str) -> Iterator[Event]:
    about = {"process_name": {"name": name}, "process_sort_index": {"sort_index": process}}
    about["thread_name"] = {"name": "actions"}
    for kind, args in about.items():
        yield {"ph": "M", "name": kind, "pid": process, "tid": 0, "args": args}


def _slices(timeline: Timeline, rank: int, process: int) -> Iterator[Event]:
    first = beginning(timeline)
    spans = zip(
        timeline.timetable.rows[rank],
        (1e3 * (timeline.starts[rank] - first)).tolist(),
        (1e3 * (timeline.ends[rank] - timeline.starts[rank])).tolist(),
        strict=True,
    )
    for action, start, duration in spans:
        args = {"stage": action.stage, "op": action.op.name, "microbatch": action.microbatch}
        event = {"ph": "X", "name": str(action), "cat": action.op.name, "args": args}
        yield {**event, "pid": process, "tid": 0, "ts": start, "dur": duration}
