"""What a rank knows of the others: where they stand, which processes they are, and how they ended.

Each process writes to the job's store which process it is, once a second where it stands, and at its end why.
A process that has ended and has not said why was killed, or left by os._exit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from zbpp.runtime.flight_recorder import Standing
from zbpp.runtime.groups import Store
from zbpp.runtime.roster import Member, State, let_run, state_of, this_process

_REASON = "failed"  # exists as soon as a call has failed; "" if the rank that failed awaited a message
_SOON = 1.0  # s: a process's connections close a little before its end
_INTERVAL = 0.02  # s


class OtherRanks:
    """The processes that wait for each other. standings, members: by process, as far as they are known."""

    def __init__(self, store: Store, process: int, num_processes: int) -> None:
        self._store, self._process, self._all = store, process, range(num_processes)
        self.standings: dict[int, Standing] = {}
        self.members: dict[int, Member] = {}

    def introduce(self) -> None:
        """Tell which process this is."""
        self._store.set(f"{self._process}/member", json.dumps(this_process()))

    def tell(self, standing: Standing) -> None:
        """Tell where this one stands."""
        self._store.set(str(self._process), json.dumps(standing))
        if not self.members:
            self.members = self._read_members(self._all)

    def leave(self, why: str) -> None:
        """Tell how this one ends. why: "" if it ends because of another rank."""
        self._store.set(f"{self._process}/left", why)

    @property
    def have_failed(self) -> bool:
        """Whether a call of any rank has failed."""
        return self._store.check([_REASON])

    @property
    def reason(self) -> str:
        """Why the job ends, as far as any rank has told."""
        return str(self._store.get(_REASON).decode()) if self.have_failed else ""

    def tell_reason(self, why: str) -> str:
        """Let all ranks know why the job ends; returns why, as the first rank has told that knew a reason."""
        return str(self._store.compare_set(_REASON, "", why).decode())

    def read(self) -> None:
        """Read what each process told last."""
        known = [number for number in self._all if self._store.check([str(number)])]
        self.standings = {number: Standing(*json.loads(self._store.get(str(number)))) for number in known}
        if not self.members:
            told = [number for number in self._all if self._store.check([f"{number}/member"])]
            self.members = self._read_members(told)

    def _read_members(self, numbers: Iterable[int]) -> dict[int, Member]:
        """Which processes these are; {} unless all have told."""
        keys = {number: f"{number}/member" for number in numbers}
        if not self._store.check([*keys.values()]):
            return {}
        told = self._store.multi_get([*keys.values()])
        return {number: Member(*json.loads(each)) for number, each in zip(keys, told, strict=True)}

    def state(self, process: int) -> State:
        """What a process does, if it can be looked at."""
        return state_of(self.members[process]) if process in self.members else ""

    def let_stopped_run(self) -> None:
        """Send SIGCONT to the processes of this host that are stopped."""
        for member in self.members.values():
            let_run(member)

    def ended(self) -> tuple[list[int], str]:
        """(the processes of this host that ended without a word, "") or ([], why a rank ended).

        Waits a moment until something is known; ([], "") if nothing is.
        """
        end = time.monotonic() + _SOON
        while time.monotonic() < end:
            reason = self.reason
            if reason:
                return [], reason
            gone = [number for number, each in self.members.items() if state_of(each) == "gone"]
            silent = [number for number in gone if not self.has_left(number)]
            if silent:
                return silent, ""
            told = [self._store.get(f"{number}/left").decode() for number in gone]
            if any(told):
                return [], next(filter(None, told))
            time.sleep(_INTERVAL)
        return [], ""

    def has_left(self, process: int) -> bool:
        """Whether a process has told how it ends."""
        return self._store.check([f"{process}/left"])
