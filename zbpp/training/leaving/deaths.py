"""Explains the end of a rank: which rank, in which step, and what the rank that notices it waited for.

The rank whose neighbour dies sees a broken connection. It looks which processes of its host are gone, and
tells the ranks of other hosts through the job's store. A rank that fails or leaves by `sys.exit` tells the
others why. The first rank that tells a reason also shows it to the user; the others end in silence.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from zbpp.error_text import error_text
from zbpp.rank_death import RankDeath
from zbpp.runtime.groups import job_store
from zbpp.runtime.out_of_memory import seconds_to_explain, tells_of_memory
from zbpp.runtime.roster import gone, roster
from zbpp.runtime.world import CommunicationError
from zbpp.training.leaving.signals import LeaveOnSignal

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer

GRACE = 3.0  # s in which a launcher ends the job of a rank that failed; it does not if a rank left with 0
_PATIENCE = 2.0  # s for an answer of the store
_SOON = 1.0  # s: a process's connections close a little before its end
_INTERVAL = 0.02  # s
_REASON, _SHOWN = "reason", "shown"  # keys in the store


class Deaths:
    """A context: a CommunicationError inside becomes a RankDeath if its cause is found, and so does sys.exit.

    signals: says whether the launcher is ending the job. timeout: how long ranks wait for each other, in
    seconds. trainer: as soon as there is one. Collective.
    """

    def __init__(self, signals: LeaveOnSignal, timeout: float) -> None:
        self._signals, self._timeout = signals, timeout
        self.trainer: Trainer | None = None
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._members = roster()
        self._store: Any = job_store("zbpp/deaths") if dist.is_initialized() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, CommunicationError):
            death = self._explained(error)
            if death is not None:
                raise death from error
        elif isinstance(error, SystemExit):
            left = f"rank {self._rank} left with exit status {error.code or 0}{self._when()}"
            text = f"{left}, before the run's end: sys.exit at {_place(error)}"
            self._tell(text)
            raise RankDeath(text) from error
        elif isinstance(error, Exception):
            first = error_text(error).partition("\n")[0]
            self._tell(f"rank {self._rank} failed{self._when()}: {first}")

    def _when(self) -> str:
        return " at the start" if self.trainer is None else f" in step {self.trainer.next_step + 1}"

    def _tell(self, reason: str) -> None:
        """Let the other ranks know why this one ends; it shows the reason itself."""
        self._ask(lambda store: (_put(store, _REASON, reason), _put(store, _SHOWN, str(self._rank))))

    def _explained(self, error: CommunicationError) -> RankDeath | None:
        """The cause of a broken connection, once the launcher had time to notice; None: nothing is known."""
        end = time.monotonic() + GRACE
        if error.is_late:  # a timeout: nobody is gone, the connection stands
            if _can_speak(error):
                self._wait_for_the_end(end)
            return None
        last = self._last_seen()
        dead, reason = self._cause(end)
        waited = f"; {error}"
        self._wait_for_the_end(end)
        if reason:
            if tells_of_memory(reason):
                self._wait_for_the_end(
                    time.monotonic() + seconds_to_explain(self._timeout)
                )  # that rank first works out, and says, what would fit its memory
            return RankDeath(reason + waited, is_told=not self._shows())
        if not dead:
            return None
        who = f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))}"
        rest = f"{self._when()}{last(dead[0])}{waited}"
        text = f"{who} {self._how(dead)}{rest}"
        return RankDeath(text, gone=tuple(dead), rest=rest, is_told=not self._shows())

    def _wait_for_the_end(self, end: float) -> None:
        """Wait until the launcher ends this rank, since another one was first to end, but not longer."""
        while self._signals.reason is None and time.monotonic() < end:
            time.sleep(_INTERVAL)

    def _how(self, dead: list[int]) -> str:
        """How the ranks ended. A launcher ends the job after a death or failure, not after exit status 0."""
        launchers = {self._members[rank].launcher for rank in dead}
        has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        if self._signals.reason is not None:
            return "died"
        if not has_launcher or launchers != {self._members[self._rank].launcher}:
            return f"{'is' if len(dead) == 1 else 'are'} gone (killed, or left)"
        return "left with exit status 0 before the run's end"

    def _cause(self, end: float) -> tuple[list[int], str]:
        """(the ranks that are gone, what a rank said before it ended), as soon as anything is known."""
        soon = time.monotonic() + _SOON
        while time.monotonic() < end:
            found = gone(self._members) if time.monotonic() < soon else []
            mine = json.dumps(found) if found else ""
            # A reason comes first: the rank that told it ends right after.
            told = self._ask(partial(_put, key=_REASON, value=mine) if mine else _known)
            told = told or mine
            if told:
                return (json.loads(told), "") if told.startswith("[") else ([], told)
            time.sleep(_INTERVAL)
        return [], ""

    def _last_seen(self) -> Callable[[int], str]:
        """A function that says at which instruction a rank was seen last, if that is known."""
        pipeline = None if self.trainer is None else self.trainer.pipeline
        if pipeline is None:
            return lambda _: ""
        standings = pipeline.seen()
        return lambda rank: f" ({standings[rank]})" if rank in standings else ""

    def _shows(self) -> bool:
        """Whether this rank is the one that shows the death; all do if the store is gone."""
        winner = self._ask(lambda store: _put(store, _SHOWN, str(self._rank)))
        return winner in (None, str(self._rank))

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        """What a call of the store returns; None if the store is gone or its process does not answer."""
        answers: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(call(self._store))

        if self._store is not None:
            thread = Thread(target=ask, daemon=True)
            with suppress(RuntimeError):  # there may be no memory for a thread
                thread.start()
                thread.join(_PATIENCE)
            if not answers:
                self._store = None  # later calls would wait again
        return answers[0] if answers else None


def _can_speak(error: CommunicationError) -> bool:
    """Whether the rank that the others wait for will end by itself, and show the stack of its code."""
    said = "".join(getattr(error, "__notes__", ()))
    return " is behind: " in said and "silent" not in said


def _put(store: Any, key: str, value: str) -> str:
    """Write a value unless there is one; returns what is there."""
    return str(store.compare_set(key, "", value).decode())


def _known(store: Any) -> str:
    return str(store.get(_REASON).decode()) if store.check([_REASON]) else ""


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"
