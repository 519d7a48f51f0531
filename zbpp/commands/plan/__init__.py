"""`zbpp plan`: choose, print, compare and draw timetables. Needs numpy (matplotlib for --picture), no torch.

arguments.py  the options, and the costs and the memory limit that they give
lengths.py    --lengths: in which order microbatches of different lengths go
cluster.py    --cluster: what a model would take on a cluster
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zbpp.commands.plan.arguments import CHOOSE, CLUSTER, COST_OPTIONS, Inputs, make_parser, parsed
from zbpp.commands.plan.cluster import on_paper
from zbpp.commands.plan.lengths import Orders, ordered, render_orders, timelines_of
from zbpp.planning import (
    SCHEDULES,
    Answer,
    PlanningRequest,
    better_order,
    choose,
    choose_cut,
    compare,
    layers_of,
    messages_ahead,
    slowest_link,
    takes_costs,
    timetables_of_families,
    what_would_buy,
)
from zbpp.ranges import ConfigError
from zbpp.render import (
    render_bought,
    render_choice,
    render_cut,
    render_figures,
    render_page,
    render_picture,
    render_short_w,
    render_table,
    render_text,
)
from zbpp.schedule import Costs, PlanError, Timeline, Timetable, lower, read_timetable, simulate, to_csv
from zbpp.schedule.passes.posts import in_flight

Outcomes = Mapping[str, Timeline | PlanError]
"""For each schedule, its timeline, or the error that says why there is none."""


def _programs(timetable: Timetable) -> str:
    """All ranks' programs as they run on gloo, without what features put into them."""
    programs = (in_flight(program) for program in lower(timetable))
    return "\n\n".join(f"rank {program.rank}\n{program}" for program in programs)


_FORMS: dict[str, Callable[[Timetable], str]] = {"text": str, "csv": to_csv, "program": _programs}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, which is 2 for a plan or a file that can't be used.

    argv: without the command's own name; None: the process's.
    """
    form, options = parsed(argv)
    try:
        print(_answer(form, options), flush=True)
    except BrokenPipeError:  # `zbpp plan ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}", file=sys.stderr)
        return 2
    except (PlanError, ConfigError, UnicodeDecodeError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _answer(form: str, options: argparse.Namespace) -> str:
    with _bar() as progress:
        if form == CLUSTER:
            return on_paper(options, progress)
        inputs = Inputs.read(options)
        if form == CHOOSE and options.layers is not None:
            return _cut(options, inputs, progress)
        if form == CHOOSE:
            return _choice(options, inputs, progress)
        if options.lengths:
            return _in_orders(options, inputs, progress)
        outcomes = _from_file(options, inputs) if options.timetable else _by_name(options, inputs, progress)
    written = _draw(options, outcomes, inputs, inputs.notes)
    if options.form:
        return _FORMS[options.form](_only(outcomes).timetable)
    waits = _waits(outcomes, inputs)
    if len(outcomes) > 1:
        return "\n\n".join([*inputs.notes, render_table(outcomes), *waits, *written])
    return "\n\n".join([*inputs.notes, *_drawn(_only(outcomes)), *waits, *written])


def _waits(outcomes: Outcomes, inputs: Inputs) -> list[str]:
    """For each schedule that waits for a link, a line that says for which; in one paragraph."""
    found: list[str] = []
    for name, timeline in outcomes.items():
        if inputs.costs.links is not None and isinstance(timeline, Timeline):
            timetable = timeline.timetable
            link = slowest_link(timetable, inputs.costs_of(timetable))
            if link is not None:
                found.append(f"{name}: {link}" if len(outcomes) > 1 else str(link))
    return ["\n".join(found)] if found else []


def _drawn(timeline: Timeline) -> list[str]:
    """The staircase, and its figures."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return [render_text(timeline, width=width), render_figures(timeline)]


