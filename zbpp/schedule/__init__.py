"""Timetables and what can be known of them without running anything: pure Python and numpy."""

from zbpp.schedule.compare import compare, per_stage_of
from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow import Value, consumes, produces
from zbpp.schedule.lower import Program, Programs, Recv, Release, Send, lower
from zbpp.schedule.planner import SCHEDULES, placement_of, plan
from zbpp.schedule.render import chrome_trace, render_figures, render_picture, render_table, render_text
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import Action, Op, PlanError, Row, Timetable

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Op",
    "PlanError",
    "Program",
    "Programs",
    "Recv",
    "Release",
    "Row",
    "Send",
    "Timeline",
    "Timetable",
    "Value",
    "chrome_trace",
    "compare",
    "consumes",
    "lower",
    "per_stage_of",
    "placement_of",
    "plan",
    "produces",
    "render_figures",
    "render_picture",
    "render_table",
    "render_text",
    "simulate",
]
