#!/usr/bin/env python
"""Choose, print, compare and draw timetables. Needs numpy (and matplotlib for --picture), no torch."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

# A fresh clone plans without being installed: installing would bring torch.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zbpp.models.flops import head_in_layers
from zbpp.planning import (
    SCHEDULES,
    About,
    Answer,
    PlanningRequest,
    RankCosts,
    about_in_words,
    choose,
    compare,
    measured_layers,
    read_costs,
    read_memory_limit,
    takes_costs,
)
from zbpp.render import (
    chrome_trace,
    render_advice,
    render_cuts,
    render_figures,
    render_page,
    render_picture,
    render_table,
    render_text,
)
from zbpp.schedule import (
    Costs,
    PlanError,
    Timeline,
    Timetable,
    lower,
    read_timetable,
    simulate,
    to_csv,
    to_json,
)

_DESCRIPTION = "Choose, print, compare and draw timetables of pipeline schedules. Needs no torch and no GPU."
_USAGE = "plan.py SCHEDULE [SCHEDULE ...] | --choose | --timetable FILE | --layers N   [options]"
_EXAMPLES = f"""\
schedules, in any case and in torch's spelling, too: {", ".join(SCHEDULES)}

costs: a single number is for one rank's share of the model; a schedule with two stages per rank
gets half of it per stage, so that all run the same model. A comma list is per stage; for another
number of stages they are halved or joined. --costs reads what scripts/measure.py writes.

