"""Traces keep to Chrome's Trace Event Format, as its document states it and Perfetto reads it.

Written down here a second time: each phase's required fields, the metadata events, times in microseconds.
"""

import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from zbpp.planning import SCHEDULES, plan
from zbpp.render import chrome_trace
from zbpp.schedule import Costs, Links, Op, simulate

# phase -> what every event of it has, beside ph, name, pid and tid
REQUIRED = {
    "B": {"ts"}, "E": {"ts"}, "X": {"ts", "dur"}, "i": {"ts"}, "I": {"ts"}, "C": {"ts", "args"},
    "b": {"ts", "id", "cat"}, "n": {"ts", "id", "cat"}, "e": {"ts", "id", "cat"},
    "s": {"ts", "id", "cat"}, "t": {"ts", "id", "cat"}, "f": {"ts", "id", "cat"}, "M": {"args"},
}  # fmt: skip
METADATA = {
    "process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index",
    "thread_name": "name", "thread_sort_index": "sort_index",
}  # fmt: skip
NANOSECOND = 1e-3  # in microseconds: what a viewer resolves


def faults(trace):
    """What a viewer could stumble over, in words."""
    found = [] if trace.get("displayTimeUnit", "ms") in ("ms", "ns") else ["displayTimeUnit is ms or ns"]
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        found += [f"{what}: {event}" for what in faults_of(event)]
        if event.get("ph") == "X":
            tracks[event.get("pid"), event.get("tid")].append((event.get("ts", 0), event.get("dur", 0)))
    for track, slices in tracks.items():
        for (start, duration), (later, _) in pairwise(slices):
            if later < start:
                found.append(f"times descend on {track}: {start}, {later}")
            elif later < start + duration - NANOSECOND:
                found.append(f"slices overlap on {track}: {start} + {duration}, {later}")
    return found


def faults_of(event):
    if event.get("ph") not in REQUIRED:
        return ["no phase"]
    found = [f"no {field}" for field in {"name", "pid", "tid", *REQUIRED[event["ph"]]} - event.keys()]
    found += [f"{field} is no integer" for field in ("pid", "tid") if type(event.get(field)) is not int]
    found += [f"{field} is no text" for field in ("name", "cat") if not isinstance(event.get(field, ""), str)]
    found += [f"{field} is no time" for field in ("ts", "dur") if not is_time(event.get(field, 0))]
    if not isinstance(event.get("args", {}), dict):
        return [*found, "args is no object"]
    if event["ph"] == "M" and METADATA.get(event.get("name")) not in event.get("args", {}):
        found.append("no metadata that is known")
    return found


def is_time(value):
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def read(trace):
    """As a viewer gets it: by way of JSON, which knows no NaN."""
    return json.loads(json.dumps(trace, allow_nan=False))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_trace_of_every_schedule_is_valid(name):
    costs = Costs(f=18.5, b=18.1, w=9.3, comm=0.6, reduce=31.7)
    timeline = simulate(plan(name, 3, 6, costs=costs, time_limit=0.3), costs)
    trace = read(chrome_trace({"predicted": timeline, "measured": timeline}))
    assert faults(trace) == []
    slices = [event for event in trace["traceEvents"] if event.get("cat") in set(Op.__members__)]
    assert len(slices) == 2 * sum(len(row) for row in timeline.timetable.rows)
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1000 * timeline.makespan)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_the_trace_of_links_is_valid(name):
    costs = Costs(f=18.5, b=18.1, w=9.3, links=Links(3.0, 7.0, {(0, 1): (30.0, 25.0)}))
    timeline = simulate(plan(name, 3, 6), costs)
    trace = read(chrome_trace({"one": timeline, "two": timeline}, {"one": costs}))
    assert faults(trace) == []
    assert {event["pid"] for event in trace["traceEvents"] if event.get("cat") == "link"} == {0, 1, 2}


def test_the_trace_of_a_clock_that_begins_anywhere_is_valid():
    timeline = simulate(plan("zb_v", 2, 5), Costs(f=1e-3, b=0, w=0.1))
    moved = {
        "starts": tuple(start + 1.7e9 for start in timeline.starts),
        "ends": tuple(end + 1.7e9 for end in timeline.ends),
    }
    assert faults(read(chrome_trace({"a": replace(timeline, **moved)}))) == []
