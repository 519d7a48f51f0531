"""Which rank is to blame when a call has failed: one that died, or is behind; or a message that was lost.

The answers are sentences. Other ranks read them in the job's store, so this file also tells what one says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from zbpp.runtime.flight_recorder import FlightRecorder, Standing, behind
from zbpp.runtime.other_ranks import OtherRanks

_LOST = "no rank is behind"
_BEHIND = "is behind"


class Blame:
    """Finds the rank to blame, from where this rank stands and what the others told last."""

    def __init__(self, flight: FlightRecorder, others: OtherRanks) -> None:
        self._flight, self._others = flight, others

    def name(self, standing: Standing) -> str:
        """`rank 1`; for a rank of another pipeline of the job, the process as well."""
        of_another = standing.pipeline != self._flight.pipeline
        process = f" of another copy (process {standing.process})" if of_another else ""
        return f"rank {standing.rank}{process}"

    @property
    def own_name(self) -> str:
        """The name of this rank."""
        return self.name(self._flight.standing())

    def dead(self, processes: Sequence[int]) -> str:
        """`rank 1 died ...`; "" if none of these processes is a rank's."""
        standings = self._others.standings
        found = [standings[each] for each in processes if each in standings]
        ended = "its process was killed, or left by os._exit"
        return "; ".join(f"{self.name(each)} died ({ended}), {each.last_seen}" for each in found)

    def ended(self) -> str:
        """Which ranks' processes have ended; needs no store, whose process may be among them."""
        gone = [number for number in self._others.members if self._others.state(number) == "gone"]
        listed = ", ".join(map(str, gone))
        return f"the processes of these ranks of the job have ended: {listed}" if gone else ""

    def behind(self, *, is_broken: bool) -> str:
        """Who is behind, and where; or where the ranks are that await each other. "" if nothing is known.

        is_broken: whether a connection has broken.
        """
        mine, now = self._flight.standing(), time.time()
        standings = {**self._others.standings, mine.process: mine}
        found = behind(standings, mine.process)
        if found is not None:
            if found.process == mine.process:
                return ""
            place = found.text(now, self._others.state(found.process))
            return f"{self.name(found)} {_BEHIND}: {place}"
        waiting = [each for each in standings.values() if each.awaits is not None]
        if is_broken:  # what they told last is not where they were at the end
            waiting = [each for each in waiting if each.process != mine.process]
            return "; ".join(f"{self.name(each)} was {each.last_seen}" for each in waiting)
        if len(waiting) < 2:
            return ""
        text = "; ".join(f"{self.name(each)} {each.text(now)}" for each in waiting)
        return f"{_LOST}: the ranks await each other, so a message is lost: {text}"

    def is_own(self, reason: str) -> bool:
        """Whether the reason why the job ends, as another rank has told it, is that this rank is behind."""
        return reason.startswith(f"{self.own_name} {_BEHIND}")


def is_clear(blame: str) -> bool:
    """Whether an answer of `behind` tells of certain ranks."""
    return bool(blame) and not blame.startswith(_LOST)
