"""What a plan is: timetable, costs, timeline, the programs that ranks execute. Pure Python and numpy."""

from zbpp.schedule.costs import Costs, CostsInBytes
from zbpp.schedule.dataflow import Value, consumes, produces
from zbpp.schedule.interchange import from_csv, from_json, read_timetable, to_csv, to_json
from zbpp.schedule.lower import Program, Programs, Recv, Release, Send, lower
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import Action, Op, PlanError, Row, Timetable

__all__ = [
    "Action",
    "Costs",
    "CostsInBytes",
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
    "consumes",
    "from_csv",
    "from_json",
    "lower",
    "produces",
    "read_timetable",
    "simulate",
    "to_csv",
    "to_json",
]
