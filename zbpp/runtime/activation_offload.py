"""The options of the offload of activations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zbpp.autograd.copies import Copier
from zbpp.autograd.offload import LEAST_BYTES
from zbpp.schedule import Costs, Value

_GIB = 2**30


@dataclass(frozen=True)
class ActivationOffload:
    """Which activations leave device memory between F and B, and between B and W.

    gib: "auto": those that can leave and come back without making an action late. A number: at most so many
        GiB of a rank are away at a time, and actions may wait for the copies.
    to: "host" (pinned memory if the device is a GPU), a folder for an unnamed file, or a Copier of your own.
    costs: the costs to plan with, including `host` and memory in bytes; None: the first two steps measure
        them.
    values: exactly these leave, whatever gib and costs say. (stage, microbatch) stands for what F saves;
        Value("deferred", stage, microbatch) for what B keeps for W.
    least_bytes: storages below this size stay.
    """

    gib: float | Literal["auto"] = "auto"
    to: str | Path | Copier = "host"
    costs: Costs | None = None
    values: Iterable[tuple[int, int] | Value] | None = None
    least_bytes: int = LEAST_BYTES

    def __post_init__(self) -> None:
        if self.values is not None:  # a generator could be read only once
            object.__setattr__(self, "values", tuple(self.values))
        if not isinstance(self.to, Copier) and (not isinstance(self.to, str | Path) or self.to == ""):
            raise ValueError(f'to={self.to!r}: write "host", or the folder for a file')
        if isinstance(self.least_bytes, bool) or not isinstance(self.least_bytes, int):
            raise ValueError(
                f"least_bytes={self.least_bytes!r}: write a number of bytes, such as {LEAST_BYTES}"
            )
        if self.gib == "auto":
            return
        if isinstance(self.gib, bool) or not isinstance(self.gib, int | float) or not self.gib > 0:
            raise ValueError(
                f'gib={self.gib!r}: write "auto", or how many GiB may leave, above 0; offload=None for none'
            )

    @property
    def most_bytes(self) -> float:
        """The most bytes that may be away from a rank at a time."""
        return math.inf if self.gib == "auto" else float(self.gib) * _GIB

    @property
    def is_measured(self) -> bool:
        """Whether the first two steps are measured for the plan."""
        return self.costs is None and self.values is None
