"""How far each rank may run into a step before it knows that the weights of all ranks are right.

With post-validation a rank updates its weights before it knows the norm of all gradients. It begins the next
step with them, and stops at its gate until it knows. So that nothing is lost if the update has to be done
again, only F's run before a gate, and no rank receives anything there that was sent behind another gate:

    rank 0   0F0 0F1 0F2 | 0B0 0F3 ...
    rank 1   1F0 1F1 | 1B0 1F2 ...            1F2 stands behind a B
    rank 2   2F0 | 2B0 2F1 ...

The gates are as late as they can be.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.timetable import Op, Row, Timetable


class Gate(NamedTuple):
    """One rank's gate.

    position: of the first action behind it, in the rank's row; the row's length if there is none.
    sent: {sender: how many messages it sends here before its own gate}.
    dropped: the senders of those of them that this rank receives behind its gate, in the order in which it
    has to receive them if it begins the step again.
    """

    position: int
    sent: dict[int, int]
    dropped: tuple[int, ...]


def gate_positions(timetable: Timetable) -> tuple[int, ...]:
    """For each rank the number of actions before its gate."""
    values = Values(timetable.num_stages, timetable.num_microbatches)
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
            # An F waits here for a message that is sent behind a gate: then it stands behind a gate, too.
            late = used_at[made_at[used] >= gates[maker[used]]]
            if len(late) and late[0] < gates[rank]:
                gates[rank], is_settled = late[0], False
    return tuple(gates.tolist())


def _num_leading_forwards(row: Row) -> int:
    others = np.flatnonzero(row.ops != Op.F)
    return int(others[0]) if len(others) else len(row)
