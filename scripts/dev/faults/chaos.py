"""Many faults in one run, one after the other; each time the same command goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults.case import GRACE, Setting, made, newest_in, plan_of
from faults.job import curve_of
from faults.kinds import KINDS

# A job that goes on by itself is no start of its own; a NaN changes the curve.
NAMES = [name for name, kind in KINDS.items() if kind.ends != "goes on"]


@dataclass
class Event:
    """A fault behind a step: how long until no process was left (s), and from which step the run went on."""

    second: float
    fault: str
    where: str
    gone_after: float | None
    status: int | None
    goes_on_from: int

    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        gone = "never" if self.gone_after is None else f"{self.gone_after:.1f}"
        return f"{self.second:.0f}", self.fault, self.where, gone, str(self.status), str(self.goes_on_from)


HEAD = ("s", "fault", "where", "all processes gone after, s", "exit status", "goes on from step")


def drawn(num_faults: int, num_steps: int, seed: int) -> list[tuple[int, str]]:
    """(step, fault) of each fault, by step. No kind comes twice before every kind has come."""
    rng, names = Random(seed), list[str]()
    while len(names) < num_faults:
        names += rng.sample(NAMES, len(NAMES))
    gap = num_steps // (num_faults + 1)
    return [
        (gap * (number + 1) + rng.randrange(max(1, gap // 2)), name)
        for number, name in enumerate(names[:num_faults])
    ]


def chaos(
    setting: Setting, faults: list[tuple[int, str]], seed: int, folder: Path, show: Callable[[Event], None]
) -> list[Event]:
    """Put the faults into a run, then let it end. Raises RuntimeError if it does not go on."""
    made(folder)
    begin, rng, events = time.monotonic(), Random(seed), []
    run = folder / "run"
    for number, (step, name) in enumerate(faults):
        kind = KINDS[name]
        with suppress(FileNotFoundError):
            (folder / "fired").unlink()
        plan = plan_of(kind, step - newest_in(run), setting, rng)
        how = rng.choice(kind.hows)
        job = setting.job(folder, misbehave=plan, name=f"{number}", is_real=kind.is_real, how=how)
        try:
            injected = kind.inject(job, step, rng)
            gone = job.wait(setting.timeout + GRACE + 40)
        finally:
            job.kill()
        kind.before_next(run, rng)
        after = None if gone is None else gone - injected.time
        second = time.monotonic() - begin
        events.append(Event(second, name, injected.where, after, job.process.returncode, newest_in(run)))
        show(events[-1])
    job = setting.job(folder, name="last")
    gone = job.wait(60 + 2 * setting.steps)
    job.kill()
    if gone is None or job.process.returncode:
        raise RuntimeError(f"the run does not end:\n{job.text()[-6000:]}")
    return events


def problems_of(
    events: list[Event], setting: Setting, run: Path, whole: list[tuple[object, ...]]
) -> list[str]:
    """What must not be: a fault that is noticed late, another curve."""
    limit = setting.timeout + GRACE
    late = [each for each in events if each.gone_after is None or each.gone_after > limit]
    found = [f"{each.fault} {each.where}: {each.gone_after} s, later than {limit:g} s" for each in late]
    curve = curve_of(run)
    if curve != whole:
        same = sum(a == b for a, b in zip(curve, whole, strict=False))
        found.append(f"another curve: {len(curve)} lines, {same} of {len(whole)} equal")
    return found