examples:
  plan.py zb_h1 --ranks 4 --microbatches 8           the staircase and its figures
  plan.py --choose --ranks 4 --microbatches 8 --memory-limit 4      which one, and how to train with it
  plan.py --compare all --ranks 8 --microbatches 24 --f 18.5 --b 18.1 --w 9.3 --comm 0.6 --time-limit 2
  plan.py zb_auto --placement v --f 10 --b 12 --w 7 --time-limit 2  a plan for these costs
  plan.py 1f1b zb_h1 zb_v --picture compare.png --trace compare.json    (trace: ui.perfetto.dev)
  plan.py 1f1b zb_h1 zb_v --html compare.html        to zoom into, in any browser
  plan.py zb_h1 --f 10,12,12,9 --memory-limit 4      one number per stage; refuse above 4
  plan.py zb_v --program 1                           what rank 1 executes, with its messages
  plan.py zb_h1 --text > mine.txt                    as text: edit it, then check and time it with
  plan.py --timetable mine.txt                       (.csv: torch's; .json: ours)
  plan.py --layers 16 --head 3.8 --ranks 4           which layers belong on which stage?
  plan.py --layers 16 --hidden 2048 --vocab 128256 --sequence 4096  the head's cost from sizes
"""

_SEARCH, _CHOICE = 10.0, 45.0  # s: of a search, and of all that --choose does
_MOST_LAYERS = 4096  # a table of their pairs is made
_PATIENCE = 1.0  # s before a bar is drawn
_FORMS = {"text": str, "csv": to_csv, "json": to_json}

_COSTS = {
    "f": "forward, ms (default 1)",
    "b": "gradient of the input, ms (1)",
    "w": "gradients of the weights, ms (1)",
    "bw": "both in one piece, ms (b + w)",
    "comm": "a message, ms (0)",
    "saved": "memory held from F until B (1)",
    "deferred": "memory held from B until W (0.5)",
}

Outcomes = Mapping[str, Timeline | PlanError]
Bar = Callable[[float, str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status: 2 for a plan or a file that won't do."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.schedules += options.compare
    wanted = (bool(options.schedules), options.timetable is not None, options.choose, bool(options.layers))
    if sum(wanted) != 1:
        parser.error("name at least one schedule, or give --timetable FILE (not both), --choose or --layers")
    try:
        print(_cuts(options) if options.layers else _run(options), flush=True)
    except BrokenPipeError:  # `plan.py ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (PlanError, OSError, UnicodeDecodeError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> str:
    costs, about = _costs(options)
    notes = list(filter(None, [about_in_words(about)]))
    if options.choose:
        return "\n\n".join([*notes, _advice(options, costs, notes)])
    outcomes = _outcomes(options, costs)
    _draw(options, outcomes, costs, notes=notes)
    if options.form:
        return _FORMS[options.form](_only(outcomes).timetable)
    if options.program is not None:
        return _program(_only(outcomes).timetable, options.program)
    return "\n\n".join([*notes, _figures(options, outcomes)])


# ---------------------------------------------------------------- what is planned


def _outcomes(options: argparse.Namespace, costs: RankCosts) -> Outcomes:
    if options.timetable:
        timetable = read_timetable("/dev/stdin" if options.timetable == "-" else options.timetable)
        return {Path(options.timetable).stem: simulate(timetable, _own(costs, timetable))}
    names = [name for each in options.schedules for name in (SCHEDULES if each == "all" else [each])]
    with _bar() as show:
        return compare(
            names,
            options.ranks,
            options.microbatches,
            costs=costs,
            memory_limit=read_memory_limit(options.memory_limit, costs),
            placement=options.placement,
            objective=options.objective,
            time_limit=_SEARCH if options.time_limit is None else options.time_limit,
            seed=options.seed,
            progress=lambda share, *_: show(share, "searching"),
        )


def _advice(options: argparse.Namespace, costs: RankCosts, notes: Sequence[str]) -> str:
    """The commands that train with the best plan, and why; draws the plans that fit, best first."""
    if options.form or options.program is not None:
        raise PlanError("--text, --csv, --json and --program show one schedule: name one instead of --choose")
    request = PlanningRequest(
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        costs=costs,
        memory_limit=read_memory_limit(options.memory_limit, costs),
        objective=options.objective,
        time_limit=_CHOICE if options.time_limit is None else options.time_limit,
        seed=options.seed,
    )
    with _bar() as show:
        answer = choose(request, show)
    advice, commands = render_advice(answer), _commands(options, answer)
    outcomes = {choice.candidate.title: choice.candidate.timeline for choice in answer.ranked}
    notes = [commands, *notes, advice.question]
    table = [row[:-1] for row in advice.ranked]  # each rank's peak stands beside its drawing
    _draw(options, outcomes, costs, notes=notes, table=table, more=advice.more)
    return f"{commands}\n\n{advice}"


def _commands(options: argparse.Namespace, answer: Answer) -> str:
    """What to type to train with the best plan: by its name, or from a file if it depends on costs."""
    best = answer.ranked[0].candidate
    scripts = os.path.relpath(Path(__file__).parent)
    train = f"torchrun --standalone --nproc-per-node {options.ranks} {scripts}/train.py"
    if not takes_costs(best.name):
        lines = [f"{train} schedule={best.name} num_microbatches={options.microbatches}"]
    else:
        lines = [
            f"python {scripts}/plan.py {best.title} {_same(options)} --text > plan.txt",
            f"{train} schedule.timetable=plan.txt num_microbatches={options.microbatches}",
        ]
    return "\n".join([f"to train with the best plan, {best.title}:", *(f"  {line}" for line in lines)])


def _same(options: argparse.Namespace) -> str:
    """The flags with which a plan for the same question is made again."""
    names = ("ranks", "microbatches", "memory_limit", "objective", "time_limit", "seed", "costs")
    given = {name: getattr(options, name) for name in (*names, *_COSTS)}
    defaults = vars(_parser().parse_args([]))
    return " ".join(
        f"--{name.replace('_', '-')} {_word(value)}"
        for name, value in given.items()
        if name in ("ranks", "microbatches") or value != defaults[name]
    )


def _word(value: object) -> str:
    """As a shell takes it."""
    numbers = value if isinstance(value, list) else [value]
    return shlex.quote(",".join(str(number).removesuffix(".0") for number in numbers))


@contextmanager
def _bar() -> Iterator[Bar]:
    """Shows on a terminal how far a search is, once it has lasted a second."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda share, what: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar, begin = Progress(console=Console(stderr=True), transient=True), monotonic()
    task = bar.add_task("", total=1.0)

    def show(share: float, what: str) -> None:
        if monotonic() - begin > _PATIENCE:
            bar.start()
            bar.update(task, completed=share, description=what)

    try:
        yield show
    finally:
        bar.stop()


# ---------------------------------------------------------------- which layers go where


def _cuts(options: argparse.Namespace) -> str:
    if options.costs:
        costs, about = _costs(options)
        layers, first, last = measured_layers(costs, about, len(options.layers))
        return f"{about_in_words(about)}\n\n{render_cuts(layers, options.ranks, first=first, last=last)}"
    head = _estimated(options) if options.head is None else options.head
    return render_cuts(options.layers, options.ranks, first=options.embedding, last=head)


def _estimated(options: argparse.Namespace) -> float:
    """The head's cost in the unit of the layers; 0 if no sizes are given."""
    sizes = {name: getattr(options, name) for name in ("hidden", "vocab", "sequence")}
    missing = [f"--{name}" for name, size in sizes.items() if size is None]
    if len(missing) == len(sizes):
        return 0.0
    if missing:
        raise PlanError(f"the head's cost depends on hidden, vocab and sequence: add {', '.join(missing)}")
    mean: float = sum(options.layers) / len(options.layers)
    return mean * head_in_layers(
        layer_parameters=options.layer_parameters or 12 * options.hidden**2,
        hidden_size=options.hidden,
        vocab_size=options.vocab,
        sequence_length=options.sequence,
    )


# ---------------------------------------------------------------- what is read


def _costs(options: argparse.Namespace) -> tuple[RankCosts, About]:
    """The file's costs with the flags' over them, and what the file says of itself."""
    costs, about = read_costs(options.costs) if options.costs else (RankCosts(), {})
    flags = {name: getattr(options, name) for name in _COSTS}
    return replace(costs, **{name: value for name, value in flags.items() if value is not None}), about


# ---------------------------------------------------------------- what is shown


def _draw(options: argparse.Namespace, outcomes: Outcomes, costs: RankCosts, **texts: Any) -> None:
    if options.picture:
        render_picture(_timelines(outcomes), options.picture)
    if options.trace:
        Path(options.trace).write_text(json.dumps(chrome_trace(_timelines(outcomes))))
    if options.html:
        timelines = _timelines(outcomes)
        own = {name: _own(costs, each.timetable) for name, each in timelines.items()}
        limit = read_memory_limit(options.memory_limit, costs)
        Path(options.html).write_text(render_page(timelines, costs=own, memory_limit=limit, **texts))


def _own(costs: RankCosts, timetable: Timetable) -> Costs:
    return costs.per_stage(timetable.num_stages, timetable.num_ranks)


def _figures(options: argparse.Namespace, outcomes: Outcomes) -> str:
    if len(outcomes) > 1 or options.compare:
        return render_table(outcomes)
    timeline, width = _only(outcomes), options.width
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    return f"{render_text(timeline, width=width)}\n\n{render_figures(timeline)}"


def _timelines(outcomes: Outcomes) -> dict[str, Timeline]:
    """Those that can run. With none, the first refusal is the answer."""
    timelines = {name: each for name, each in outcomes.items() if isinstance(each, Timeline)}
    for refusal in [] if timelines else outcomes.values():
        raise refusal  # type: ignore[misc]  # no Timeline among them
    return timelines


def _only(outcomes: Outcomes) -> Timeline:
    if len(outcomes) > 1:
        raise PlanError(f"--text, --csv, --json and --program show one schedule; {len(outcomes)} are named")
    return next(iter(_timelines(outcomes).values()))


def _program(timetable: Timetable, rank: int) -> str:
    if not 0 <= rank < timetable.num_ranks:
        raise PlanError(f"--program {rank}: ranks are 0..{timetable.num_ranks - 1}")
    return str(lower(timetable)[rank])


# ---------------------------------------------------------------- the command line


def _numbers(text: str) -> float | list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a comma list of numbers"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def _layers(text: str) -> list[float]:
    """`24`: as many, of cost 1; `1,2,1`: their costs."""
    numbers = _numbers(text)
    if isinstance(numbers, list):
        return numbers
    if numbers > _MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{text!r}: {_MOST_LAYERS} layers are the most")
    if not numbers >= 1 or numbers % 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layers: write 24, or their costs 1,1,2")
    return [1.0] * int(numbers)


def _size(text: str) -> int:
    if not text.isdecimal() or not 1 <= float(text) <= 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write a whole number, 1 to 1e15")
    return int(text)


def _picture(path: str) -> str:
    if Path(path).suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{path!r} must end in .png, .pdf or .svg")
    return path


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage=_USAGE, description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=layout
    )
    what = parser.add_argument_group("what to plan")
    what.add_argument("schedules", nargs="*", metavar="SCHEDULE", help="a name, several, or 'all'")
    what.add_argument("--compare", nargs="+", default=[], metavar="SCHEDULE", help="the same, as a table")
    what.add_argument("--choose", action="store_true", help="rank them all; what would more memory bring?")
    what.add_argument("--timetable", metavar="FILE", help="read one: text ('-': stdin), .csv of torch, .json")
    what.add_argument("--ranks", type=int, default=4, metavar="P", help="default 4")
    what.add_argument("--microbatches", type=int, default=8, metavar="M", help="default 8")
    limit = "most that a rank may hold: 8 activations, 12GiB if the costs are in bytes; N,N,... per rank"
    what.add_argument("--memory-limit", metavar="N", help=limit)
    _add_search(parser.add_argument_group("searching (zb_auto, optimal, --choose)"))
    _add_costs(parser.add_argument_group("costs (a number per rank, or N,N,... per stage)"))
    _add_layers(parser.add_argument_group("splitting layers over stages"))
    _add_outputs(parser.add_argument_group("output"))
    return parser


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--placement", choices=("one", "looped", "v"), help="of stages (default one)")
    group.add_argument(
        "--objective", choices=("makespan", "span"), default="makespan", help="span: with post-validation"
    )
    seconds = f"seconds of a search ({_SEARCH:g}); with --choose of all together ({_CHOICE:g})"
    group.add_argument("--time-limit", type=float, metavar="S", help=seconds)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--costs", metavar="FILE", help='JSON such as {"f": 10, "b": [9, 11], ...}; flags win')
    for name, text in _COSTS.items():
        group.add_argument(f"--{name}", type=_numbers, metavar="N", help=text)


