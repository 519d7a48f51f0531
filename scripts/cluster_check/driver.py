"""Runs the parts on all ranks at the same time, and puts together on rank 0 how they ended.

Each rank's driver starts the part's process of its rank. The drivers share a store, and nothing else: no part
can break it.

    limit/3        rank 0: part 3 begins, and lasts so many seconds at most
    failed/3       the first rank on which part 3 failed: the other ranks' processes are ended soon after
    ended/3/1      rank 1: how part 3 ended there, and the end of its page if it failed
    end            rank 0: the page is written
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_check.parts import LEAST, Part, leave_out, new_file, run_part, write_page

_SPARE = 20.0  # s in which a rank's answer comes after the part's limit
_GRACE = 15.0  # s that a part goes on after it has failed on another rank: ranks that notice it say so
_FINE = "fine"
_SAID = 4000  # characters of another rank's page, if its part failed


class Driver:
    """The driver of one rank, which runs the parts of this rank one after the other.

    store: torch's, shared by all ranks. command: of a part. out: the folder of the page.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        size: int,
        command: Callable[[Part], Sequence[str]],
        out: Path,
    ) -> None:
        self._store, self._prefix, self._rank, self._size, self._command = store, prefix, rank, size, command
        self._out = out if rank == 0 else out / f"rank-{rank}"
        self._out.mkdir(parents=True, exist_ok=True)
        self._failed: dict[str, str] = {}  # by part: on which ranks; known to rank 0

    def run(self, parts: Sequence[Part], seconds: float) -> int:
        """Run the parts, in so many seconds; returns rank 0's exit status: 1 if a part failed. Collective."""
        end = time.monotonic() + seconds
        for number, part in enumerate(parts):
            limit = self._agreed(f"limit/{number}", min(part.limit, end - time.monotonic()), seconds)
            path = new_file(self._out, part.name)
            try:
                self._part(number, part._replace(limit=limit), path)
            finally:
                if self._rank == 0:
                    write_page(self._out, f"zbpp on {self._size} ranks, {time.strftime('%Y-%m-%d %H:%M')}")
                    print(path.read_text(), flush=True)
        self._agreed("end", 0.0, seconds)
        if self._rank == 0:
            text = ", ".join(f"{name} ({how})" for name, how in self._failed.items())
            print(f"parts that failed: {text or 'none'}; the page: {self._out / 'page.md'}", flush=True)
        return int(bool(self._failed))

    def _part(self, number: int, part: Part, path: Path) -> None:
        """Run one part here. Rank 0 adds what other ranks say."""
        if part.limit < LEAST:
            leave_out(part, path, part.limit)
            self._failed[part.name] = "left out"
            return
        end = time.monotonic() + part.limit + _SPARE
        is_fine = run_part(part, self._command(part), path, self._stop(number))
        if not is_fine:
            self._store.compare_set(f"{self._prefix}/failed/{number}", "", f"{self._rank}")
        self._set(f"ended/{number}/{self._rank}", _FINE if is_fine else path.read_text()[-_SAID:])
        if self._rank == 0:
            self._hear(number, part, path, end, [] if is_fine else [0])

    def _hear(self, number: int, part: Part, path: Path, end: float, failed: list[int]) -> None:
        """Add to the page what the other ranks say, if their part failed."""
        with path.open("a") as file:
            for other in range(1, self._size):
                said = self._get(f"ended/{number}/{other}", end - time.monotonic())
                if said != _FINE:
                    failed.append(other)
                    print(f"\nrank {other} says:\n\n{said or 'nothing: its driver is gone'}", file=file)
            if failed:
                first = self._get(f"failed/{number}", 0.0) or failed[0]
                how = f"first on rank {first}, of {', '.join(map(str, failed))}"
                self._failed[part.name] = how
                print(f"\n{part.name}: FAILED {how}", file=file)

    def _stop(self, number: int) -> Callable[[], str]:
        """Says, while a part runs, why it has to end: it has failed on another rank a while ago."""
        known: list[float] = []  # since when

        def stop() -> str:
            rank = self._get(f"failed/{number}", 0.0)
            if rank is None:
                return ""
            known[:] = known or [time.monotonic()]
            is_over = time.monotonic() - known[0] > _GRACE
            return f"it failed on rank {rank} {_GRACE:.0f} s before" if is_over else ""

        return stop

    def _agreed(self, name: str, value: float, seconds: float) -> float:
        """Rank 0's number, on every rank."""
        if self._rank == 0:
            self._set(name, str(value))
            return value
        told = self._get(name, seconds + _SPARE)
        return float(told) if told else 0.0

    def _set(self, name: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{name}", value)

    def _get(self, name: str, timeout: float) -> str | None:
        """A value of the store; None if it does not come within so many seconds."""
        key, end = f"{self._prefix}/{name}", time.monotonic() + timeout
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        value: Any = self._store.get(key)
        return str(value.decode())
