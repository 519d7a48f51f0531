"""The error of a job one of whose ranks is gone before the run's end."""

from __future__ import annotations


class RankDeath(RuntimeError):
    """A rank died or left before the run's end; the message says which one.

    gone: the ranks that are gone. rest: the message after `rank 2 died`. is_told: whether another rank shows
    the same to the user.
    """

    def __init__(
        self, text: str, *, gone: tuple[int, ...] = (), rest: str = "", is_told: bool = False
    ) -> None:
        super().__init__(text)
        self.gone, self.rest, self.is_told = gone, rest, is_told
