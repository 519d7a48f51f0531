"""The options of `zbpp plan`: which of them each form of the command reads, and the costs that they say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

from zbpp.commands.plan import cluster
from zbpp.commands.plan.lengths import packed, read_lengths
from zbpp.planning import (
    SCHEDULES,
    About,
    RankCosts,
    about_in_words,
    balanced_shares,
    read_costs,
    read_links,
    read_memory_limit,
)
from zbpp.render import render_short_w
from zbpp.schedule import Costs, PlanError, Timetable
from zbpp.schedule.slice_bounds import checked_bounds

_USAGE = "zbpp plan SCHEDULE [SCHEDULE ...] | --choose | --timetable FILE | --cluster FILE   [options]"
_EXAMPLES = f"""\
schedules: {", ".join(SCHEDULES)}

costs: a single number is for one rank's share of the model; a schedule with two stages per rank
gets half of it per stage, so that all run the same model. A comma list is per stage; for another
number of stages its entries are divided or added up. --costs reads the file that measuring writes.

examples:
  zbpp plan zb_h1 --ranks 4 --microbatches 8           the staircase and its figures
  zbpp plan --choose --ranks 4 --microbatches 8 --memory-limit 4      which one, and how to train with it
  zbpp plan --choose --layers 32 --speeds 1,1,2,2      how many layers each stage should have
  zbpp plan all --ranks 8 --microbatches 24 --f 18.5 --b 18.1 --w 9.3 --comm 0.6 --time-limit 2
  zbpp plan zb_auto --placement v --f 10 --b 12 --w 7 --time-limit 2  a plan for these costs
  zbpp plan 1f1b zb_h1 zb_v --html compare.html --picture compare.png  to zoom into, in any browser
  zbpp plan zb_h1 --f 10,12,12,9 --memory-limit 4      one number per stage; refuse above 4
  zbpp plan zb_h1 --text > mine.txt                    as text: edit it, then check and time it with
  zbpp plan --timetable mine.txt                       (.csv: as torch writes it)
  zbpp plan zb_v --ranks 4 --lengths tokens.txt        in which order do unequal microbatches go?
  zbpp plan zb_v 1f1b --ranks 8 --slices 8             long sequences, in slices one after the other
  zbpp plan --cluster h100 --model llama_1b --batch 512               on which mesh, how fast?
"""

COST_OPTIONS = {
    "f": "forward, ms (default 1)",
    "b": "gradient of the input, ms (1)",
    "w": "gradients of the weights, ms (1)",
    "comm": "a message, ms (0)",
    "exchange": "exchanges of tokens among experts inside F, and inside B, ms (0)",
}

NAMED, TIMETABLE, CHOOSE, CLUSTER = "SCHEDULE", "--timetable", "--choose", "--cluster"
_MICROBATCHES = 8
_TRIED = [1.0, 2.0, 4.0, 8.0]  # numbers of slices
_COSTS = {"costs", *COST_OPTIONS, "links", "memory_limit"}
_DRAWN = {"picture", "html"}
_SEARCH = {"ranks", "microbatches", "time_limit"}
READ = {
    NAMED: {"schedules", "placement", "form", "lengths", "slices", *_SEARCH, *_COSTS, *_DRAWN},
    TIMETABLE: {"timetable", "form", "slices", *_COSTS, *_DRAWN},
    CHOOSE: {"choose", "slices", "layers", "speeds", *_SEARCH, *_COSTS, *_DRAWN},
    CLUSTER: {"schedules", "cluster", "model", "batch", "degrees", "sequence", "head_at_once"},
}
"""The options that each form of the command reads; a form is named by the words that choose it."""


class Inputs(NamedTuple):
    """The costs, where they were measured, and the memory limit in the unit of costs.saved.

    slices: the numbers of slices to plan; several only with --choose. packing: how sequences share
    microbatches, in a line; "" where they don't.
    """

    costs: RankCosts
    about: About
    memory_limit: float | list[float] | None
    slices: tuple[int, ...] = (1,)
    packing: str = ""

    @classmethod
    def read(cls, options: argparse.Namespace) -> Self:
        """The file's costs, overridden by those of the command line. Raises PlanError and OSError."""
        costs, about = _read_costs(options) if options.costs else (RankCosts(), {})
        note = ""
        flags = {name: getattr(options, name) for name in COST_OPTIONS}
        costs = replace(costs, **{name: value for name, value in flags.items() if value is not None})
        if options.links:
            costs = replace(costs, links=read_links(options.links))
        if options.lengths:
            lengths, note = packed(read_lengths(options.lengths, options.microbatches), options.microbatches)
            costs = costs.of_tokens(lengths)
        costs, slices = _sliced(costs, options)
        return cls(costs, about, read_memory_limit(options.memory_limit, costs), slices, note)

    def costs_of(self, timetable: Timetable) -> Costs:
        """The costs per stage of this timetable, with slices that take equally long unless they are told."""
        costs = self.costs.per_stage(timetable.num_stages, timetable.num_ranks)
        if timetable.num_slices > 1 and not costs.slice_bounds:
            costs = costs.sliced(balanced_shares(timetable.num_slices, self.costs))
        return costs

    @property
    def notes(self) -> list[str]:
        """Where the costs were measured, where slices begin, and what was packed, in one line each."""
        return [text for text in [about_in_words(self.about), self._slices, self.packing] if text]

    @property
    def _slices(self) -> str:
        if not self.costs.slice_bounds:
            return ""
        if self.costs.shape is None:
            bounds = ", ".join(f"{each:.3g}" for each in self.costs.slice_bounds)
            return f"{self.slices[0]} slices, cut at these shares of a sequence: {bounds}"
        bounds = ", ".join(f"{each * self.costs.shape[1]:.0f}" for each in self.costs.slice_bounds)
        return f"{self.slices[0]} slices, cut at these tokens: {bounds}"


