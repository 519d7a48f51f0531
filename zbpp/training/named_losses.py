"""Named losses (auxiliary losses, and losses that are dicts) beside the trainer's other metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zbpp.runtime.call import NamedLosses, summed

_LATER = {"measured_makespan_ms", "expected_makespan_ms"}
"""Metrics that only some steps have; their names are taken, too."""


def with_named_losses(metrics: Mapping[str, Any], losses: Mapping[str, float]) -> dict[str, Any]:
    """The metrics of a step, and its named losses. Raises ValueError for a loss with a metric's name."""
    taken = [name for name in losses if name in metrics or name in _LATER or name.startswith("evaluation_")]
    _refuse(taken, "the trainer")
    return {**metrics, **losses}


def with_evaluation_losses(metrics: Mapping[str, float], losses: NamedLosses) -> dict[str, float]:
    """A model's metrics of an evaluation, and its named losses. Raises ValueError if two have one name."""
    found = summed([losses.means()])
    _refuse(found.keys() & metrics.keys(), "the model's metrics(output, target)")
    return {**metrics, **found}


def _refuse(taken: Iterable[str], owner: str) -> None:
    if names := sorted(taken):
        raise ValueError(
            f"a loss is called {names[0]!r}, as a metric of {owner} is: give the loss another name, in "
            "zbpp.auxiliary_loss or in the dict of losses"
        )
