"""What the actions of a row cost, as arrays: the costs of their stages for their units' lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.schedule.costs import StageCosts
from zbpp.schedule.dataflow_arrays import changes_of_past, kinds_of
from zbpp.schedule.interpret.exchange import hide_in_exchanges
from zbpp.schedule.links import Outbox
from zbpp.schedule.timetable import Op, Row

Floats = npt.NDArray[np.float64]

_NOTHING = np.zeros(0)
_NO_QUEUE = -1


class RowTimes(NamedTuple):
    """For each action of a row, in ms: how long it takes at its place, and how long its message takes.

    exposed: how much of the action is exposed exchange (interpret/exchange.py); empty without exchanges.
    busy: how long its message occupies the link before that; empty where no link is occupied.
    queues: in which it waits for that; empty where no link is occupied.
    """

    durations: Floats
    delays: Floats
    exposed: Floats
    busy: Floats = _NOTHING
    queues: npt.NDArray[np.int64] = _NOTHING.astype(np.int64)

    def outbox(self) -> Outbox | None:
        """The links that a run of the row occupies; None if it occupies none."""
        return Outbox(self.busy.tolist(), self.queues.tolist()) if len(self.busy) else None


class RowCosts:
    """The arrays over all stages, made once: a rank alone would take as long for them as there are stages."""

    def __init__(self, costs: StageCosts) -> None:
        self._durations, self._comm = by_kind(costs.duration), np.array(costs.comm)
        self._links = _Links(costs) if costs.routes else None
        self._memory, self._static = by_kind(costs.memory), np.array(costs.static)
        self._past = _Past(costs) if any([*costs.past, *costs.past_gradients]) else None
        self._exchange = np.array(costs.exchange)
        self._quadratic = by_kind(costs.quadratic) if costs.quadratic else None
        self._lengths = np.array(costs.lengths) if costs.lengths else None
        self._squares = np.array(costs.squares)
        self.has_exchange = any(costs.exchange)

    def times(self, row: Row) -> RowTimes:
        """How long the actions of a row take."""
        durations, exposed = self.durations(row), np.zeros(0)
        if self.has_exchange:
            durations, exposed = hide_in_exchanges(row, durations, self.exchange(row))
        delays = self._scaled(self._comm[row.stages], row)
        if self._links is None:
            return RowTimes(durations, delays, exposed)
        kinds = kinds_of(row)
        latency, queues = self._links.latency[kinds], self._links.queue[kinds]
        if self._lengths is not None:  # of an empty unit nothing is sent
            is_empty = self._lengths[row.microbatches] == 0
            latency[is_empty], queues[is_empty] = 0.0, _NO_QUEUE
        delays = delays + latency
        if not self._links.busy.any():
            return RowTimes(durations, delays, exposed)
        busy = self._scaled(self._links.busy[kinds], row)
        return RowTimes(durations, delays, exposed, busy, queues)

    def exchange(self, row: Row) -> Floats:
        """How long (ms) tokens are exchanged inside each F, B and BW; for a W, inside its stage's F."""
        return self._scaled(self._exchange[row.stages], row)

    def peak_memory(self, row: Row, inserted: Mapping[int, Sequence[float]] | None = None) -> float:
        """The most that the row's rank holds, after any action and all the time.

        inserted: {position in the row: changes of what the rank holds, before the action there}.
        """
        changes = self.memory(row)
        if inserted:
            places = [place for place, each in inserted.items() for _ in each]
            changes = np.insert(changes, places, [change for each in inserted.values() for change in each])
        static = sum(self._static[np.unique(row.stages)].tolist())
        return float(np.cumsum(changes).max()) + float(static)

    def memory(self, row: Row) -> Floats:
        """What each action adds to the memory that its rank holds; negative where it frees memory."""
        changes = self._scaled(self._memory[kinds_of(row)], row)
        return changes if self._past is None else changes + self._past.changes(row)

    def durations(self, row: Row) -> Floats:
        """How long (ms) each action takes, of a W that runs in no exchange."""
        kinds = kinds_of(row)
        linear = self._scaled(self._durations[kinds], row)
        if self._quadratic is None or self._lengths is None:
            return linear
        whole: Floats = linear + self._quadratic[kinds] * self._squares[row.microbatches]
        return whole

    def _scaled(self, own: Floats, row: Row) -> Floats:
        return own if self._lengths is None else own * self._lengths[row.microbatches]


class _Links:
    """By kind: what its message takes of the link that it goes over; 0 for a kind that sends nothing."""

    def __init__(self, costs: StageCosts) -> None:
        self.latency = np.array([route.latency if route else 0.0 for route in costs.routes])
        self.busy = np.array([route.busy if route else 0.0 for route in costs.routes])
        self.queue = np.array([route.queue if route else _NO_QUEUE for route in costs.routes])


def messages_by_kind(costs: StageCosts) -> tuple[Floats, Floats]:
    """How long (ms) the message of each kind takes whatever its length, and how much longer at length 1.

    Where no other message occupies its link, and of a unit that is not empty.
    """
    per_length = np.repeat(costs.comm, len(Op))
    if not costs.routes:
        return np.zeros(len(per_length)), per_length
    links = _Links(costs)
    return links.latency, per_length + links.busy


class _Past:
    """What a whole microbatch holds while some of its slices have run."""

    def __init__(self, costs: StageCosts) -> None:
        self._keys_and_values, self._grads = np.array(costs.past), np.array(costs.past_gradients)
        self._num_slices = costs.num_slices
        self._lengths = np.array(costs.lengths).reshape(-1, costs.num_slices).sum(axis=1)  # of microbatches

    def changes(self, row: Row) -> Floats:
        microbatches, slices = np.divmod(row.microbatches, self._num_slices)
        past, grads = changes_of_past(row.ops, slices, self._num_slices)
        held = self._keys_and_values[row.stages] * past + self._grads[row.stages] * grads
        changes: Floats = held * self._lengths[microbatches]
        return changes


def by_kind(per_stage: Mapping[Op, Sequence[float]]) -> Floats:
    """The numbers of each op on each stage as one array, by `kinds_of`."""
    numbers: Floats = np.array([per_stage[op] for op in Op]).T.ravel()
    return numbers
