"""A thread per rank that tells the job, once a second, where the rank stands.

So when a call fails on one rank, that rank can say which rank is behind, even if the other process is
stopped or dead: what it told last is in the job's store. And a rank that hangs in its own code leaves its
record, too: its thread sees that another rank has failed. All access to the store is the thread's, since a
store whose process is stopped does not answer.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zbpp.runtime.flight_recorder import FlightRecorder, Standing, behind
from zbpp.runtime.groups import Store

_INTERVAL = 1.0  # s
_PATIENCE = 5.0  # s that a failed rank waits for its thread
_FAILED = "failed"


class _Shared:
    """What the thread has of a Watch: not the Watch itself, which ends the thread when it is deleted."""

    def __init__(self, flight: FlightRecorder, store: Store, num_ranks: int) -> None:
        self.flight, self.store, self.num_ranks = flight, store, num_ranks
        self.process = dist.get_rank()
        self.wake, self.answered = threading.Event(), threading.Event()
        self.is_over, self.has_failed, self.why, self.reason = False, False, "", ""
        self.folder: Path | None = None
        self.title: dict[str, Any] = {}
        self.standings: dict[int, Standing] = {}
        self.watched = threading.get_ident()


class Watch:
    """Tells where this rank stands, and asks where the others do.

    flight: of this rank. store: shared by the ranks of the pipeline, used for nothing else.
    """

    def __init__(self, flight: FlightRecorder, store: Store, num_ranks: int) -> None:
        self._shared = shared = _Shared(flight, store, num_ranks)
        self._thread = threading.Thread(target=_run, args=(shared,), name="zbpp-watch", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _stop, shared, self._thread)  # at the latest when Python ends

    def leave_records_in(self, folder: Path, title: dict[str, Any]) -> None:
        """When a call fails on any rank, each writes flight-rank-N.json there; N: its number in the job.

        title: entries that the file gets besides.
        """
        self._shared.folder, self._shared.title = folder, title

    def failed(self, why: str = "") -> str:
        """Call it when a call has failed on this rank; says what the others did, or "" if nothing is known.

        why: the error, if it is this rank's own, and no message that did not come. The answer is another
        rank's error, else the rank that is behind, and where.
        """
        shared = self._shared
        shared.why, shared.has_failed = why, True
        shared.wake.set()
        shared.answered.wait(_PATIENCE)
        mine = shared.flight.rank
        found = behind({**shared.standings, mine: shared.flight.standing()}, mine)
        said = shared.reason
        if not said and found is not None and found.rank != mine:
            said = f"rank {found.rank} is behind: {found.text(time.time())}"
        if said and shared.folder is not None:
            said += f"\n`zbpp hang {shared.folder}` shows where each rank stood"
        return said

    def seen(self) -> dict[int, str]:
        """After a failure: where each rank of the pipeline stood when it told last, by its number in there."""
        if not self._shared.has_failed:
            self.failed()
        return {rank: each.place(each.told) for rank, each in self._shared.standings.items()}

    def close(self) -> None:
        """End the thread."""
        self._end()


def _stop(shared: _Shared, thread: threading.Thread) -> None:
    shared.is_over = True
    shared.wake.set()
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)


def _run(shared: _Shared) -> None:
    rank, has_written = shared.flight.rank, False
    try:
        while not shared.is_over:
            shared.store.set(str(rank), json.dumps(shared.flight.standing()))
            if not has_written and (shared.has_failed or shared.store.check([_FAILED])):
                has_written = True
                shared.reason = _tell_failure(shared)
                shared.standings = dict(_standings(shared))
                _write(shared)
                shared.answered.set()
            shared.wake.wait(_INTERVAL)
            shared.wake.clear()
    except RuntimeError:  # the store is gone
        if shared.has_failed and not has_written:
            _write(shared)
    finally:
        shared.answered.set()


def _tell_failure(shared: _Shared) -> str:
    """Let the other ranks know that a call has failed, and why; returns what is known of the reason."""
    known = shared.store.get(_FAILED).decode() if shared.store.check([_FAILED]) else ""
    if not known and shared.has_failed:
        shared.store.set(_FAILED, f"rank {shared.flight.rank} failed: {shared.why}" if shared.why else "")
    return known


def _standings(shared: _Shared) -> list[tuple[int, Standing]]:
    """What each rank told last, as far as it told anything."""
    known = [rank for rank in range(shared.num_ranks) if shared.store.check([str(rank)])]
    return [(rank, Standing(*json.loads(shared.store.get(str(rank))))) for rank in known]


def _write(shared: _Shared) -> None:
    """Write this rank's record, with what it knows of the others and where its program's code is."""
    if shared.folder is None:
        return
    rank = shared.flight.rank
    frame = sys._current_frames().get(shared.watched)
    record = {
        **shared.title,
        **shared.flight.record(),
        "others": [each._asdict() for each in shared.standings.values() if each.rank != rank],
        "stack": [] if frame is None else traceback.format_stack(frame),
    }
    with suppress(OSError):  # another error ends the job, and must not be hidden by this one
        shared.folder.mkdir(parents=True, exist_ok=True)
        (shared.folder / f"flight-rank-{shared.process}.json").write_text(json.dumps(record))
