"""Costs as scripts/measure.py writes them: a JSON object with the fields of `Costs`, and `about`."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from zbpp.partition import layers_of
from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import Op, PlanError

About = dict[str, Any]
"""What was measured, where and how: any keys."""

_NAMES = [field.name for field in fields(Costs)]


def read_costs(text: str, name: str = "the file") -> tuple[dict[str, Any], About]:
    """(the fields of Costs that are given, about). Raises PlanError, with the name, for anything else."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{name} is no JSON: {error}") from None
    if not isinstance(given, dict) or not given.keys() <= {*_NAMES, "about"}:
        wrong = sorted(given.keys() - {*_NAMES, "about"}) if isinstance(given, dict) else given
        raise PlanError(
            f"{name}: {wrong!r} is no cost; an object with any of {', '.join(_NAMES)} is expected"
        )
    about = given.pop("about", {})
    if not isinstance(about, dict):
        raise PlanError(f"{name}: about is {about!r}; an object is expected")
    return given, about


def about_in_words(about: About) -> str:
    """One line, empty without anything to say; what is a table itself stays in the file."""
    plain = {key: value for key, value in about.items() if not isinstance(value, dict | list)}
    words = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in plain.items())
    return f"costs measured: {words}" if words else ""


def measured_layers(costs: Costs, about: About, num_layers: int) -> tuple[list[float], float, float]:
    """(layers, first, last) as `zbpp.partition.partition` takes them, in ms of F, B and W together.

    about["layers_per_stage"] says how many layers each measured stage had. Raises PlanError if it
    doesn't, or for another number of layers.
    """
    counts = about.get("layers_per_stage")
    if not isinstance(counts, list) or sum(counts) != num_layers:
        raise PlanError(
            f"these costs were measured with layers_per_stage={counts}, not with {num_layers} layers: "
            "give that model's number, or give --head instead of --costs"
        )
    times = costs.per_stage(len(counts)).duration
    stages = [sum(times[op][stage] for op in (Op.F, Op.B, Op.W)) for stage in range(len(counts))]
    try:
        return layers_of(stages, counts)
    except ValueError as error:
        raise PlanError(str(error)) from None
