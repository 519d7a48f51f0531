"""Offload of activations, as instructions of a program: which values leave the device, and when.

A ROUND TRIP copies saved(s,m), what F keeps for B, to host memory after F, and back before B. A round trip is
four instructions. A rank has one copy stream; c is the time of one copy on it:

    F ... Offload ... Drop .................... Fetch ... Await B
          [---- c ----]                         [- c -]
          on the device       away              on the device again

Offload and Fetch start a copy. Drop and Await wait for the end of a copy; Drop then frees the device memory.

offload_choice.py chooses by costs which values leave, and places the instructions; copy_times.py says how
long the copies take.
"""

from __future__ import annotations

from typing import NamedTuple

from zbpp.schedule.dataflow import Value


class Offload(NamedTuple):
    """Start to copy a value out of device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Offload {self.value}"


class Drop(NamedTuple):
    """Wait until a value has been copied out, then free its device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Drop {self.value}"


class Fetch(NamedTuple):
    """Start to copy a value back into device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Fetch {self.value}"


class Await(NamedTuple):
    """Wait until a value is back in device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Await {self.value}"


Transport = Offload | Drop | Fetch | Await


class Placed(NamedTuple):
    """An instruction and its place between two actions of its rank's row.

    before: the position of the action after the instruction. at_once: whether the rank executes the
    instruction directly after the previous action, or directly before the action at `before`. Between these
    two places the rank may wait for a message.
    """

    before: int
    at_once: bool
    instruction: Transport


RankOffload = tuple[Placed, ...]
"""The instructions of one rank's round trips, in the order in which the rank executes them."""
