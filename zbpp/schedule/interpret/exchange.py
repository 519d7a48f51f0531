"""Exchanges of mixture-of-experts layers, and the W's that a rank computes meanwhile.

A mixture-of-experts layer sends its tokens to other processes and gets them back (all-to-all), in F and in B.
F and B have nothing to compute during such an exchange. But the rank may have W's, which need no exchange.

**The law.** A W is pending from the end of its B to its place in the row. During an exchange its rank runs
pending W's, first the one with the earliest place. At its place only what is left of a W takes time, so its
place is its deadline. A W that stands later in the row can be hidden in more exchanges:

    f = b = 15 ms, 5 of them exchange; w = 10 ms    ms of W1, W2, W3 at their places
    F1 B1 W1 F2 B2 W2 F3 B3 W3                      10  10  10    none is pending in an exchange
    F1 B1 F2 B2 W1 F3 B3 W2 W3                       0   0  10    W1 runs in F2 and B2, W2 in F3 and B3

The exchange takes its whole time in any case. So what is hidden depends on the order of the rank's row alone,
not on when its actions run. BW counts as B followed at once by its W: its own W is never pending.

Memory counts a W's `deferred` until the W's place, though its work may be done earlier.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from zbpp.schedule.timetable import Op, Row

Floats = npt.NDArray[np.float64]


def hide_in_exchanges(row: Row, durations: Floats, exchange: Floats) -> tuple[Floats, Floats]:
    """For each action of a row: how long it takes at its place, and how much of this is exposed exchange.

    durations: of the actions with whole W's. exchange: for each action, the time of exchange inside it if it
    is an F, a B or a BW. All in ms.
    """
    left, exposed, inside = durations.tolist(), [0.0] * len(row), exchange.tolist()
    stages, ops, microbatches = row.stages.tolist(), row.ops.tolist(), row.microbatches.tolist()
    place_of_w = {
        (stage, microbatch): place
        for place, (stage, op, microbatch) in enumerate(zip(stages, ops, microbatches, strict=True))
        if op == Op.W
    }
    pending: list[int] = []  # the places of the pending W's, as a heap
    for position, (stage, op) in enumerate(zip(stages, ops, strict=True)):
        if op == Op.W:
            if pending and pending[0] == position:
                heappop(pending)
            continue
        idle = inside[position]
        while idle > 0 and pending:
            hidden = min(idle, left[pending[0]])
            left[pending[0]] -= hidden
            idle -= hidden
            if left[pending[0]] == 0:
                heappop(pending)
        exposed[position] = idle
        if op == Op.B:
            heappush(pending, place_of_w[stage, microbatches[position]])
    return np.array(left), np.array(exposed)
