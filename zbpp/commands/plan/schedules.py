"""Schedules that were named, or a timetable from a file: the staircase, a table, the text, a program."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from zbpp.commands.plan.arguments import SEARCH_SECONDS, Inputs
from zbpp.commands.plan.drawing import Outcomes, draw, timelines_of
from zbpp.commands.plan.progress import bar
from zbpp.planning import SCHEDULES, compare
from zbpp.render import render_figures, render_table, render_text
from zbpp.schedule import PlanError, Timeline, Timetable, lower, read_timetable, simulate, to_csv

_FORMS: dict[str, Callable[[Timetable], str]] = {"text": str, "csv": to_csv}


def show(options: argparse.Namespace, inputs: Inputs) -> str:
    """What the options ask for, as text to print; pictures, pages and traces are written to their files."""
    outcomes = _from_file(options, inputs) if options.timetable else _by_name(options, inputs)
    draw(options, outcomes, inputs, notes=inputs.notes)
    if options.form:
        return _FORMS[options.form](_only(outcomes).timetable)
    if options.program is not None:
        return _program(_only(outcomes).timetable, options.program)
    return "\n\n".join([*inputs.notes, _figures(options, outcomes)])


def _from_file(options: argparse.Namespace, inputs: Inputs) -> Outcomes:
    timetable = read_timetable("/dev/stdin" if options.timetable == "-" else options.timetable)
    costs = inputs.costs.per_stage(timetable.num_stages, timetable.num_ranks)
    return {Path(options.timetable).stem: simulate(timetable, costs)}


def _by_name(options: argparse.Namespace, inputs: Inputs) -> Outcomes:
    names = [name for given in options.schedules for name in (SCHEDULES if given == "all" else [given])]
    with bar() as progress:
        return compare(
            names,
            options.ranks,
            options.microbatches,
            costs=inputs.costs,
            memory_limit=inputs.memory_limit,
            placement=options.placement,
            objective=options.objective,
            time_limit=SEARCH_SECONDS if options.time_limit is None else options.time_limit,
            seed=options.seed,
            progress=lambda share, *_: progress(share, "searching"),
        )


def _figures(options: argparse.Namespace, outcomes: Outcomes) -> str:
    if len(outcomes) > 1 or options.compare:
        return render_table(outcomes)
    timeline, width = _only(outcomes), options.width
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    return f"{render_text(timeline, width=width)}\n\n{render_figures(timeline)}"


def _only(outcomes: Outcomes) -> Timeline:
    if len(outcomes) > 1:
        raise PlanError(f"--text, --csv and --program show one schedule; {len(outcomes)} are named")
    return next(iter(timelines_of(outcomes).values()))


def _program(timetable: Timetable, rank: int) -> str:
    if not 0 <= rank < timetable.num_ranks:
        raise PlanError(f"--program {rank}: ranks are 0..{timetable.num_ranks - 1}")
    return str(lower(timetable)[rank])
