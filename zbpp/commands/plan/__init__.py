"""`zbpp plan`: choose, print, compare and draw timetables. Needs numpy (matplotlib for --picture), no torch.

arguments.py  the options, and the costs and the memory limit that they give
reads.py      which options each form of the command reads; others are refused
schedules.py  named schedules, or a timetable from a file: staircase, table, text, program
choice.py     --choose: which schedule to use, and the commands that train with it
layers.py     --layers: which layers belong on which stage
cluster.py    --cluster: what a model would take on a cluster
drawing.py    --picture, --html and --trace
progress.py   the bar that a long search shows
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zbpp.commands.plan.arguments import Inputs, make_parser
from zbpp.commands.plan.choice import advice
from zbpp.commands.plan.cluster import on_paper
from zbpp.commands.plan.layers import cuts
from zbpp.commands.plan.reads import form_of, given_options, refusal
from zbpp.commands.plan.schedules import show
from zbpp.ranges import ConfigError
from zbpp.schedule import PlanError


def main(argv: Sequence[str] | None = None, prog: str = "zbpp plan", scripts: str = "") -> int:
    """Run the command line; return the exit status, which is 2 for a plan or a file that can't be used.

    argv: without the command's own name; None: the process's. prog: the command's name in the help text.
    scripts: the folder of plan.py and train.py, if plan.py was called instead of the installed command.
    """
    parser = make_parser(prog)
    options = parser.parse_args(argv)
    options.schedules += options.compare
    try:
        form = form_of(options)
    except ValueError as error:
        parser.error(str(error))
    refused = refusal(form, given_options(parser, argv))
    if refused:
        parser.error(refused)
    try:
        print(_answer(options, scripts), flush=True)
    except BrokenPipeError:  # `zbpp plan ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (PlanError, ConfigError, OSError, UnicodeDecodeError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _answer(options: argparse.Namespace, scripts: str) -> str:
    if options.cluster is not None:
        return on_paper(options)
    if options.layers:
        return cuts(options)
    inputs = Inputs.read(options)
    return advice(options, inputs, scripts) if options.choose else show(options, inputs)