@contextmanager
def _bar() -> Iterator[Callable[[float, str], None]]:
    """Yield the function to call with (share done, what is being done): it draws a bar on standard error.

    Nothing is drawn where standard error is no terminal, or rich is missing.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda share, what: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=1.0)
        yield lambda share, what: bar.update(task, completed=share, description=what)


# ---------------------------------------------------------------- schedules by name, or from a file


def _from_file(options: argparse.Namespace, inputs: Inputs) -> Outcomes:
    try:
        timetable = read_timetable("/dev/stdin" if options.timetable == "-" else options.timetable)
    except FileNotFoundError:
        raise PlanError(
            f"--timetable {options.timetable}: there is no such file; zbpp plan NAME --text writes one"
        ) from None
    return {Path(options.timetable).stem: simulate(timetable, inputs.costs_of(timetable))}


def _by_name(options: argparse.Namespace, inputs: Inputs, progress: Callable[[float, str], None]) -> Outcomes:
    return compare(
        _names(options),
        options.ranks,
        options.microbatches,
        costs=inputs.costs,
        num_slices=inputs.slices[0],
        memory_limit=inputs.memory_limit,
        placement=options.placement,
        time_limit=options.time_limit,
        progress=lambda share, *_: progress(share, "searching"),
    )


def _names(options: argparse.Namespace) -> list[str]:
    return [name for given in options.schedules for name in (SCHEDULES if given == "all" else [given])]


def _in_orders(options: argparse.Namespace, inputs: Inputs, progress: Callable[[float, str], None]) -> str:
    """Each schedule's step with --lengths, in the given order and in the best one found."""
    found = ordered(_names(options), options, inputs.costs, inputs.memory_limit, progress)
    outcomes = timelines_of(found)
    drawn = _timelines(outcomes)
    says = [render_orders(name, each) for name, each in found.items() if isinstance(each, Orders)]
    says += _draw(options, drawn, inputs, [*inputs.notes, *says])
    if len(found) > 1:
        return "\n\n".join([*inputs.notes, render_table(outcomes), *says])
    texts = [text for name, each in drawn.items() for text in (f"{name}:", *_drawn(each))]
    return "\n\n".join([*inputs.notes, *texts, *says])


def _only(outcomes: Outcomes) -> Timeline:
    if len(outcomes) > 1:
        raise PlanError(f"--text, --csv and --program show one schedule; {len(outcomes)} are named")
    return next(iter(_timelines(outcomes).values()))


def _timelines(outcomes: Outcomes) -> dict[str, Timeline]:
    """The timelines of the schedules that can run. Raises the first PlanError if none can."""
    timelines = {name: each for name, each in outcomes.items() if isinstance(each, Timeline)}
    errors = [each for each in outcomes.values() if isinstance(each, PlanError)]
    if errors and not timelines:
        raise errors[0]
    return timelines


def _draw(
    options: argparse.Namespace,
    outcomes: Outcomes,
    inputs: Inputs,
    notes: Sequence[str],
    costs: Mapping[str, Costs] | None = None,
) -> list[str]:
    """Write the files that the options name, and say so.

    notes: paragraphs of the page. costs: of each schedule's stages; None: those of the inputs.
    """
    written = [each for each in (options.picture, options.html) if each]
    if not written:
        return []
    timelines = _timelines(outcomes)
    costs = costs or {name: inputs.costs_of(timeline.timetable) for name, timeline in timelines.items()}
    if options.picture:
        render_picture(timelines, options.picture, costs=costs)
    if options.html:
        page = render_page(timelines, costs=costs, memory_limit=inputs.memory_limit, notes=notes)
        Path(options.html).write_text(page)
    return [f"wrote {' and '.join(map(str, written))}"]


# ---------------------------------------------------------------- --choose


def _choice(options: argparse.Namespace, inputs: Inputs, progress: Callable[[float, str], None]) -> str:
    """The commands that train with the best plan, and all plans beside their bounds."""
    request = PlanningRequest(
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        costs=inputs.costs,
        memory_limit=inputs.memory_limit,
        time_limit=options.time_limit,
        slices=inputs.slices,
    )
    answer = choose(request, progress)
    bought = render_bought({"as asked": answer, **what_would_buy(request, progress)}) if options.links else ""
    timelines = {each.title: each.timeline for each in answer.ranked}
    texts = [*inputs.notes, _commands(options, answer, inputs), *_short_w(inputs), render_choice(answer)]
    texts += [bought] if bought else []
    return "\n\n".join([*texts, *_draw(options, timelines, inputs, texts)])


