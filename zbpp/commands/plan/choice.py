"""--choose: which schedule to use, why, and the commands that train with it."""

from __future__ import annotations

import argparse
import shlex

from zbpp.commands.plan.arguments import CHOICE_SECONDS, COST_OPTIONS, Inputs, make_parser
from zbpp.commands.plan.drawing import draw
from zbpp.commands.plan.progress import bar
from zbpp.planning import Answer, PlanningRequest, choose
from zbpp.render import render_advice
from zbpp.schedule import PlanError


def advice(options: argparse.Namespace, inputs: Inputs, scripts: str) -> str:
    """The commands that train with the best plan, and why it is the best, as text to print.

    The drawings show the plans that fit the memory limit, best first.
    """
    if options.form or options.program is not None:
        raise PlanError("--text, --csv and --program show one schedule: name one instead of --choose")
    request = PlanningRequest(
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        costs=inputs.costs,
        memory_limit=inputs.memory_limit,
        objective=options.objective,
        time_limit=CHOICE_SECONDS if options.time_limit is None else options.time_limit,
        seed=options.seed,
        kept=options.kept,
    )
    with bar() as progress:
        answer = choose(request, progress)
    text, commands = render_advice(answer), _commands(options, answer, scripts)
    timelines = {choice.candidate.title: choice.candidate.timeline for choice in answer.ranked}
    table = [row[:-1] for row in text.ranked]  # each rank's peak stands beside its drawing
    notes = [commands, *inputs.notes, text.question]
    draw(options, timelines, inputs, notes=notes, table=table, more=text.more)
    return "\n\n".join([*inputs.notes, commands, str(text)])


def _commands(options: argparse.Namespace, answer: Answer, scripts: str) -> str:
    """What to type to train with the best plan: its name, or the file of a plan that depends on costs."""
    if scripts:
        plan = f"python {scripts}/plan.py"
        train = f"torchrun --standalone --nproc-per-node {options.ranks} {scripts}/train.py"
    else:
        plan, train = "zbpp plan", f"zbpp train -n {options.ranks}"
    best = answer.ranked[0].candidate
    if best.depends_on_costs:
        lines = [
            f"{plan} {best.title} {_same_question(options)} --text > plan.txt",
            f"{train} schedule.timetable=plan.txt num_microbatches={options.microbatches}",
        ]
    else:
        lines = [f"{train} schedule={best.name} num_microbatches={options.microbatches}"]
    return "\n".join([f"to train with the best plan, {best.title}:", *(f"  {line}" for line in lines)])


def _same_question(options: argparse.Namespace) -> str:
    """The options with which a plan for the same question is made again."""
    names = ("ranks", "microbatches", "memory_limit", "objective", "time_limit", "seed", "costs")
    given = {name: getattr(options, name) for name in (*names, *COST_OPTIONS)}
    defaults = vars(make_parser("").parse_args([]))
    return " ".join(
        f"--{name.replace('_', '-')} {_shell_word(value)}"
        for name, value in given.items()
        if name in ("ranks", "microbatches") or value != defaults[name]
    )


def _shell_word(value: object) -> str:
    numbers = value if isinstance(value, list) else [value]
    return shlex.quote(",".join(str(number).removesuffix(".0") for number in numbers))
