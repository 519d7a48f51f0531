"""What the graphs need of a device: to run and to capture functions. cuda.py has it for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class NotCapturable(Exception):
    """A step can't be captured, or can't be replayed. The text says why."""


class GraphMaker(Protocol):
    """Captures functions into graphs that share one memory pool, and are replayed in the order of capture."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Around each eager step before a capture."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around the captures of one step, which begin a new pool."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record what the function computes, without computing it; returns what replays the record."""

    def seeds(self, count: int) -> Seeds:
        """Random numbers for the next capture, whose graph has `count` F's."""


class Seeds(Protocol):
    """The seeds of the F's that one graph holds."""

    def use(self, number: int) -> None:
        """In the capture: what follows draws its random numbers by the seed of this number."""

    def restore(self) -> None:
        """After the capture: random numbers come from the device's generator again."""

    def set(self, seeds: list[int]) -> None:
        """Before a replay: the seeds of all F's."""
