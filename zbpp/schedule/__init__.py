"""Timetables and what can be known of them without running anything: pure Python and numpy."""

from zbpp.partition import partition
from zbpp.schedule.bounds import Bound, Certificate, certificate, lower_bound
from zbpp.schedule.choose import Answer, Question, choose
from zbpp.schedule.compare import compare, per_stage_of
from zbpp.schedule.costs import Costs, CostsInBytes
from zbpp.schedule.costs_file import About, about_in_words, measured_layers, read_costs
from zbpp.schedule.dataflow import Value, consumes, produces
from zbpp.schedule.interchange import from_csv, from_json, read_timetable, to_csv, to_json
from zbpp.schedule.lower import Program, Programs, Recv, Release, Send, lower
from zbpp.schedule.memory import read_memory_limit
from zbpp.schedule.planner import SCHEDULES, canonical_name, placement_of, plan, takes_costs
from zbpp.schedule.render import (
    chrome_trace,
    render_figures,
    render_page,
    render_picture,
    render_table,
    render_text,
)
from zbpp.schedule.render.advice import render_advice
from zbpp.schedule.render.cuts import render_cuts
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.statements import Statement, statements
from zbpp.schedule.timetable import Action, Op, PlanError, Row, Timetable

__all__ = [
    "SCHEDULES",
    "About",
    "Action",
    "Answer",
    "Bound",
    "Certificate",
    "Costs",
    "CostsInBytes",
    "Op",
    "PlanError",
    "Program",
    "Programs",
    "Question",
    "Recv",
    "Release",
    "Row",
    "Send",
    "Statement",
    "Timeline",
    "Timetable",
    "Value",
    "about_in_words",
    "canonical_name",
    "certificate",
    "choose",
    "chrome_trace",
    "compare",
    "consumes",
    "from_csv",
    "from_json",
    "lower",
    "lower_bound",
    "measured_layers",
    "partition",
    "per_stage_of",
    "placement_of",
    "plan",
    "produces",
    "read_costs",
    "read_memory_limit",
    "read_timetable",
    "render_advice",
    "render_cuts",
    "render_figures",
    "render_page",
    "render_picture",
    "render_table",
    "render_text",
    "simulate",
    "statements",
    "takes_costs",
    "to_csv",
    "to_json",
]