def _sliced(costs: RankCosts, options: argparse.Namespace) -> tuple[RankCosts, tuple[int, ...]]:
    """The costs with the bounds of --slices, and the numbers of slices.

    One number: so many slices that take equally long. Several from 0 on: their bounds. Several for --choose:
    the numbers of slices to try; without --slices it tries some where attention's part of the time is known,
    or where W is so short that slices bring the most. Raises PlanError.
    """
    is_told = costs.quadratic is not None or (render_short_w(*costs.work) and options.layers is None)
    given: list[float] = options.slices or (_TRIED if options.choose and is_told else [])
    if not given:
        return costs, (1,)
    are_counts = all(each >= 1 and each.is_integer() for each in given)
    if options.choose and not are_counts:
        raise PlanError(f"--slices {_comma(given)}: --choose balances slices; write their numbers, as 1,2,4")
    if options.choose:
        return costs, tuple(map(int, given))
    if len(given) > 1 and given[0] == 0:
        return costs.sliced(checked_bounds(given, name="--slices")), (len(given) - 1,)
    if len(given) > 1 or not are_counts:
        raise PlanError(
            f"--slices {_comma(given)}: write how many, as 8; or where slices begin, from 0 on, and the "
            "sequence's end, as 0,4096,7168,8192; --choose tries several numbers"
        )
    count = int(given[0])
    return (costs if count == 1 else costs.sliced(balanced_shares(count, costs))), (count,)


def _comma(numbers: Sequence[float]) -> str:
    return ",".join(f"{each:g}" for each in numbers)


def _read_costs(options: argparse.Namespace) -> tuple[RankCosts, About]:
    """The file of --costs. Raises PlanError if there is none, or if its lists don't fit --ranks."""
    try:
        costs, about = read_costs(options.costs)
    except FileNotFoundError:
        raise PlanError(f"--costs {options.costs}: there is no such file; zbpp measure writes one") from None
    is_of_ranks = options.timetable is None and options.layers is None
    for name, value in costs.numbers.items() if is_of_ranks else ():
        length = len(value) if isinstance(value, Sequence) else 1
        if length > 1 and options.ranks > 0 and length % options.ranks:
            raise PlanError(
                f"--costs {options.costs}: {name} has {length} numbers, one per stage, which can't be "
                f"divided among {options.ranks} ranks: write --ranks {about.get('num_ranks', length)}"
            )
    return costs, about


