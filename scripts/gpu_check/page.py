"""What a part of the check knows of its machine, and the rows that it writes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Rates(NamedTuple):
    """By the datasheet. flops: bfloat16 operations per s; memory, host: bytes per s of it, or to it."""

    flops: float
    memory: float
    host: float


# The first name that is in the device's name counts.
RATES = {
    "B200": Rates(2250e12, 8.0e12, 55e9),
    "H200": Rates(989e12, 4.8e12, 55e9),
    "H100 PCIe": Rates(756e12, 2.0e12, 55e9),
    "H100": Rates(989e12, 3.35e12, 55e9),
    "A100": Rates(312e12, 2.0e12, 25e9),
    "L40S": Rates(362e12, 0.86e12, 25e9),
    "cpu": Rates(5e10, 1e10, 1e10),  # for the small form, whose predictions say nothing
}
ROUNDED = 0.0017  # the error of numbers that were rounded to bfloat16 once, by its norm
UNKNOWN = Rates(float("nan"), float("nan"), float("nan"))


@dataclass(frozen=True)
class Here:
    """The device. is_small: a CPU does the sizes in seconds."""

    device: torch.device
    is_small: bool

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def compiler(self) -> str:
        """torch.compile's backend: Inductor needs Triton on a GPU, and is no part of the small form's CPU."""
        return "inductor" if self.is_cuda and importlib.util.find_spec("triton") else "eager"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def rates(self) -> Rates:
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else "cpu"
        return next((rates for key, rates in RATES.items() if key in name), UNKNOWN)

    def choose(self, usual: Any, small: Any) -> Any:
        """The usual size, or the one for the small form."""
        return small if self.is_small else usual

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def ms(self, *, flops: float = 0.0, nbytes: float = 0.0, host_bytes: float = 0.0) -> float:
        """The least time (ms) of so many operations and bytes, which overlap."""
        rates = self.rates
        return 1e3 * max(flops / rates.flops, nbytes / rates.memory, host_bytes / rates.host)


class Page:
    """Rows of one part, on standard output. num_failed: rows that failed."""

    def __init__(self, here: Here) -> None:
        self.here, self.num_failed = here, 0
        self._is_in_table = False

    def say(self, text: str) -> None:
        """A line between tables."""
        self._is_in_table = False
        print(f"\n{text}", flush=True)

    def figure(
        self,
        what: str,
        unit: str,
        measure: Callable[[], float],
        *,
        floor: float | None = None,
        why: str = "",
        most: float | None = None,
    ) -> float:
        """Write the prediction, measure, write the figure; returns it, NaN if measuring failed.

        floor: the prediction in the unit; why: where it comes from. most: the row fails above it.
        """
        predicted = "" if floor is None else f"{floor:.4g} {unit}"
        limit = "" if most is None else f"at most {most:.4g} {unit}"
        self._begin(what, ", ".join(each for each in (predicted, why, limit) if each))

        def found() -> str:
            value.append(float(measure()))
            is_met = most is None or value[0] <= most
            self.num_failed += not is_met
            ratio = f"{value[0] / floor:.2f} x" if floor else ""
            return f"{value[0]:.4g} {unit} | {ratio if is_met else 'MISSED'}"

        value: list[float] = []
        self._end(found)
        return value[0] if value else float("nan")

    def check(self, what: str, measure: Callable[[], Any], expected: Any = 0) -> None:
        """A row whose value must be the expected one."""
        self._begin(what, f"{expected}")

        def found() -> str:
            value = measure()
            self.num_failed += value != expected
            return f"{value} | {'ok' if value == expected else 'FAILED'}"

        self._end(found)

    def note(self, what: str, predicted: str, measure: Callable[[], Any]) -> Any:
        """A row of text that no limit is known for; returns what was measured, None if that failed."""
        self._begin(what, predicted)
        value: list[Any] = []

        def found() -> str:
            value.append(measure())
            return f"{value[0]} |"

        self._end(found)
        return value[0] if value else None

    def skip(self, what: str, reason: str) -> None:
        self._begin(what, "")
        print(f"skipped: {reason} | |", flush=True)

    def _begin(self, what: str, predicted: str) -> None:
        if not self._is_in_table:
            print("\n| what | predicted | measured | |\n|---|---|---|---|")
            self._is_in_table = True
        print(f"| {what} | {predicted} | ", end="", flush=True)

    def _end(self, found: Callable[[], str]) -> None:
        try:
            print(f"{found()} |", flush=True)
        except Exception as error:  # whatever it is belongs into the row
            self.num_failed += 1
            print(f"FAILED: {first_line(error)} | |", flush=True)
            if self.here.is_cuda:
                torch.cuda.empty_cache()  # it may have run out of memory


def first_line(error: Exception) -> str:
    """An error in a row of a table."""
    text = str(error).strip().partition("\n")[0].replace("|", "/")[:160]
    return f"{type(error).__name__}: {text}"
