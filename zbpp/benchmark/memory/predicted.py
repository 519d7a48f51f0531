"""Predicted memory beside measured: the peak of each rank's last step, under three schedules."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zbpp.planning.memory_limit import memory_text
from zbpp.schedule.costs import BYTES

MODELS = ("gpt_tiny", "llama_tiny")
SCHEDULES = ("1f1b", "zb_h1", "v_half")
NUM_RANKS, NUM_MICROBATCHES = 2, 6


def rows() -> list[tuple[str, str]]:
    """(what, figure) per model, schedule and rank. Starts a job of two ranks for each."""
    return [row for model in MODELS for schedule in SCHEDULES for row in _rows(model, schedule)]


def _rows(model: str, schedule: str) -> list[tuple[str, str]]:
    report = measured(f"model={model}", f"schedule={schedule}")
    name = f"{model}, {schedule}"
    return [
        (f"{name}, rank {each['rank']}: peak predicted, measured", _figure(each)) for each in report["ranks"]
    ]


def _figure(rank: dict[str, Any]) -> str:
    predicted, found = rank["predicted"]["peak"], rank["measured"]["peak"]
    pairs = zip(rank["predicted"]["during"], rank["measured"]["during"], strict=True)
    worst = max(abs(one - other) for one, other in pairs) / found
    peaks = f"{memory_text(predicted, BYTES)}, {memory_text(found, BYTES)}"
    return f"{peaks}; any action: within {worst:.2%} of the peak"


def measured(*overrides: str) -> dict[str, Any]:
    """memory.json of a short training run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "zbpp",
            "train",
            "-n",
            str(NUM_RANKS),
            "steps=4",
            "memory.report=true",
        ]
        given = [f"num_microbatches={NUM_MICROBATCHES}", "evaluate_every=0", "save_weights=false"]
        run_dir = f"run_dir={folder}/run"
        subprocess.run([*command, *given, *overrides, run_dir], check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads((Path(folder) / "run" / "memory.json").read_text())
        return found
