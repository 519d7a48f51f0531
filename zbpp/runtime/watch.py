"""A thread per rank that tells the job, once a second, where the rank stands.

So when a call fails on one rank, that rank can say which rank is behind, even if the other process is
stopped or dead: what it told last is in the job's store. And a rank that hangs in its own code leaves its
record, too: its thread sees that another rank has failed. If wanted, the thread then ends the process, which
nothing else could do before torchrun's patience ends. All access to the store is the thread's, since a
store whose process is stopped does not answer.

Code that never gives up Python's lock keeps this thread from running. For that case the thread sets an alarm
of Python's faulthandler anew each second: its C code needs no lock.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zbpp.runtime.flight_recorder import FlightRecorder, Standing, behind
from zbpp.runtime.groups import Store
from zbpp.runtime.stopped import Address, address, let_run

_INTERVAL = 1.0  # s
_PATIENCE = 5.0  # s that a failed rank waits for its thread
_GRACE = 1.0  # s after which a rank that does not notice another's failure is ended
_ALARM = 4.0  # s after the timeout: by then the ranks that waited for this one have said so
_FAILED = "failed"
_SHOWN = 4  # calls of a stack, the innermost ones
_OF_TORCH = os.path.dirname(torch.__file__)


class _Shared:
    """What the thread has of a Watch: not the Watch itself, which ends the thread when it is deleted."""

    def __init__(self, flight: FlightRecorder, store: Store) -> None:
        self.flight, self.store, self.num_processes = flight, store, dist.get_world_size()
        self.wake, self.answered = threading.Event(), threading.Event()
        self.is_over, self.has_failed, self.why, self.reason = False, False, "", ""
        self.folder: Path | None = None
        self.title: dict[str, Any] = {}
        self.standings: dict[int, Standing] = {}  # by process
        self.watched = threading.get_ident()
        self.timeout: float | None = None  # None: the process is not ended


class Watch:
    """Tells where this rank stands, and asks where the others do.

    flight: of this rank. store: shared by all processes that wait for each other, used for nothing else.
    """

    def __init__(self, flight: FlightRecorder, store: Store) -> None:
        self._shared = shared = _Shared(flight, store)
        self._thread = threading.Thread(target=_run, args=(shared,), name="zbpp-watch", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _stop, shared, self._thread)  # at the latest when Python ends

    @property
    def has_failed(self) -> bool:
        """Whether `failed` was called."""
        return self._shared.has_failed

    def leave_records_in(self, folder: Path, title: dict[str, Any]) -> None:
        """When a call fails on any rank, each writes flight-rank-N.json there; N: its number in the job.

        title: entries that the file gets besides.
        """
        self._shared.folder, self._shared.title = folder, title

    def end_process(self, timeout: float) -> None:
        """From now on, end this process if another rank has failed and this one does not notice it.

        timeout: how long ranks wait for each other, in seconds. If Python's lock is held for longer, the
        process is ended, too.
        """
        self._shared.timeout = timeout

    def failed(self, why: str = "") -> str:
        """Call it when a call has failed on this rank; says what the others did, or "" if nothing is known.

        why: the error, if it is this rank's own, and no message that did not come. The answer is another
        rank's error, else the rank that is behind, and where.
        """
        shared = self._shared
        shared.why, shared.has_failed, shared.flight.gave_up = why, True, not why
        shared.wake.set()
        shared.answered.wait(_PATIENCE)
        said = shared.reason or _blame(shared)
        if said and shared.folder is not None:
            said += f"\n`zbpp hang {shared.folder}` shows where each rank stood"
        return said

    def seen(self) -> dict[int, str]:
        """After a failure: where each rank of the pipeline stood when it told last, by its rank there."""
        if not self._shared.has_failed:
            self.failed()
        own, everyone = self._shared.flight.pipeline, self._shared.standings.values()
        return {each.rank: each.place(each.told) for each in everyone if each.pipeline == own}

    def close(self) -> None:
        """End the thread."""
        self._end()


def _stop(shared: _Shared, thread: threading.Thread) -> None:
    shared.is_over = True
    shared.wake.set()
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)


def _run(shared: _Shared) -> None:
    has_written = False
    try:
        shared.store.set(f"{shared.flight.process}/address", json.dumps(address()))
        while not shared.is_over:
            if shared.timeout is not None:
                _set_alarm(shared.timeout + _ALARM)
            _tell(shared)
            if not has_written and (shared.has_failed or shared.store.check([_FAILED])):
                has_written = True
                shared.reason = _tell_failure(shared)
                if shared.flight.gave_up and shared.flight.standing().awaits is None and not shared.reason:
                    time.sleep(_INTERVAL)  # by then all who wait as this rank does have given up, too
                shared.standings = _standings(shared)
                _write(shared)
                shared.answered.set()
                if shared.timeout is not None:
                    _let_stopped_run(shared)
                    _end_unless_noticed(shared)
            shared.wake.wait(_INTERVAL)
            shared.wake.clear()
    except RuntimeError:  # the store is gone
        if shared.has_failed and not has_written:
            _write(shared)
    finally:
        if shared.timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        shared.answered.set()


def _set_alarm(seconds: float) -> None:
    """Unless this is called again in time, show what each thread does, and end the process."""
    with suppress(AttributeError, ValueError, OSError):  # where standard error is no file
        number = sys.__stderr__.fileno()  # type: ignore[union-attr]
        faulthandler.dump_traceback_later(seconds, exit=True, file=number)


def _tell(shared: _Shared) -> None:
    flight = shared.flight
    shared.store.set(str(flight.process), json.dumps(flight.standing()))


def _tell_failure(shared: _Shared) -> str:
    """Let the other ranks know that a call has failed, and why; returns what is known of the reason."""
    known = shared.store.get(_FAILED).decode() if shared.store.check([_FAILED]) else ""
    if not known and shared.has_failed:
        mine = _name(shared.flight.standing(), shared)
        shared.store.set(_FAILED, f"{mine} failed: {shared.why}" if shared.why else "")
    return known


def _standings(shared: _Shared) -> dict[int, Standing]:
    """What each process told last, as far as it told anything."""
    known = [number for number in range(shared.num_processes) if shared.store.check([str(number)])]
    return {number: Standing(*json.loads(shared.store.get(str(number)))) for number in known}


def _let_stopped_run(shared: _Shared) -> None:
    for number in shared.standings:
        key = f"{number}/address"
        if shared.store.check([key]):
            let_run(Address(*json.loads(shared.store.get(key))))


def _blame(shared: _Shared) -> str:
    """Who is behind, and where; or where the ranks are that await each other."""
    mine, now = shared.flight.standing(), time.time()
    standings = {**shared.standings, mine.process: mine}
    found = behind(standings, mine.process)
    if found is not None:
        return "" if found.process == mine.process else f"{_name(found, shared)} is behind: {found.text(now)}"
    told = [
        f"{_name(each, shared)} {each.text(now)}" for each in standings.values() if each.awaits is not None
    ]
    if len(told) < 2:
        return ""
    return f"no rank is behind: the ranks await each other, so a message is lost: {'; '.join(told)}"


def _name(standing: Standing, shared: _Shared) -> str:
    """`rank 1`; for a rank of another pipeline of the job, the process as well."""
    of_another = standing.pipeline != shared.flight.pipeline
    return f"rank {standing.rank}" + (f" of another copy (process {standing.process})" if of_another else "")


def _end_unless_noticed(shared: _Shared) -> None:
    """End the process, after some time in which its main thread may notice the failure of another rank.

    The rank that ended the job is the one that torchrun hears of first.
    """
    end = time.monotonic() + _GRACE
    while not shared.is_over and not shared.has_failed and time.monotonic() < end:
        time.sleep(0.05)
    if shared.is_over or shared.has_failed:
        return
    mine, stack = shared.flight.standing(), _stack(shared)
    began = shared.reason or "other ranks waited for this one"
    shown = [each for each in stack if _OF_TORCH not in each] or stack
    text = (
        f"rank {mine.rank} was ended, since it did not come back from its own code: {began}. It stood "
        f"{mine.text(time.time())}:\n{''.join(shown[-_SHOWN:])}"
    )
    try:
        _write_for_torchrun(text, stack)
    except (OSError, KeyError):
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _write_for_torchrun(text: str, stack: list[str]) -> None:
    """Leave the error where torchrun, and zbpp's own launcher, look for a rank's error."""
    more = {"py_callstack": "".join(stack), "timestamp": str(int(time.time()))}
    record = json.dumps({"message": {"message": text, "extraInfo": more}})
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(record)


def _stack(shared: _Shared) -> list[str]:
    frame = sys._current_frames().get(shared.watched)
    return [] if frame is None else traceback.format_stack(frame)


def _write(shared: _Shared) -> None:
    """Write this rank's record, with what it knows of the others and where its program's code is."""
    if shared.folder is None:
        return
    flight = shared.flight
    standings = [each for each in shared.standings.values() if each.pipeline == flight.pipeline]
    record = {
        **shared.title,
        **flight.record(),
        "why": shared.why,
        "others": [each._asdict() for each in standings if each.process != flight.process],
        "stack": _stack(shared),
    }
    with suppress(OSError):  # another error ends the job, and must not be hidden by this one
        shared.folder.mkdir(parents=True, exist_ok=True)
        (shared.folder / f"flight-rank-{flight.process}.json").write_text(json.dumps(record))
