"""The options of `zbpp plan`, and what they say about the model: its costs and the memory limit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

from zbpp.commands.plan import cluster
from zbpp.planning import SCHEDULES, About, RankCosts, about_in_words, read_costs, read_memory_limit
from zbpp.planning.variants import KEPT
from zbpp.schedule import PlanError

SEARCH_SECONDS, CHOICE_SECONDS = 10.0, 45.0  # of one search; of all searches of --choose together
_MOST_LAYERS = 4096  # the split over stages makes a table of all pairs of layers

_DESCRIPTION = "Choose, print, compare and draw timetables of pipeline schedules. Needs no torch and no GPU."
_USAGE = (
    "{prog} SCHEDULE [SCHEDULE ...] | --choose | --timetable FILE | --layers N | --cluster FILE   [options]"
)
_EXAMPLES = """\
schedules, in any case and in torch's spelling, too: {schedules}

costs: a single number is for one rank's share of the model; a schedule with two stages per rank
gets half of it per stage, so that all run the same model. A comma list is per stage; for another
number of stages its entries are divided or added up. --costs reads the file that measuring writes.

examples:
  {prog} zb_h1 --ranks 4 --microbatches 8           the staircase and its figures
  {prog} --choose --ranks 4 --microbatches 8 --memory-limit 4      which one, and how to train with it
  {prog} --compare all --ranks 8 --microbatches 24 --f 18.5 --b 18.1 --w 9.3 --comm 0.6 --time-limit 2
  {prog} zb_auto --placement v --f 10 --b 12 --w 7 --time-limit 2  a plan for these costs
  {prog} 1f1b zb_h1 zb_v --picture compare.png --trace compare.json    (trace: ui.perfetto.dev)
  {prog} 1f1b zb_h1 zb_v --html compare.html        to zoom into, in any browser
  {prog} zb_h1 --f 10,12,12,9 --memory-limit 4      one number per stage; refuse above 4
  {prog} zb_v --program 1                           what rank 1 executes, with its messages
  {prog} zb_h1 --text > mine.txt                    as text: edit it, then check and time it with
  {prog} --timetable mine.txt                       (.csv: as torch writes it)
  {prog} --layers 16 --head 3.8 --ranks 4           which layers belong on which stage?
  {prog} --cluster h100 --model llama_1b --batch 512               on which mesh, how fast?
  {prog} --layers 16 --hidden 2048 --vocab 128256 --sequence 4096  the head's cost from sizes
"""

COST_OPTIONS = {
    "f": "forward, ms (default 1)",
    "b": "gradient of the input, ms (1)",
    "w": "gradients of the weights, ms (1)",
    "bw": "both in one piece, ms (b + w)",
    "comm": "a message, ms (0)",
    "saved": "memory held from F until B (1)",
    "deferred": "memory held from B until W (0.5)",
    "reduce": "sum of the gradients over replicas, once a step, ms (0)",
    "host": "copy of what F saves to host memory, or back, ms (0: none is made)",
    "static": "memory held all the time: weights, gradients, optimizer states (0)",
}


class Inputs(NamedTuple):
    """The costs, where they were measured, and the memory limit in the unit of costs.saved."""

    costs: RankCosts
    about: About
    memory_limit: float | list[float] | None

    @classmethod
    def read(cls, options: argparse.Namespace) -> Self:
        """The file's costs, overridden by those of the command line. Raises PlanError and OSError."""
        costs, about = _read_costs(options) if options.costs else (RankCosts(), {})
        flags = {name: getattr(options, name) for name in COST_OPTIONS}
        costs = replace(costs, **{name: value for name, value in flags.items() if value is not None})
        return cls(costs, about, read_memory_limit(options.memory_limit, costs))

    @property
    def notes(self) -> list[str]:
        """Where the costs were measured, in one line; nothing if they were not."""
        return [text for text in [about_in_words(self.about)] if text]


def _read_costs(options: argparse.Namespace) -> tuple[RankCosts, About]:
    """The file of --costs. Raises PlanError if there is none, or if its lists don't fit --ranks."""
    try:
        costs, about = read_costs(options.costs)
    except FileNotFoundError:
        raise PlanError(f"--costs {options.costs}: there is no such file; zbpp measure writes one") from None
    if options.timetable is None and not options.layers:
        _check_ranks(costs, about, options)
    return costs, about