def _add_layers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layers", type=_layers, metavar="N", help="how many, or their costs N,N,...")
    group.add_argument("--embedding", type=float, default=0.0, metavar="N", help="its cost, same unit (0)")
    group.add_argument("--head", type=float, metavar="N", help="its cost (default: from sizes; else 0)")
    for name, text in {
        "hidden": "hidden size",
        "vocab": "tokens in the vocabulary",
        "sequence": "tokens in a sequence",
        "layer-parameters": "entries of a layer's matrices (12 hidden^2)",
    }.items():
        group.add_argument(f"--{name}", type=_size, metavar="N", help=text)


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    for name, text in {
        "text": "the raw timetable, as --timetable reads it",
        "csv": "the same as torch's CSV",
        "json": "the same as JSON",
    }.items():
        group.add_argument(f"--{name}", action="store_const", const=name, dest="form", help=text)
    group.add_argument("--program", type=int, metavar="RANK", help="what a rank executes, with its messages")
    group.add_argument("--picture", type=_picture, metavar="FILE", help="draw to FILE (.png, .pdf, .svg)")
    group.add_argument("--html", metavar="FILE", help="draw to a page for the browser, with memory curves")
    group.add_argument("--trace", metavar="FILE", help="write a Chrome trace (.json) for ui.perfetto.dev")
    group.add_argument(
        "--width", type=int, metavar="N", help="most columns of the staircase (the terminal's)"
    )


if __name__ == "__main__":
    sys.exit(main())
