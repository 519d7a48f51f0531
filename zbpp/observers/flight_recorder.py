"""FlightRecorder: the last instructions of a rank, which go to a file when the rank fails or stands still.

When a message does not come, the rank that notices it is rarely the one to blame: it waited for a rank that
waited for another one. Each rank writes what it knows of itself. `zbpp hang FOLDER` reads the files of all
ranks and follows who waited for whom.

The recorder puts a function around each instruction, which notes the times at which the instruction began
and ended. Nothing else is done until something fails:

    ring    the last 1024 notes: [kind, text, time]
    kind    "call"       a call begins: "step 7", "evaluate after step 7"
            "at"         an instruction begins
            "done"       that instruction has ended
            "outside"    the call has ended
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from contextlib import suppress
from faulthandler import dump_traceback
from pathlib import Path
from time import monotonic

import torch.distributed as dist

from zbpp.error_text import error_text, shown_path
from zbpp.job.errors import CommunicationError
from zbpp.runtime.call.batch import Batch
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.executor import BeginAgain
from zbpp.runtime.extra import Observer
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.rank import Rank
from zbpp.schedule import to_csv
from zbpp.schedule.program import Instruction

Note = tuple[str, object, float]
"""(kind, what is done, time of time.monotonic). A plain tuple: an instruction makes two."""

_LENGTH = 1024


class FlightRecorder(Observer):
    """Writes `flight-rank-N.json` to a folder if this rank fails, or stands still for the pipeline's timeout.

    N is the rank's number in the job. A pipeline that no other process waits for writes nothing.
    """

    name = "flight_recorder"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._ring: deque[Note] = deque(maxlen=_LENGTH)
        self._watchdog: Watchdog | None = None

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._rank, self._job = rank, rank.place.broadcast(rank.key)
        self.process = dist.get_rank() if dist.is_initialized() else 0
        self._path = self._folder / f"flight-rank-{self.process}.json"
        self._call, self._has_failed, self._stacks = "before the first call", False, ""
        self._ring.append(("outside", "", monotonic()))
        if not rank.is_alone:
            self._watchdog = Watchdog(self)

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra."""
        note = self._ring.append

        def noted(message: Message) -> Message:
            note(("at", at, monotonic()))
            result = run(message)
            note(("done", at, monotonic()))
            return result

        return noted

    def announce(self, batch: Batch) -> None:
        """See Extra. The call begins, and its sizes are received like a message."""
        number = self._rank.num_steps
        after = f"after step {number}" if number else "before the first step"
        kind = batch.call.kind
        self._call = f"step {number + 1}" if kind == "step" else f"{kind} {after}"
        self._ring.append(("call", self._call, monotonic()))
        source = self._rank.source_of_sizes
        if source is not None:
            self._ring.append(("at", f"Recv sizes from {source}", monotonic()))

    def begin(self, call: Call) -> None:
        """See Extra."""
        if self._rank.source_of_sizes is not None:
            self._ring.append(("done", "Recv sizes", monotonic()))

    def end(self, call: Call, result: Result) -> None:
        """See Extra."""
        self._ring.append(("outside", "", monotonic()))

    def fail(self, error: BaseException) -> None:
        """Write the file, once; note on an error about a message where the user finds more.

        Also to be called with an error that was raised between calls and ends the program.
        """
        if self._has_failed or self._rank.is_alone or isinstance(error, BeginAgain):
            return
        self._has_failed = True
        self._stop()
        self.write(error)
        if isinstance(error, CommunicationError):
            folder = shown_path(self._folder)
            error.add_note(f"in {self._call}: `zbpp hang {folder}` shows which rank the others waited for")

    def close(self) -> None:
        """See Extra."""
        self._stop()
        self.discard()

    def _stop(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    # ------------------------------------------------------------ the file

    @property
    def newest(self) -> Note:
        """What this rank does now."""
        return self._ring[-1]

    @property
    def patience(self) -> float:
        """How many seconds this rank may do nothing before its file is written."""
        limit = self._rank.wait_limit
        return _SHARE * limit if self._rank.receives_on_device else limit + _GRACE

    def write(self, error: BaseException | None = None) -> None:
        """Write the file; any thread may call this. error: why the call ends; None: this rank stands still.

        A rank that stood still and finds a broken link afterwards keeps the stacks of the time before.
        """
        gave_up, now = isinstance(error, CommunicationError), time.time()
        if error is None:
            self._stacks = stacks_of_all_threads()
        offset, is_in_job = now - monotonic(), dist.is_initialized()
        group = self._rank.place.pipeline
        record = {
            "process": self.process,
            "rank": self._rank.index,
            "processes": dist.get_process_group_ranks(group or dist.group.WORLD) if is_in_job else [0],
            "num_processes": dist.get_world_size() if is_in_job else 1,
            "job": self._job,
            "timetable": to_csv(self._rank.timetable),
            "written": now,
            "why": "" if error is None or gave_up else error_text(error),
            "gave_up": gave_up,
            "call": self._call,
            "last": [(kind, str(what), begun + offset) for kind, what, begun in list(self._ring)],
            "stack": self._stacks if error is None or (gave_up and self._stacks) else _traceback_of(error),
        }
        with suppress(OSError):  # the error that ends the job must not be hidden by this one
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(record))

    def discard(self) -> None:
        """Remove the file of a rank that stood still: it goes on."""
        if self._stacks and not self._has_failed:
            self._stacks = ""
            with suppress(OSError):
                self._path.unlink()


_INTERVAL = 0.5  # s
_GRACE = 1.0  # s after the timeout: by then the ranks that waited for this one have given up
_SHARE = 0.5  # of the timeout, on NCCL: at the timeout torch's watchdog ends the process
_PATIENCE = 5.0  # s that `close` waits for the thread, which may write to a disk


class Watchdog:
    """A thread that lets a recorder write its file when its rank has done nothing for `patience` seconds.

    A rank that waits for a message gives up at its timeout, and raises an error. A rank that loops in its own
    code raises nothing, and no signal but SIGKILL ends a rank that waits in gloo. Then the other ranks fail,
    and torchelastic ends this process after its grace. Before that, the thread writes the rank's record. On
    NCCL torch's own watchdog ends the process, a timeout after an operation was queued: the record is written
    before. (This has not been run on a GPU.)

    Code that never gives up Python's lock keeps this thread from running: that rank leaves no record. Between
    calls a rank may be busy for longer, with a checkpoint for example: its file is removed again when the
    rank goes on.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        # A weak reference: a pipeline that is dropped without `close` ends its thread, too.
        self._recorder = weakref.ref(recorder)
        self._closed, self._is_written = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="zbpp-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the process lives, however long nothing happens."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL):
            recorder = self._recorder()
            if recorder is None:
                return self.close()
            self._look_at(recorder)
            del recorder

    def _look_at(self, recorder: FlightRecorder) -> None:
        *_, begun = recorder.newest
        is_quiet = monotonic() - begun > recorder.patience
        if is_quiet and not self._is_written:
            recorder.write()
        elif self._is_written and not is_quiet:
            recorder.discard()
        self._is_written = is_quiet


def stacks_of_all_threads() -> str:
    """Where each thread of this process is, as faulthandler shows it: innermost call first."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        dump_traceback(file)
        file.seek(0)
        return file.read()


def _traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
