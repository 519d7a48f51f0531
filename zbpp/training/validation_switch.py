"""Switches post-validation on where clipping is rare, and off where it is frequent."""

from __future__ import annotations

from collections import deque
from typing import Any

_WINDOW, _MOST_REDONE = 10, 1  # off if more than _MOST_REDONE of the last _WINDOW updates were redone


class ValidationSwitch:
    """Whether post-validation is on, which pays where clipping is rare.

    after: the number of steps in a row without clipping after which post-validation goes on. It goes off when
    two of the last ten updates had to be redone. 0: always on.
    """

    def __init__(self, after: int) -> None:
        if after < 0:
            raise ValueError(f"after={after}: write a number of steps, 0 or more")
        self.is_on, self._after, self._num_good = after == 0, after, 0
        self._redone: deque[bool] = deque(maxlen=_WINDOW)

    def note(self, *, is_good: bool) -> None:
        """Count a step. is_good: whether its gradients were finite and not clipped."""
        self._num_good = self._num_good + 1 if is_good else 0
        if not self._after:
            return
        if not self.is_on:
            self.is_on = self._num_good >= self._after
            return
        self._redone.append(not is_good)
        if sum(self._redone) > _MOST_REDONE:
            self.is_on = False
            self._redone.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint."""
        return {"is_on": self.is_on, "num_good": self._num_good, "redone": list(self._redone)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.is_on, self._num_good = state["is_on"] or not self._after, state["num_good"]
        self._redone = deque(state["redone"], maxlen=_WINDOW)
