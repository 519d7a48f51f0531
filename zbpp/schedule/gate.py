"""How far each rank runs into a step before it waits for the norm of all gradients: up to its gate.

With post-validation a rank updates its weights before it knows the norm of all gradients. It begins the next
step with the new weights, and stops at its gate until it knows the norm. If the norm shows that the update
was wrong, all that ran before the gates is dropped and runs again. So only F's run before a gate, and before
its gate a rank receives no message that another rank sends behind that rank's own gate:

    rank 0   0F0 0F1 0F2 | 0B0 0F3 ...
    rank 1   1F0 1F1 | 1B0 1F2 ...       the gate stands before the rank's first B
    rank 2   2F0 | 2B0 2F1 ...

Each gate is as late as these two rules allow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.timetable import Op, Row, Timetable


class Gate(NamedTuple):
    """One rank's gate.

    position: the position of the first action behind the gate, in the rank's row; the row's length if no
        action follows.
    sent: {sender: the number of messages that the sender sends to this rank before the sender's gate}.
    dropped: one sender for each message that is sent before the sender's gate, and received behind this
        rank's gate. A rank that begins the step again first receives and drops these messages, in this order.
    """

    position: int
    sent: dict[int, int]
    dropped: tuple[int, ...]

    def __hash__(self) -> int:
        return hash((self.position, self.dropped))


def gate_positions(timetable: Timetable) -> tuple[int, ...]:
    """For each rank the number of actions before its gate."""
    values = Values.of(timetable)
    maker, made_at = np.zeros(len(values), dtype=np.int64), np.zeros(len(values), dtype=np.int64)
    for rank, row in enumerate(timetable.rows):
        positions, made = values.produced_in(row)
        maker[made], made_at[made] = rank, positions
    gates = np.array([_num_leading_forwards(row) for row in timetable.rows])
    consumed = [values.consumed_in(row[:gate]) for row, gate in zip(timetable.rows, gates, strict=True)]
    is_settled = False
    while not is_settled:
        is_settled = True
        for rank, (used_at, used) in enumerate(consumed):
            # An F that consumes a message from behind a gate has to stand behind its own rank's gate.
            late = used_at[made_at[used] >= gates[maker[used]]]
            if len(late) and late[0] < gates[rank]:
                gates[rank], is_settled = late[0], False
    return tuple(gates.tolist())


def _num_leading_forwards(row: Row) -> int:
    others = np.flatnonzero(row.ops != Op.F)
    return int(others[0]) if len(others) else len(row)
