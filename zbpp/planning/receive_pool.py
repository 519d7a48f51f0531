"""The bytes of a rank's receive buffers: of each kind, as many as are in use at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zbpp.planning.stage_bytes import StageBytes
from zbpp.schedule.dataflow import Value
from zbpp.schedule.lower import Program, Recv
from zbpp.schedule.timetable import Action, Op


def pool_bytes(program: Program, stages: Sequence[StageBytes]) -> float:
    """The bytes of the receive buffers of a program.

    A buffer is in use from when its receive is posted, which is ahead of the message, until the last action
    that reads the message.
    """
    waiting = {peer: iter(values) for peer, values in _received(program).items()}
    in_use, most = Counter[tuple[str, float]](), Counter[tuple[str, float]]()
    ends: dict[tuple[int, int, Op], list[tuple[str, float]]] = {}

    def post(peer: int) -> None:
        value = next(waiting[peer], None)
        if value is None:
            return
        own = stages[value.stage]
        kind = (value.name, own.x if value.name == "x" else own.g)
        in_use[kind] += 1
        most[kind] = max(most[kind], in_use[kind])
        until = own.x_until if value.name == "x" else own.g_until
        ends.setdefault((value.stage, value.microbatch, until), []).append(kind)

    for peer in waiting:
        for _ in range(max(program.in_flight[peer], 1)):
            post(peer)
    for instruction in program.instructions:
        match instruction:
            case Recv(_, peer):
                post(peer)
            case Action(stage, op, microbatch):
                for ended in (Op.B, Op.W) if op == Op.BW else (op,):
                    in_use.subtract(ends.pop((stage, microbatch, ended), []))
    return sum(size * count for (_, size), count in most.items())


def _received(program: Program) -> dict[int, list[Value]]:
    found: dict[int, list[Value]] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Recv):
            found.setdefault(instruction.peer, []).append(instruction.value)
    return found
