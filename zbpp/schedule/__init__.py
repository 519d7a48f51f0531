"""What a plan is. Pure Python and numpy; imports no other folder of this package.

In the order in which to read them:

timetable.py        for each rank its actions in order, and the text form in which plans travel
dataflow.py         which values an action needs and makes: the only statement of dependencies
costs.py            how long actions and messages take, and how much memory is held between actions
simulate.py         timetable and costs -> timeline: when each action runs; refuses what can never finish
lower.py            timetable -> one program per rank: the actions with their sends and receives
dataflow_arrays.py  the table of dataflow.py as arrays of numbers, for plans with millions of actions
numbering.py        from an order of ops to a row of actions: how most families write their plans
transfers.py        a timeline's messages: when each one was sent and when it arrived
interchange.py      timetables in files: text, and the CSV of torch.distributed.pipelining
"""

from zbpp.schedule.costs import Costs, CostsInBytes
from zbpp.schedule.dataflow import Value, consumes, produces
from zbpp.schedule.interchange import from_csv, read_timetable, to_csv
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
    "lower",
    "produces",
    "read_timetable",
    "simulate",
    "to_csv",
]
