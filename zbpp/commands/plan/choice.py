"""--choose: which schedule to use, why, and the commands that train with it."""

from __future__ import annotations

import argparse
import os
import shlex

from zbpp.commands.plan.arguments import CHOICE_SECONDS, COST_OPTIONS, Inputs, make_parser
from zbpp.commands.plan.drawing import draw
from zbpp.commands.plan.progress import bar
from zbpp.planning import Answer, PlanningRequest, choose
from zbpp.planning.answer import Candidate
from zbpp.planning.objective import objective_value
from zbpp.planning.tolerance import EQUAL
from zbpp.planning.variants import Variant
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
        answer = choose(request, progress, num_processes=os.cpu_count() or 1)
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
    question = _same_question(options)

    def lines_of(candidate: Candidate, switches: str = "") -> list[str]:
        end = f"num_microbatches={options.microbatches}{switches}"
        if not candidate.depends_on_costs:
            return [f"  {train} schedule={candidate.name} {end}"]
        return [
            f"  {plan} {candidate.title} {question} --text > plan.txt",
            f"  {train} schedule.timetable=plan.txt {end}",
        ]

    best = answer.ranked[0].candidate
    lines = [f"to train with the best plan, {best.title}:", *lines_of(best)]
    faster = _faster_variant(answer)
    if faster is not None:
        candidate, variant = faster
        lines += [
            f"to train faster, by {candidate.title} with {variant.title}:",
            *lines_of(candidate, _switches(variant, options.costs or "costs.json")),
        ]
    return "\n".join(lines)


def _faster_variant(answer: Answer) -> tuple[Candidate, Variant] | None:
    """The best plan with offload or recompute, if it is faster than the best plan without."""
    if not answer.with_variants:
        return None
    candidate, variant = answer.with_variants[0]
    objective = answer.request.objective
    best = objective_value(answer.ranked[0].candidate.timeline, objective)
    found = objective_value(variant.timeline, objective)
    return (candidate, variant) if found < best * (1 - EQUAL) else None


def _switches(variant: Variant, costs: str) -> str:
    offload = f" memory.offload=auto schedule.costs={shlex.quote(costs)}" if variant.is_offloaded else ""
    recompute = " memory.recompute=auto memory.limit=GIB" if variant.recomputed else ""
    return offload + recompute


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
