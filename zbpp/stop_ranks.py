"""End the ranks that are left when one has failed: those that loop, or are stopped, heed no SIGTERM.

torch would wait for them for 30 s. `zbpp train -n` knows of a failure by the file that a failed rank writes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from pathlib import Path
from threading import Event, Thread

KILLED = "killed"  # a file that says that the ranks which were left have been killed
_POLL, _GRACE = 0.2, 4.0  # s


@contextmanager
def killing_what_is_left(folder: Path) -> Iterator[None]:
    """Inside, SIGKILL this process's children _GRACE seconds after a rank has written its error to `folder`.

    A rank's error is a file named by the rank's number.
    """
    is_over = Event()
    thread = Thread(target=_watch, args=(folder, is_over), name="zbpp-stop-ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _watch(folder: Path, is_over: Event) -> None:
    while not is_over.wait(_POLL):
        if any(path.name.isdigit() for path in folder.iterdir()):
            if not is_over.wait(_GRACE):
                (folder / KILLED).touch()
                for child in active_children():
                    with suppress(ProcessLookupError):
                        os.kill(child.pid or 0, signal.SIGKILL)
            return
