"""A thread per rank that tells the job, once a second, where the rank stands.

So when a call fails on one rank, that rank can say which rank has died, or is behind, even if the other
process is stopped or dead: what it told last is in the job's store. And a rank that hangs in its own code
leaves its record, too: its thread sees that another rank has failed. If wanted, the thread then ends the
process, which nothing else could do before torchrun's patience ends. From the first step on, all access to
the store is the thread's, since a store whose process is stopped does not answer.

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
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zbpp.error_text import first_cause, shown_path
from zbpp.runtime.flight_recorder import FlightRecorder, Standing, behind
from zbpp.runtime.groups import Store
from zbpp.runtime.other_ranks import OtherRanks
from zbpp.runtime.out_of_memory import seconds_to_explain, tells_of_memory

_INTERVAL = 1.0  # s
_PATIENCE = 5.0  # s that a failed rank waits for its thread
_GRACE = 1.0  # s after which a rank that does not notice another's failure is ended
_ALARM = 2.5  # s after the timeout: by then the ranks that waited for this one have said so
_LOST = "no rank is behind"
_SHOWN = 4  # calls of a stack, the innermost ones
_OF_TORCH = os.path.dirname(torch.__file__)


class _Shared:
    """What the thread has of a Watch: not the Watch itself, which ends the thread when it is deleted."""

    def __init__(self, flight: FlightRecorder, store: Store) -> None:
        self.flight, self.others = flight, OtherRanks(store, flight.process, dist.get_world_size())
        self.wake, self.answered = threading.Event(), threading.Event()
        self.is_over, self.has_failed, self.is_broken = False, False, False
        self.why, self.said = "", ""  # this rank's own error; what it says of the others
        self.stack: list[str] = []  # of this rank's error
        self.folder: Path | None = None
        self.title: dict[str, Any] = {}
        self.watched = threading.get_ident()
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
        self._shared.folder, self._shared.title = folder, title

    def end_process(self, timeout: float) -> None:
        """From now on, end this process if another rank has failed and this one does not notice it.

        timeout: how long ranks wait for each other, in seconds. If Python's lock is held for longer, the
        process is ended, too.
        """
        if self._shared.timeout is None:
            Finalize(None, _wake, (self._shared,), exitpriority=0)
        self._shared.timeout = timeout
        _set_alarm(timeout + _ALARM)  # the thread's next one may come too late

    def failed(self, error: BaseException | None = None, why: str = "", *, is_broken: bool = False) -> str:
        """Call it when a call has failed on this rank; says what the others did, or "" if nothing is known.

        why: the error's text, if it is this rank's own, and no message that did not come. is_broken: whether
        a connection has broken. The answer is another rank's error or death, else the rank that is behind,
        and where.
        """
        shared = self._shared
        shared.stack = [] if error is None else _stack_of(error)
        shared.why, shared.is_broken = why, is_broken
        shared.has_failed, shared.flight.gave_up = True, not why
        if shared.timeout is not None:  # the main thread runs: the time for the answer is its own
            _set_alarm(_PATIENCE + _ALARM)
        shared.wake.set()
        shared.answered.wait(_PATIENCE)
        said = shared.said or _blame(shared)
        if said and shared.folder is not None:
            said += f"\n`zbpp hang {shown_path(shared.folder)}` shows where each rank stood"
        return said

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
                _set_alarm(shared.timeout + _ALARM)
            others.tell(shared.flight.standing())
            if shared.has_failed and not has_told:
                has_told = True
                shared.said = _tell_failure(shared)
                if shared.why or not has_noticed:  # the first record has where this rank hung
                    _write(shared)
                has_noticed = True
                shared.answered.set()
            elif not has_noticed and others.have_failed:
                has_noticed = True
                others.read()
                _write(shared)
                if shared.timeout is not None:
                    _end_unless_noticed(shared, shared.timeout)
            shared.wake.wait(_INTERVAL)
            shared.wake.clear()
        if not shared.has_failed:
            others.leave(_end_of_program(shared))
    except RuntimeError:  # the store is gone
        shared.said = shared.said or _without_store(shared)
        if shared.has_failed and not has_told:
            _write(shared)
    finally:
        if shared.timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        shared.answered.set()


def _wake(shared: _Shared) -> None:
    """If this rank has failed, let stopped processes run, so that they end, too.

    Called when this process ends, behind its own report: in a process that runs again the alarm is long due.
    """
    if shared.has_failed:
        shared.others.let_stopped_run()


def _set_alarm(seconds: float) -> None:
    """Unless this is called again in time, show what each thread does, and end the process."""
    with suppress(AttributeError, ValueError, OSError):  # where standard error is no file
        number = sys.__stderr__.fileno()  # type: ignore[union-attr]
        faulthandler.dump_traceback_later(seconds, exit=True, file=number)


def _tell_failure(shared: _Shared) -> str:
    """Tell the others that this rank has failed; returns why the job ends, if it is not this rank's error."""
    others, mine = shared.others, shared.flight.standing()
    others.leave("")
    reason = f"{_name(mine, shared)} failed: {shared.why}" if shared.why else ""
    told = others.tell_reason(reason)
    others.read()
    if reason and told == reason:
        return ""
    if not told and shared.is_broken:
        dead, told = others.ended()
        told = others.tell_reason(_dead(shared, dead)) if dead else told
    elif not told and mine.awaits is None:
        time.sleep(_INTERVAL)  # by then all who wait as this rank does have given up, too
        others.read()
    if not told:
        told = _blame(shared)
        if _is_clear(told):
            others.tell_reason(told)  # so that others need not find it out
    return told


