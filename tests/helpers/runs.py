"""What a run has left in its folder."""

import json
from pathlib import Path
from typing import Any


def metrics_in(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses_in(run: Path) -> list[float]:
    """The loss of each step."""
    return [each["loss"] for each in metrics_in(run)]


def curve(run: Path) -> list[tuple[int, float, float]]:
    """Step, loss and norm of the gradients of each step."""
    return [(each["step"], each["loss"], each["grad_norm"]) for each in metrics_in(run)]
