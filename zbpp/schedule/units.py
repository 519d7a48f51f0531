"""Units: what goes through the pipeline in one piece, a microbatch or a slice of one.

The sequences of a microbatch may be cut along time into num_slices slices, which go through the pipeline one
after the other. A UNIT is slice k of microbatch m, and has the number m * num_slices + k; without slices the
units are the microbatches. On each stage F's ascend in units. B's and W's ascend in microbatch and descend in
slice, since B of a slice needs what B's of later slices make (dataflow.py). With two slices:

    0F0.0 0F0.1 0F1.0 0B0.1 0W0.1 0F1.1 0B0.0 0W0.0 0B1.1 0W1.1 0B1.0 0W1.0
    1F0.0 1F0.1 1B0.1 1W0.1 1F1.0 1B0.0 1W0.0 1F1.1 1B1.1 1W1.1 1B1.0 1W1.0
"""

from __future__ import annotations

from typing import Self


class Unit(int):
    """A slice of a microbatch: the number microbatch * num_slices + slice; as text `5.3`."""

    num_slices: int

    def __new__(cls, number: int, num_slices: int) -> Self:
        unit = super().__new__(cls, number)
        unit.num_slices = num_slices
        return unit

    def __reduce__(self) -> tuple[type[Unit], tuple[int, int]]:
        return Unit, (int(self), self.num_slices)

    @property
    def microbatch(self) -> int:
        return int(self) // self.num_slices

    @property
    def slice(self) -> int:
        return int(self) % self.num_slices

    def __str__(self) -> str:
        return f"{self.microbatch}.{self.slice}"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        """As the text, but for the codes of numbers: f"{unit:d}" is the number."""
        return format(int(self) if spec[-1:] in {*"bcdeEfFgGnoxX%"} else str(self), spec)


def unit_of(number: int, num_slices: int) -> int:
    """The unit with this number, as Actions and Values have it: without slices an int, with slices a Unit."""
    return number if num_slices == 1 else Unit(number, num_slices)