def _is_clear(blame: str) -> bool:
    return bool(blame) and not blame.startswith(_LOST)


def _dead(shared: _Shared, processes: Sequence[int]) -> str:
    """`rank 1 died ...`; "" if none of these processes is a rank's."""
    standings = shared.others.standings
    found = [standings[each] for each in processes if each in standings]
    ended = "its process was killed, or left by os._exit"
    return "; ".join(f"{_name(each, shared)} died ({ended}), {each.last_seen}" for each in found)


def _without_store(shared: _Shared) -> str:
    """Who is gone, if the process that held the job's store may be among them."""
    gone = [number for number in shared.others.members if shared.others.state(number) == "gone"]
    return f"the processes of these ranks of the job have ended: {', '.join(map(str, gone))}" if gone else ""


def _end_of_program(shared: _Shared) -> str:
    """How the program of this process goes on without the pipeline, or ends."""
    name = _name(shared.flight.standing(), shared)
    error = getattr(sys, "last_value", None)  # what Python has shown before it ends
    if error is not None:
        return f"{name} failed: {type(error).__name__}: {error}"
    return f"{name} left: its program has ended, or closed its pipeline"


def _blame(shared: _Shared) -> str:
    """Who is behind, and where; or where the ranks are that await each other."""
    mine, now = shared.flight.standing(), time.time()
    standings = {**shared.others.standings, mine.process: mine}
    found = behind(standings, mine.process)
    if found is not None:
        if found.process == mine.process:
            return ""
        place = found.text(now, shared.others.state(found.process))
        return f"{_name(found, shared)} is behind: {place}"
    told = [each for each in standings.values() if each.awaits is not None]
    if shared.is_broken:  # what they told last is not where they were at the end
        told = [each for each in told if each.process != mine.process]
        return "; ".join(f"{_name(each, shared)} was {each.last_seen}" for each in told)
    if len(told) < 2:
        return ""
    text = "; ".join(f"{_name(each, shared)} {each.text(now)}" for each in told)
    return f"{_LOST}: the ranks await each other, so a message is lost: {text}"


def _name(standing: Standing, shared: _Shared) -> str:
    """`rank 1`; for a rank of another pipeline of the job, the process as well."""
    of_another = standing.pipeline != shared.flight.pipeline
    return f"rank {standing.rank}" + (f" of another copy (process {standing.process})" if of_another else "")


def _end_unless_noticed(shared: _Shared, timeout: float) -> None:
    """End the process, after some time in which its main thread may notice the failure of another rank.

    The rank that ended the job is the one that torchrun hears of first.
    """
    # A rank that is out of memory lives on for a while, to say what would fit.
    explains = seconds_to_explain(timeout) if tells_of_memory(shared.others.reason) else 0
    end = time.monotonic() + _GRACE + explains
    while not shared.is_over and not shared.has_failed and time.monotonic() < end:
        time.sleep(0.05)
    if shared.is_over or shared.has_failed:
        return
    mine, stack, reason = shared.flight.standing(), _stack(shared), shared.others.reason
    is_mine = not reason or reason.startswith(f"{_name(mine, shared)} is behind")
    began = "other ranks waited for this one" if is_mine else reason
    shown = [each for each in stack if _OF_TORCH not in each] or stack
    text = (
        f"rank {mine.rank} was ended, since it did not come back from its own code: {began}. It stood "
        f"{mine.text(time.time())}:\n{''.join(shown[-_SHOWN:])}"
    )
    try:
        _write_for_torchrun(text, stack)
    except (OSError, KeyError):
        print(text, file=sys.stderr, flush=True)
    shared.others.let_stopped_run()
    os._exit(1)


def _write_for_torchrun(text: str, stack: list[str]) -> None:
    """Leave the error where torchrun, and zbpp's own launcher, look for a rank's error."""
    more = {"py_callstack": "".join(stack), "timestamp": str(int(time.time()))}
    record = json.dumps({"message": {"message": text, "extraInfo": more}})
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(record)


def _stack(shared: _Shared) -> list[str]:
    """Where the main thread is, or was when its error was raised."""
    if shared.stack:
        return shared.stack
    frame = sys._current_frames().get(shared.watched)
    return [] if frame is None else traceback.format_stack(frame)


def _stack_of(error: BaseException) -> list[str]:
    """Where an error began, and the error."""
    first = first_cause(error)
    text = "".join(traceback.format_exception_only(error))  # with the notes, on lines of their own
    return [*traceback.format_tb(first.__traceback__), text]


def _write(shared: _Shared) -> None:
    """Write this rank's record, with what it knows of the others and where its program's code is."""
    if shared.folder is None:
        return
    flight = shared.flight
    others = [
        each
        for each in shared.others.standings.values()
        if each.pipeline == flight.pipeline and each.process != flight.process
    ]
    record = {
        **shared.title,
        **flight.record(),
        "why": shared.why,
        "said": shared.said,
        "others": [{**each._asdict(), "state": shared.others.state(each.process)} for each in others],
        "stack": _stack(shared),
    }
    with suppress(OSError):  # another error ends the job, and must not be hidden by this one
        shared.folder.mkdir(parents=True, exist_ok=True)
        (shared.folder / f"flight-rank-{flight.process}.json").write_text(json.dumps(record))