def parsed(argv: Sequence[str] | None) -> tuple[str, argparse.Namespace]:
    """(the form of the command, its options). Ends the process, with the usage, for what goes wrong.

    An option that the form does not read is refused.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    wanted = {
        NAMED: bool(options.schedules) and options.cluster is None,  # with --cluster: the schedules to try
        TIMETABLE: options.timetable is not None,
        CHOOSE: options.choose,
        CLUSTER: options.cluster is not None,
    }
    chosen = [form for form, is_chosen in wanted.items() if is_chosen]
    if len(chosen) != 1:
        parser.error("name at least one schedule, or give one of --choose, --timetable and --cluster")
    unset = object()
    names = dict.fromkeys(vars(options), unset)
    given = vars(parser.parse_args(argv, argparse.Namespace(**names)))
    for name, value in given.items():
        if name not in READ[chosen[0]] and value is not unset and value != []:
            written = value if name == "form" else name.replace("_", "-")
            others = [form for form, read in READ.items() if name in read]
            parser.error(f"--{written} doesn't go with {chosen[0]}; it goes with {' and with '.join(others)}")
    if options.lengths and options.form:
        parser.error(f"--{options.form} doesn't go with --lengths: the timetable is the same in every order")
    if options.lengths and options.slices:
        parser.error("--slices doesn't go with --lengths, which orders whole microbatches")
    if options.speeds and options.layers is None:
        parser.error("--speeds chooses how many layers each rank gets: add --layers 32, say")
    if options.microbatches is None and not options.lengths:
        options.microbatches = _MICROBATCHES
    return chosen[0], options


def make_parser() -> argparse.ArgumentParser:
    """The options of `zbpp plan`."""
    parser = argparse.ArgumentParser(
        prog="zbpp plan",
        usage=_USAGE,
        description="Choose, print, compare and draw timetables of schedules. Needs no torch and no GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_subject(parser.add_argument_group("what to plan"))
    _add_search(parser.add_argument_group("searching (zb_auto, --choose)"))
    what = "costs (one number: for a rank's share of the model; N,N,...: one per stage)"
    _add_costs(parser.add_argument_group(what))
    cluster.add_options(parser.add_argument_group("scale on paper (with names: the schedules to try)"))
    _add_outputs(parser.add_argument_group("output"))
    return parser


def _add_subject(group: argparse._ArgumentGroup) -> None:
    table = "a name; several or 'all': a table"
    group.add_argument("schedules", nargs="*", metavar="SCHEDULE", help=table)
    lengths = (
        "a microbatch's number of tokens a line, or a JSON list: draw the step in this order and in the best "
        "one found; costs are those of the mean length, or of the length at which --costs were measured; "
        "with fewer --microbatches: sequences, packed"
    )
    group.add_argument("--lengths", metavar="FILE", help=lengths)
    group.add_argument("--choose", action="store_true", help="rank all schedules, best first")
    layers = "with --choose: how many layers each stage should have, of so many"
    group.add_argument("--layers", type=int, metavar="L", help=layers)
    speeds = "with --layers: of each rank, such as 1,1,2,2 (default: all alike)"
    group.add_argument("--speeds", type=_list_of_numbers, metavar="N,N,...", help=speeds)
    read = "read a timetable: text ('-': stdin), or torch's .csv"
    group.add_argument("--timetable", metavar="FILE", help=read)
    group.add_argument("-n", "--ranks", type=int, default=4, metavar="P", help="default 4")
    many = f"default {_MICROBATCHES}; with --lengths their number"
    group.add_argument("--microbatches", type=int, default=None, metavar="M", help=many)
    slices = (
        "cut sequences into S slices that take equally long, or at these tokens (0,4096,7168,8192); with "
        "--choose: the numbers of slices to try (1,2,4)"
    )
    group.add_argument("--slices", type=_list_of_numbers, metavar="S", help=slices)
    limit = (
        "the most memory that a rank may hold, such as 8 (activations) or, with costs in bytes, 12GiB; "
        "N,N,...: one per rank"
    )
    group.add_argument("--memory-limit", metavar="N", help=limit)


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--placement", choices=("one", "looped", "v"), help="of stages (default one)")
    seconds = "seconds for a search, or for all of --choose, which with --links chooses up to four times (10)"
    group.add_argument("--time-limit", type=float, default=10.0, metavar="S", help=seconds)


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--costs", metavar="FILE", help='JSON such as {"f": 10, "b": [9, 11], ...}; options win over it'
    )
    links = (
        "JSON: latency, bandwidth and bytes of messages, for some pairs of ranks apart; see docs/planning.md"
    )
    group.add_argument("--links", metavar="FILE", help=links)
    for name, text in COST_OPTIONS.items():
        group.add_argument(f"--{name}", type=_numbers, metavar="N", help=text)


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    for name, text in {
        "text": "the raw timetable, as --timetable reads it",
        "csv": "the timetable as torch's CSV",
        "program": "what each rank executes, messages included",
    }.items():
        group.add_argument(f"--{name}", action="store_const", const=name, dest="form", help=text)
    group.add_argument("--picture", type=_picture, metavar="FILE", help="draw to FILE (.png, .pdf, .svg)")
    group.add_argument("--html", metavar="FILE", help="draw to a page for the browser, with memory curves")


def _numbers(text: str) -> float | list[float]:
    numbers = _list_of_numbers(text)
    return numbers if len(numbers) > 1 else numbers[0]


def _list_of_numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a comma list of numbers"
        ) from None


def _picture(path: str) -> str:
    if Path(path).suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{path!r} must end in .png, .pdf or .svg")
    return path
