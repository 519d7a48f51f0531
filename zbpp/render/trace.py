"""Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zbpp.render.style import Timelines, costs_by_title, first_start, panels_of
from zbpp.schedule.costs import Costs
from zbpp.schedule.interpret.transmissions import transmissions
from zbpp.schedule.program import Reduce
from zbpp.schedule.timeline import Timeline, Transfer, transfers_of
from zbpp.schedule.units import Unit

Event = dict[str, Any]


def chrome_trace(timelines: Timelines, costs: Costs | Mapping[str, Costs] | None = None) -> dict[str, Any]:
    """The JSON object of a trace: one process per rank, one slice per action, times in microseconds.

    Beside its actions a rank has two lanes for every rank that it exchanges messages with: one for the
    messages that it sends, one for those that it receives. The slice of a message begins when the message is
    sent, or when the message before it on the link arrives if that is later; it ends when it arrives. A rank
    that reduces gradients has one more lane, with a slice per stage; so has a rank that offloads, with a
    slice per copy: "Offload saved(0,3)" out of the device, "Fetch saved(0,3)" back. Where experts exchange
    tokens, an action's arguments say how much of it is exposed exchange.

    costs: what the timelines were simulated with, one for all or one for each title. If these have links, the
    sender has one more lane for each of its links on which messages take time: a slice is the time for which
    a message occupies the link, and its argument arrives_ms says when the receiver has it.

    Each timeline begins at 0. The process ids of the first timeline are its ranks; those of the next
    timelines follow on, so that every title has its own group of processes.
    """
    events: list[Event] = []
    panels = panels_of(timelines)
    first_id = 0
    own = costs_by_title(panels, costs)
    for title, timeline in panels:
        for rank in range(timeline.timetable.num_ranks):
            events += _names(first_id + rank, f"{title} rank {rank}")
            events += _slices(timeline, rank, first_id + rank)
        events += _messages(timeline, first_id)
        events += _links(timeline, own[title], first_id)
        events += _reductions(timeline, first_id)
        events += _copies(timeline, first_id)
        first_id += timeline.timetable.num_ranks
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, name: str) -> Iterator[Event]:
    about = {"process_name": {"name": name}, "process_sort_index": {"sort_index": process}}
    for kind, args in about.items():
        yield {"ph": "M", "name": kind, "pid": process, "tid": 0, "args": args}
    yield _lane(process, 0, "actions")


def _lane(process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _slices(timeline: Timeline, rank: int, process: int) -> Iterator[Event]:
    first = first_start(timeline)
    spans = zip(
        timeline.timetable.rows[rank],
        (1e3 * (timeline.starts[rank] - first)).tolist(),
        (1e3 * (timeline.ends[rank] - timeline.starts[rank])).tolist(),
        strict=True,
    )
    exposed = timeline.exposed[rank].tolist() if timeline.exposed else []
    for position, (action, start, duration) in enumerate(spans):
        args = {"stage": action.stage, "op": action.op.name, **_unit(action.microbatch)}
        if exposed:
            args["exposed_exchange_ms"] = exposed[position]
        event = {"ph": "X", "name": str(action), "cat": action.op.name, "args": args}
        yield {**event, "pid": process, "tid": 0, "ts": start, "dur": duration}


def _unit(unit: int) -> dict[str, int]:
    if isinstance(unit, Unit):
        return {"microbatch": unit.microbatch, "slice": unit.slice}
    return {"microbatch": unit}


def _messages(timeline: Timeline, first_id: int) -> Iterator[Event]:
    """The messages of every link, twice: in a lane of the sender and in a lane of the receiver."""
    links: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in transfers_of(timeline):
        links.setdefault((transfer.sender, transfer.receiver), []).append(transfer)
    first = first_start(timeline)
    for (sender, receiver), transfers in sorted(links.items()):
        for rank, name, kind in ((sender, f"send to {receiver}", 1), (receiver, f"receive from {sender}", 2)):
            thread = 2 * (sender + receiver - rank) + kind
            yield _lane(first_id + rank, thread, name)
            for event in _message_slices(transfers, first):
                yield {**event, "cat": name.split()[0], "pid": first_id + rank, "tid": thread}


def _message_slices(transfers: list[Transfer], first: float) -> Iterator[Event]:
    free = 0.0  # a link delivers in order: a message waits until the one before it has arrived
    for value, _, _, sent, arrived in transfers:
        start = max(free, 1e3 * (sent - first))
        free = max(start, 1e3 * (arrived - first))
        args = {"stage": value.stage, **_unit(value.microbatch)}
        yield {"ph": "X", "name": str(value), "args": args, "ts": start, "dur": free - start}


def _links(timeline: Timeline, costs: Costs | None, first_id: int) -> Iterator[Event]:
    """One lane per link that messages occupy, on its sender, after the lane of its copies."""
    first = first_start(timeline)
    for (sender, receiver), messages in transmissions(timeline, costs).items():
        where = {"pid": first_id + sender, "tid": 2 * timeline.timetable.num_ranks + 3 + receiver}
        yield _lane(where["pid"], where["tid"], f"link to {receiver}")
        for value, start, gone, arrived in messages:
            args = {"stage": value.stage, **_unit(value.microbatch), "arrives_ms": arrived - first}
            about = {"ph": "X", "name": str(value), "cat": "link", "args": args}
            yield {**about, **where, "ts": 1e3 * (start - first), "dur": 1e3 * (gone - start)}


def _reductions(timeline: Timeline, first_id: int) -> Iterator[Event]:
    """One lane on each rank that reduces, after the lanes of its messages."""
    first, thread = first_start(timeline), 2 * timeline.timetable.num_ranks + 1
    for rank in sorted({each.rank for each in timeline.reductions}):
        yield _lane(first_id + rank, thread, "reductions")
    for stage, rank, start, end in timeline.reductions:
        about = {"ph": "X", "name": str(Reduce(stage)), "cat": "reduce", "args": {"stage": stage}}
        times = {"ts": 1e3 * (start - first), "dur": 1e3 * (end - start)}
        yield {**about, "pid": first_id + rank, "tid": thread, **times}


def _copies(timeline: Timeline, first_id: int) -> Iterator[Event]:
    """One lane on each rank that offloads, after the lane of its reductions."""
    first, thread = first_start(timeline), 2 * timeline.timetable.num_ranks + 2
    for rank in sorted({each.rank for each in timeline.copies}):
        yield _lane(first_id + rank, thread, "offload")
    for value, rank, is_out, start, end in timeline.copies:
        kind = "offload" if is_out else "fetch"
        args = {"stage": value.stage, **_unit(value.microbatch), "value": value.name}
        about = {"ph": "X", "name": f"{kind.capitalize()} {value}", "cat": kind, "args": args}
        yield {
            **about,
            "pid": first_id + rank,
            "tid": thread,
            "ts": 1e3 * (start - first),
            "dur": 1e3 * (end - start),
        }
