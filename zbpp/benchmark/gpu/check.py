"""The whole check: its parts one after the other, each with its time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zbpp.benchmark.gpu.budget import Budget
from zbpp.benchmark.gpu.machine import machine
from zbpp.benchmark.gpu.marks import Verdict, verdicts
from zbpp.benchmark.gpu.parts import PARTS
from zbpp.benchmark.gpu.rows import Outcome
from zbpp.benchmark.gpu.run import run_apart, run_here
from zbpp.benchmark.gpu.settings import Settings
from zbpp.benchmark.interruption import Interruption

Say = Callable[[str, str], None]  # (the part's title, what it has just found)


@dataclass(frozen=True)
class Report:
    """What a check has found."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    outcomes: list[Outcome]
    verdicts: list[Verdict]


def check(
    names: Sequence[str],
    *,
    device: str,
    is_small: bool,
    minutes: float,
    say: Say = lambda title, text: None,
    signals: Interruption | None = None,
) -> Report:
    """Run these parts, in the order of parts.py. After a signal the remaining parts are skipped."""
    signals = signals or Interruption()
    chosen = [part for part in PARTS if part.name in names]
    budget, outcomes = Budget(60 * minutes, chosen), []
    while not budget.is_over:
        part, seconds = budget.next()
        why = "" if importlib.util.find_spec(part.module) else "this version of zbpp does not have the part"
        why = why or ("" if seconds else "skipped: no time was left")
        why = f"skipped: {signals} ended the check" if signals.signal else why
        if why:
            outcomes.append(Outcome(part.name, part.title, why=why))
            continue
        settings = Settings(device=device, is_small=is_small, seconds=seconds)
        run = run_here if is_small and device == "cpu" else run_apart

        def tell(text: str, title: str = part.title) -> None:
            say(title, text)

        outcomes.append(run(part, settings, tell, signals))
    about = {"device": device, "small": is_small, "minutes": minutes, "parts": [each.name for each in chosen]}
    is_real = device == "cuda" and not is_small
    return Report(machine(device), about, outcomes, verdicts(outcomes, is_real=is_real))