def _check_ranks(costs: RankCosts, about: About, options: argparse.Namespace) -> None:
    ranks = options.ranks
    for name, value in costs.numbers.items():
        length = len(value) if isinstance(value, Sequence) else 1
        if length > 1 and ranks > 0 and length % ranks:
            raise PlanError(
                f"--costs {options.costs}: {name} has {length} numbers, one per stage, which can't be "
                f"divided among {ranks} ranks: write --ranks {about.get('num_ranks', length)}, or measure "
                f"with zbpp measure -n {ranks}"
            )


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The options, with help texts that call the command `prog`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=_USAGE.format(prog=prog),
        description=_DESCRIPTION,
        epilog=_EXAMPLES.format(prog=prog, schedules=", ".join(SCHEDULES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_subject(parser.add_argument_group("what to plan"))
    _add_search(parser.add_argument_group("searching (zb_auto, --choose)"))
    what = "costs (one number: for a rank's share of the model; N,N,...: one per stage)"
    _add_costs(parser.add_argument_group(what))
    _add_layers(parser.add_argument_group("cutting layers into stages"))
    cluster.add_options(parser.add_argument_group("scale on paper (with names: the schedules to try)"))
    _add_outputs(parser.add_argument_group("output"))
    return parser


def _add_subject(group: argparse._ArgumentGroup) -> None:
    group.add_argument("schedules", nargs="*", metavar="SCHEDULE", help="a name, several, or 'all'")
    table = "schedules to compare, in one table"
    group.add_argument("--compare", nargs="+", default=[], metavar="SCHEDULE", help=table)
    best = "sort all schedules, best first; show what more memory would bring"
    group.add_argument("--choose", action="store_true", help=best)
    read = "read a timetable: text ('-': stdin), or torch's .csv"
    group.add_argument("--timetable", metavar="FILE", help=read)
    group.add_argument("-n", "--ranks", type=int, default=4, metavar="P", help="default 4")
    group.add_argument("--microbatches", type=int, default=8, metavar="M", help="default 8")
    limit = (
        "the most memory that a rank may hold, such as 8 (activations) or, with costs in bytes, 12GiB; "
        "N,N,...: one per rank"
    )
    group.add_argument("--memory-limit", metavar="N", help=limit)


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--placement", choices=("one", "looped", "v"), help="of stages (default one)")
    objective = "makespan (default), or the largest span of a rank"
    group.add_argument("--objective", choices=("makespan", "span"), default="makespan", help=objective)
    seconds = f"seconds for a search (default {SEARCH_SECONDS:g}), or for --choose ({CHOICE_SECONDS:g})"
    group.add_argument("--time-limit", type=float, metavar="S", help=seconds)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    kept = f"--choose: share of `saved` that a stage keeps if it recomputes (default {KEPT:g})"
    group.add_argument("--kept", type=float, default=KEPT, metavar="SHARE", help=kept)


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--costs", metavar="FILE", help='JSON such as {"f": 10, "b": [9, 11], ...}; options win over it'
    )
    for name, text in COST_OPTIONS.items():
        group.add_argument(f"--{name}", type=_numbers, metavar="N", help=text)


def _add_layers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layers", type=_layers, metavar="N", help="how many, or their costs N,N,...")
    embedding = "cost of the embedding, in the unit of --layers (default 0)"
    group.add_argument("--embedding", type=float, default=0.0, metavar="N", help=embedding)
    head = "cost of the head, in the same unit (default: from the sizes below, else 0)"
    group.add_argument("--head", type=float, metavar="N", help=head)
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
        "csv": "the timetable as torch's CSV",
    }.items():
        group.add_argument(f"--{name}", action="store_const", const=name, dest="form", help=text)
    group.add_argument("--program", type=int, metavar="RANK", help="what a rank executes, with its messages")
    group.add_argument("--picture", type=_picture, metavar="FILE", help="draw to FILE (.png, .pdf, .svg)")
    group.add_argument("--html", metavar="FILE", help="draw to a page for the browser, with memory curves")
    group.add_argument("--trace", metavar="FILE", help="write a Chrome trace (.json) for ui.perfetto.dev")
    width = "most columns of the staircase (default: the terminal's width)"
    group.add_argument("--width", type=int, metavar="N", help=width)


def _numbers(text: str) -> float | list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a comma list of numbers"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def _layers(text: str) -> list[float]:
    """`24`: 24 layers of cost 1; `1,2,1`: the cost of each layer."""
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
