"""A thread per rank that tells the job, once a second, where the rank stands.

So when a call fails on one rank, that rank can say which rank has died, or is behind, even if the other
process is stopped or dead: what it told last is in the job's store. And a rank that hangs in its own code
leaves its record, too: its thread sees that another rank has failed. If wanted, the thread then ends the
process, which nothing else could do before torchrun's patience ends. From the first step on, only the thread
reads and writes what is told here, since a store whose process is stopped does not answer.

Code that never gives up Python's lock keeps this thread from running. For that case the thread sets an alarm
of Python's faulthandler anew each second: its C code needs no lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zbpp.error_text import error_text
from zbpp.runtime.blame import Blame, is_clear
from zbpp.runtime.end_process import cancel_alarm, report_end, set_alarm
from zbpp.runtime.failure_record import FailureRecord
from zbpp.runtime.flight_recorder import FlightRecorder
from zbpp.runtime.groups import Store
from zbpp.runtime.other_ranks import OtherRanks
from zbpp.runtime.out_of_memory import seconds_to_explain, tells_of_memory

_INTERVAL = 1.0  # s
_PATIENCE = 5.0  # s that a failed rank waits for its thread
_GRACE = 1.0  # s after which a rank that does not notice another's failure is ended
_ALARM = 2.5  # s after the timeout: by then the ranks that waited for this one have said so


class _Shared:
    """What the thread has of a Watch: not the Watch itself, which ends the thread when it is deleted."""

    def __init__(self, flight: FlightRecorder, store: Store) -> None:
        self.flight, self.others = flight, OtherRanks(store, flight.process, dist.get_world_size())
        self.blame, self.record = Blame(flight, self.others), FailureRecord(flight, self.others)
        self.wake, self.answered = threading.Event(), threading.Event()
        self.is_over, self.has_ended = False, False  # the thread is to end; it has ended
        self.has_failed, self.is_broken, self.is_recorded = False, False, False
        self.why, self.said = "", ""  # this rank's own error; what it says of the others
        self.timeout: float | None = None  # None: the process is not ended


class Watch:
    """Tells where this rank stands, and asks where the others do.

    flight: of this rank. store: shared by all processes that wait for each other, used for nothing else.
    """

    def __init__(self, flight: FlightRecorder, store: Store) -> None:
        self._shared = shared = _Shared(flight, store)
        with suppress(RuntimeError):  # the store is gone: what waits for a message next says who is
            shared.others.introduce()  # before the first step, in which this process may die
            shared.others.tell(flight.standing())
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
        self._shared.record.leave_in(folder, title)

    def end_process(self, timeout: float) -> None:
        """From now on, end this process if another rank has failed and this one does not notice it.

        timeout: how long ranks wait for each other, in seconds. If Python's lock is held for longer, the
        process is ended, too.
        """
        if self._shared.timeout is None:
            Finalize(None, _wake, (self._shared,), exitpriority=0)
        self._shared.timeout = timeout
        set_alarm(timeout + _ALARM)  # the thread's next one may come too late

    def failed(self, error: BaseException | None = None, why: str = "", *, is_broken: bool = False) -> str:
        """Call it when a call has failed on this rank; says what the others did, or "" if nothing is known.

        why: the error's text, if it is this rank's own, and no message that did not come. is_broken: whether
        a connection has broken. The answer is another rank's error or death, else the rank that is behind,
        and where.
        """
        shared = self._shared
        shared.record.keep_stack(error)
        shared.why, shared.is_broken = why, is_broken
        shared.has_failed, shared.flight.gave_up = True, not why
        if shared.timeout is not None:  # the main thread runs: the time for the answer is its own
            set_alarm(_PATIENCE + _ALARM)
        shared.wake.set()
        shared.answered.wait(_PATIENCE)
        if shared.has_ended:  # the store is gone, and with it the thread
            cancel_alarm()
            if not shared.is_recorded:
                _record(shared)
        said = shared.said or shared.blame.behind(is_broken=is_broken)
        return "\n".join(filter(None, [said, said and shared.record.pointer]))

    def seen(self) -> dict[int, str]:
        """After a failure: where each rank of the pipeline was seen last, by its rank there."""
        if not self._shared.has_failed:
            self.failed()
        own, everyone = self._shared.flight.pipeline, self._shared.others.standings.values()
        return {each.rank: each.last_seen for each in everyone if each.pipeline == own}

    def close(self) -> None:
        """End the thread."""
        self._end()


def _stop(shared: _Shared, thread: threading.Thread) -> None:
    shared.is_over = True
    shared.wake.set()
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)


def _run(shared: _Shared) -> None:
    others, has_told, has_noticed = shared.others, False, False
    try:
        while not shared.is_over:
            if shared.timeout is not None:
                set_alarm(shared.timeout + _ALARM)
            others.tell(shared.flight.standing())
            if shared.has_failed and not has_told:
                has_told = True
                shared.said = _tell_failure(shared)
                if shared.why or not has_noticed:  # the first record has where this rank hung
                    _record(shared)
                has_noticed = True
                shared.answered.set()
            elif not has_noticed and others.have_failed:
                has_noticed = True
                others.read()
                _record(shared)
                if shared.timeout is not None:
                    _end_unless_noticed(shared, shared.timeout)
            shared.wake.wait(_INTERVAL)
            shared.wake.clear()
        if not shared.has_failed:
            others.leave(_end_of_program(shared))
    except RuntimeError:  # the store is gone
        shared.said = shared.said or shared.blame.ended()
        if shared.timeout is not None:
            _look_on(shared, shared.timeout)
    finally:
        shared.has_ended = True  # before the alarm is cancelled: see `failed`
        if shared.timeout is not None:
            cancel_alarm()
        shared.answered.set()


def _record(shared: _Shared) -> None:
    shared.is_recorded = True
    shared.record.write(shared.why, shared.said)


def _wake(shared: _Shared) -> None:
    """If this rank has failed, let stopped processes run, so that they end, too.

    Called when this process ends, behind its own report: in a process that runs again the alarm is long due.
    """
    if shared.has_failed:
        shared.others.let_stopped_run()


def _tell_failure(shared: _Shared) -> str:
    """Tell the others that this rank has failed; returns why the job ends, if it is not this rank's error."""
    others, blame, mine = shared.others, shared.blame, shared.flight.standing()
    others.leave("")
    reason = f"{blame.name(mine)} failed: {shared.why}" if shared.why else ""
    told = others.tell_reason(reason)
    others.read()
    if reason and told == reason:
        return ""
    if not told and shared.is_broken:
        dead, told = others.ended()
        told = others.tell_reason(blame.dead(dead)) if dead else told
    elif not told and mine.awaits is None:
        time.sleep(_INTERVAL)  # by then all who wait as this rank does have given up, too
        others.read()
    if not told:
        told = blame.behind(is_broken=shared.is_broken)
        if is_clear(told):
            others.tell_reason(told)  # so that others need not find it out
    return told