def _cut(options: argparse.Namespace, inputs: Inputs, progress: Callable[[float, str], None]) -> str:
    """How many layers each stage should have, and how to train so."""
    speeds, num_ranks = options.speeds or [1.0] * options.ranks, options.ranks
    if len(speeds) != num_ranks:
        raise PlanError(f"--speeds has {len(speeds)} numbers for {num_ranks} ranks: write one for each")
    counts = num_ranks, options.microbatches
    layers, limit = layers_of(inputs.costs, options.layers, num_ranks), inputs.memory_limit
    timetables = {
        name if num_slices == 1 else f"{name} schedule.slices={num_slices}": each
        for num_slices in inputs.slices
        for name, each in timetables_of_families(
            *counts, num_slices=num_slices, is_limited=limit is not None
        ).items()
    }
    run: dict[str, Any] = {"timetables": timetables, "time_limit": 0, "progress": progress}
    found = choose_cut(layers, speeds, counts[1], limit, **run)
    layers_per_stage = _shell_word([*found.layers_per_stage])
    title = f"{layers_per_stage} layers per stage, schedule={found.schedule}"
    text = render_cut(found, title, speeds, better_order(found, layers, speeds, limit, timetables))
    cut = f"auto parallel.speeds=[{_shell_word(speeds)}]"
    if found.costs.links is not None:  # which auto does not know
        cut = f"[{layers_per_stage}]"
    command = (
        f"zbpp train -n {num_ranks} schedule={found.schedule} num_microbatches={counts[1]} "
        f"model.layers_per_stage={cut}{_ahead(found.timetable, found.costs)}"
    )
    about = f"To train with it (add your model=, data= and other keys):\n  {command}"
    timelines = {found.schedule: simulate(found.timetable, found.costs)}
    notes = [*inputs.notes, text, about, *_short_w(inputs)]
    return "\n\n".join([*notes, *_draw(options, timelines, inputs, [text], {found.schedule: found.costs})])


def _short_w(inputs: Inputs) -> list[str]:
    note = render_short_w(*inputs.costs.work)
    return [note] if note else []


def _commands(options: argparse.Namespace, answer: Answer, inputs: Inputs) -> str:
    """What to type to train with the best plan: its name, or the file of a plan that depends on costs."""
    best = answer.ranked[0]
    train, end = f"zbpp train -n {options.ranks}", f"num_microbatches={options.microbatches}"
    if best.num_slices > 1:
        end += f" schedule.slices={best.num_slices}"
    end += _ahead(best.timeline.timetable, inputs.costs_of(best.timeline.timetable))
    lines = [f"  {train} schedule={best.name} {end}"]
    if takes_costs(best.name):
        lines = [
            f"  zbpp plan {best.title} {_same_question(options)} --text > plan.txt",
            f"  {train} schedule.timetable=plan.txt {end}",
        ]
    head = f"the best plan is {best.title}. To train with it (add your model=, data= and other keys):"
    return "\n".join([head, *lines])


def _ahead(timetable: Timetable, costs: Costs) -> str:
    """The key for links that need more messages under way; "" where none does."""
    number = messages_ahead(timetable, costs)
    return f" parallel.messages_ahead={number}" if number else ""


def _same_question(options: argparse.Namespace) -> str:
    """The options with which a plan for the same question is made again."""
    names = ("ranks", "microbatches", "memory_limit", "time_limit", "costs", "links")
    given = {name: getattr(options, name) for name in (*names, *COST_OPTIONS)}
    defaults = vars(make_parser().parse_args([]))
    return " ".join(
        f"--{name.replace('_', '-')} {_shell_word(value)}"
        for name, value in given.items()
        if name in ("ranks", "microbatches") or value != defaults[name]
    )


def _shell_word(value: object) -> str:
    numbers = value if isinstance(value, list) else [value]
    return shlex.quote(",".join(str(number).removesuffix(".0") for number in numbers))
