"""--picture, --html and --trace: timelines drawn to files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbpp.commands.plan.arguments import Inputs
from zbpp.render import chrome_trace, render_page, render_picture
from zbpp.schedule import PlanError, Timeline

Outcomes = Mapping[str, Timeline | PlanError]
"""For each schedule, its timeline, or the error that says why there is none."""


def draw(options: argparse.Namespace, outcomes: Outcomes, inputs: Inputs, **texts: Any) -> None:
    """Write the files that the options name. texts: notes, table and more, as `render_page` takes them."""
    if options.picture:
        render_picture(timelines_of(outcomes), options.picture)
    if options.trace:
        Path(options.trace).write_text(json.dumps(chrome_trace(timelines_of(outcomes))))
    if options.html:
        timelines = timelines_of(outcomes)
        timetables = {name: timeline.timetable for name, timeline in timelines.items()}
        costs = {
            name: inputs.costs.per_stage(timetable.num_stages, timetable.num_ranks)
            for name, timetable in timetables.items()
        }
        page = render_page(timelines, costs=costs, memory_limit=inputs.memory_limit, **texts)
        Path(options.html).write_text(page)


def timelines_of(outcomes: Outcomes) -> dict[str, Timeline]:
    """The timelines of the schedules that can run. Raises the first PlanError if none can."""
    timelines = {name: each for name, each in outcomes.items() if isinstance(each, Timeline)}
    errors = [each for each in outcomes.values() if isinstance(each, PlanError)]
    if errors and not timelines:
        raise errors[0]
    return timelines
