"""The table of the faults, as text and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from faults.case import EVERY, GRACE, STEPS, Row
from zbpp.render.table import aligned


def summary_of(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """A line per kind of fault."""
    names = list(dict.fromkeys(row.fault for row in rows))
    table = [("fault", "injected", "detected after, s", "recovered", "done again, steps", "as it must be")]
    for name in names:
        of_kind = [row for row in rows if row.fault == name]
        times = [row.detected for row in of_kind if row.detected is not None]
        lost = [row.lost for row in of_kind if row.lost is not None]
        good = sum(not row.problems for row in of_kind)
        table.append(
            (
                name,
                of_kind[0].where,
                f"{min(times):.1f} to {max(times):.1f}" if times else "-",
                of_kind[0].recovered,
                f"{min(lost)} to {max(lost)}" if lost else "-",
                f"{good} of {len(of_kind)}",
            )
        )
    good = sum(not row.problems for row in rows)
    head = (
        f"{len(names)} kinds of faults, {len(rows)} jobs of {options.ranks} ranks, {STEPS} steps, a "
        f"checkpoint every {EVERY}; parallel.timeout={options.timeout:g}, to be detected within "
        f"{options.timeout + GRACE:g} s; {os.cpu_count()} cores, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )
    end = (
        f"{good} of {len(rows)} as it must be: detected in time, no process left, each step once, losses and "
        "norms equal to the last bit to those of the run without a fault, key words in the error"
    )
    return "\n".join([head, "", *aligned(table), "", end])


def write(folder: Path, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write faults_cpu.txt and faults_cpu.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faults_cpu.txt").write_text(summary_of(rows, options) + "\n")
    found = {"timeout": options.timeout, "ranks": options.ranks, "cases": [row.as_dict() for row in rows]}
    (folder / "faults_cpu.json").write_text(json.dumps(found, indent=1) + "\n")