def _end_of_program(shared: _Shared) -> str:
    """How the program of this process goes on without the pipeline, or ends."""
    error = getattr(sys, "last_value", None)  # what Python has shown before it ends
    if error is not None:
        return f"{shared.blame.own_name} failed: {error_text(error)}"
    return f"{shared.blame.own_name} left: its program has ended, or closed its pipeline"


def _end_unless_noticed(shared: _Shared, timeout: float) -> None:
    """End the process, after some time in which its main thread may notice the failure of another rank.

    The rank that ended the job is the one that torchrun hears of first.
    """
    reason = shared.others.reason
    # A rank that is out of memory lives on for a while, to say what would fit.
    explains = seconds_to_explain(timeout) if tells_of_memory(reason) else 0
    end = time.monotonic() + _GRACE + explains
    while not shared.is_over and not shared.has_failed and time.monotonic() < end:
        time.sleep(0.05)
    if shared.is_over or shared.has_failed:
        return
    with suppress(RuntimeError):  # the rank that failed may have had the store
        reason = shared.others.reason
    is_other = bool(reason) and not shared.blame.is_own(reason)
    _end_process(shared, reason if is_other else "other ranks waited for this one")


def _look_on(shared: _Shared, timeout: float) -> None:
    """Without a store: end the process if an instruction lasts longer than ranks wait for each other."""
    while not shared.is_over and not shared.has_failed:
        set_alarm(timeout + _ALARM)
        mine = shared.flight.standing()
        if mine.call and time.time() - mine.since > timeout + _GRACE:
            _end_process(shared, shared.said or "the process with the job's store is gone")
        shared.wake.wait(_INTERVAL)
        shared.wake.clear()


def _end_process(shared: _Shared, began: str) -> None:
    """End this process, whose main thread does not come back. began: why the job ends."""
    if not shared.is_recorded:
        _record(shared)
    mine = shared.flight.standing()
    report_end(
        f"rank {mine.rank} was ended, since it did not come back from its own code: {began}. It stood "
        f"{mine.text(time.time())}",
        shared.record.stack(),
        shared.record.pointer,
    )
    shared.others.let_stopped_run()
    os._exit(1)
