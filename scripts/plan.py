#!/usr/bin/env python
"""Print, compare and draw timetables. Needs numpy (and matplotlib for --picture), no torch."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

# A fresh clone plans without being installed: installing would bring torch.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zbpp.schedule import (
    SCHEDULES,
    Costs,
    PlanError,
    Timeline,
    Timetable,
    chrome_trace,
    compare,
    lower,
    per_stage_of,
    render_figures,
    render_picture,
    render_table,
    render_text,
    simulate,
)

Outcomes = Mapping[str, Timeline | PlanError]

_DESCRIPTION = "Print, compare and draw the timetables of pipeline schedules. Needs no torch and no GPU."
_USAGE = "plan.py SCHEDULE [SCHEDULE ...] [options]"
_EXAMPLES = f"""\
schedules: {", ".join(SCHEDULES)}

costs: a single number is for one rank's share of the model; a family with two stages per rank
gets half of it per stage, so that all schedules run the same model. A comma list is per stage.

examples:
  plan.py zb_h1 --ranks 4 --microbatches 8           the staircase and its figures
  plan.py --compare all --ranks 8 --microbatches 24 --f 18.5 --b 18.1 --w 9.3 --comm 0.6
  plan.py 1f1b zb_h1 zb_v --picture compare.png --trace compare.json    (trace: ui.perfetto.dev)
  plan.py zb_h1 --f 10,12,12,9 --memory-limit 4      one number per stage; refuse above 4
  plan.py zb_v --program 1                           what rank 1 executes, with its messages
  plan.py zb_h1 --text > mine.txt                    as text: edit it, then check and time it with
  plan.py --timetable mine.txt
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status: 2 for a plan or a file that won't do."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.schedules += options.compare
    if bool(options.schedules) == bool(options.timetable):
        parser.error("name at least one schedule, or give --timetable FILE (not both); see --help")
    try:
        print(_run(options), flush=True)
    except BrokenPipeError:  # `plan.py ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (PlanError, OSError, UnicodeDecodeError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> str:
    outcomes = _outcomes(options, _costs(options))
    if options.picture:
        render_picture(_timelines(outcomes), options.picture)
    if options.trace:
        Path(options.trace).write_text(json.dumps(chrome_trace(_timelines(outcomes))))
    if options.text:
        return str(_only(outcomes).timetable)
    if options.program is not None:
        return _program(_only(outcomes).timetable, options.program)
    if len(outcomes) > 1 or options.compare:
        return render_table(outcomes)
    return _single(_only(outcomes), options.width)


def _outcomes(options: argparse.Namespace, costs: Costs) -> Outcomes:
    if options.timetable:
        text = sys.stdin.read() if options.timetable == "-" else Path(options.timetable).read_text()
        timetable = Timetable.parse(text)
        own = per_stage_of(costs, timetable.num_stages / timetable.num_ranks)
        return {Path(options.timetable).stem: simulate(timetable, own)}
    names = [name for each in options.schedules for name in (SCHEDULES if each == "all" else [each])]
    limit = options.memory_limit
    return compare(names, options.ranks, options.microbatches, costs=costs, memory_limit=limit)


def _costs(options: argparse.Namespace) -> Costs:
    """The file's costs, and the flags' over them."""
    names = [field.name for field in fields(Costs)]
    given = _read_costs(options.costs, names) if options.costs else {}
    flags = {name: getattr(options, name) for name in names}
    return Costs(**{**given, **{name: value for name, value in flags.items() if value is not None}})


def _read_costs(path: str, names: list[str]) -> dict[str, float | list[float]]:
    try:
        given = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is no JSON: {error}") from None
    if not isinstance(given, dict) or not given.keys() <= set(names):
        wrong = sorted(given.keys() - set(names)) if isinstance(given, dict) else given
        raise PlanError(f"{path}: {wrong!r} is no cost; an object with any of {', '.join(names)} is expected")
    return given


def _timelines(outcomes: Outcomes) -> dict[str, Timeline]:
    """Those that can run. With none, the first refusal is the answer."""
    timelines = {name: each for name, each in outcomes.items() if isinstance(each, Timeline)}
    for refusal in [] if timelines else outcomes.values():
        raise refusal  # type: ignore[misc]  # no Timeline among them
    return timelines


def _only(outcomes: Outcomes) -> Timeline:
    if len(outcomes) > 1:
        raise PlanError(f"--text and --program show one schedule; {len(outcomes)} are named")
    return next(iter(_timelines(outcomes).values()))


def _program(timetable: Timetable, rank: int) -> str:
    if not 0 <= rank < timetable.num_ranks:
        raise PlanError(f"--program {rank}: ranks are 0..{timetable.num_ranks - 1}")
    return str(lower(timetable)[rank])


def _single(timeline: Timeline, width: int | None) -> str:
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    return f"{render_text(timeline, width=width)}\n\n{render_figures(timeline)}"


def _numbers(text: str) -> float | list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a comma list of numbers"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


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
    what.add_argument("--timetable", metavar="FILE", help="read a timetable as text instead ('-': stdin)")
    what.add_argument("--ranks", type=int, default=4, metavar="P", help="default 4")
    what.add_argument("--microbatches", type=int, default=8, metavar="M", help="default 8")
    what.add_argument(
        "--memory-limit", type=_numbers, metavar="N", help="most that a rank may hold, or per rank"
    )
    _add_costs(parser.add_argument_group("costs (a number per rank, or N,N,... per stage)"))
    _add_outputs(parser.add_argument_group("output"))
    return parser


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--costs", metavar="FILE", help='JSON such as {"f": 10, "b": [9, 11], ...}; flags win')
    for name, text in {
        "f": "forward, ms (default 1)",
        "b": "gradient of the input, ms (1)",
        "w": "gradients of the weights, ms (1)",
        "bw": "both in one piece, ms (b + w)",
        "comm": "a message, ms (0)",
        "saved": "memory held from F until B, any unit (1)",
        "deferred": "memory held from B until W (0.5)",
    }.items():
        group.add_argument(f"--{name}", type=_numbers, metavar="N", help=text)


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--text", action="store_true", help="the raw timetable, as --timetable reads it")
    group.add_argument("--program", type=int, metavar="RANK", help="what a rank executes, with its messages")
    group.add_argument("--picture", type=_picture, metavar="FILE", help="draw to FILE (.png, .pdf, .svg)")
    group.add_argument("--trace", metavar="FILE", help="write a Chrome trace (.json) for ui.perfetto.dev")
    group.add_argument(
        "--width", type=int, metavar="N", help="most columns of the staircase (the terminal's)"
    )


if __name__ == "__main__":
    sys.exit(main())
