"""What a plan is, and what it takes. Pure Python and numpy; imports no other room.

schedule    a name, such as zb_h1, and the rule behind it (in families/ or `zbpp.planning`)
timetable   what the rule makes for given counts: each rank's actions in order; also called a plan
timeline    a timetable with times: `simulate` predicts them, the runtime measures them
program     what one rank executes: its row of the timetable, with sends, receives and reductions; made by
            `lower`

The files, in the order in which to read them:

timetable.py        ops, actions (an op on one stage for one microbatch), timetables, and their text form
units.py            a microbatch, or a slice of one: what goes through the pipeline in one piece
dataflow.py         which values an action needs and makes: the only statement of dependencies
costs.py            how long actions and messages take, and how much memory is held between actions
slice_bounds.py     where the slices of sequences begin: which bounds there can be
order.py            the order in which microbatches go: which orders there can be
links.py            what a message takes of the link between two ranks
row_costs.py        the same for each action of a row, as arrays
timeline.py         when each action and each message ran, predicted or measured
check.py            whether a timetable has each of its actions once, and in order
simulate.py         timetable and costs -> timeline; refuses what can never finish
program.py          what one rank executes: every instruction that there is, as a value with a text
lower.py            timetable -> one program per rank: actions, sends, receives, reductions
passes/             Program -> Program: posts.py puts the starts of receives into a program
interpret/          what whole programs take, in time and in bytes
families/           the field's schedules: pure functions of counts, one file per family
passes/posts.py     where receives start: how far ahead of their use, on gloo and on NCCL
dataflow_arrays.py  the table of dataflow.py as arrays of numbers, for plans with millions of actions
interchange.py      timetables in files: text, and the CSV of torch.distributed.pipelining
"""

from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow import Value, consumes, produces
from zbpp.schedule.interchange import from_csv, read_timetable, to_csv
from zbpp.schedule.links import Links
from zbpp.schedule.lower import Programs, lower
from zbpp.schedule.program import Post, Program, Recv, Reduce, Release, Send
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import Action, Op, PlanError, Row, Timetable
from zbpp.schedule.units import Unit

__all__ = [
    "Action",
    "Costs",
    "Links",
    "Op",
    "PlanError",
    "Post",
    "Program",
    "Programs",
    "Recv",
    "Reduce",
    "Release",
    "Row",
    "Send",
    "Timeline",
    "Timetable",
    "Unit",
    "Value",
    "consumes",
    "from_csv",
    "lower",
    "produces",
    "read_timetable",
    "simulate",
    "to_csv",
]
