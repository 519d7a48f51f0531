"""The bytes that one microbatch takes on a stage."""

from __future__ import annotations

from dataclasses import dataclass

from zbpp.schedule.timetable import Op


@dataclass(frozen=True, kw_only=True)
class MicrobatchBytes:
    """The bytes that one microbatch takes on a stage, in the order in which F, B and W need them.

    saved, deferred: held between F and B, and between B and W; messages are not counted.
    x, g: the received input, and the received gradient of the output. x_until, g_until: the op after which
        nothing refers to x, or g, any more.
    sent_x, sent_g: the output, and the gradient of the input, without storages that the stage itself keeps.
    rises: for each Op, the most bytes while it runs, above the level before it.
    """

    saved: float = 0.0
    deferred: float = 0.0
    x: float = 0.0
    g: float = 0.0
    sent_x: float = 0.0
    sent_g: float = 0.0
    x_until: Op = Op.B
    g_until: Op = Op.B
    rises: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # by Op
