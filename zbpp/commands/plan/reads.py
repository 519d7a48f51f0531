"""Which options each form of `zbpp plan` reads: an option that would have no effect is refused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from zbpp.commands.plan.arguments import COST_OPTIONS

_COSTS = {"costs", *COST_OPTIONS}
_DRAWN = {"picture", "html", "trace"}
_SHOWN = {*_COSTS, *_DRAWN, "memory_limit", "form", "program", "width"}
_SIZES = {"ranks", "microbatches"}
_SEARCH = {"objective", "time_limit", "seed"}
_NAMES = {"schedules", "compare"}
_HEAD = {"embedding", "head", "hidden", "vocab", "sequence", "layer_parameters"}

NAMED, TIMETABLE, CHOOSE, CLUSTER = "SCHEDULE", "--timetable", "--choose", "--cluster"
LAYERS, MEASURED_LAYERS = "--layers", "--layers --costs"
READ: dict[str, set[str]] = {
    NAMED: {*_NAMES, *_SHOWN, *_SIZES, *_SEARCH, "placement"},
    TIMETABLE: {"timetable", *_SHOWN},
    # With --text, --csv and --program the form itself says what to write instead.
    CHOOSE: {"choose", *_COSTS, *_DRAWN, *_SIZES, *_SEARCH, "memory_limit", "kept", "form", "program"},
    LAYERS: {"layers", "ranks", *_HEAD},
    MEASURED_LAYERS: {"layers", "ranks", *_COSTS},
    CLUSTER: {
        *_NAMES, "cluster", "model", "batch", "microbatch_size", "top", "precision", "degrees", "recompute",
        "sequence_parallel", "sequence", "out",
    },
}  # fmt: skip
"""The options that each form of the command reads; a form is named by the words that choose it."""

_INSTEAD = {
    "ranks": "--degrees pipeline=N",
    "microbatches": "--microbatch-size N",
    "memory_limit": "gpu.memory in the cluster's file",
    "form": "--out FILE",
}
"""What to write with --cluster instead of these options."""


def form_of(options: argparse.Namespace) -> str:
    """The form that the options choose: a key of READ. Raises ValueError unless they choose one."""
    named = bool(options.schedules) and options.cluster is None  # with --cluster: the schedules to try
    layers = MEASURED_LAYERS if options.costs else LAYERS
    wanted = {
        NAMED: named,
        TIMETABLE: options.timetable is not None,
        CHOOSE: options.choose,
        layers: bool(options.layers),
        CLUSTER: options.cluster is not None,
    }
    chosen = [form for form, is_chosen in wanted.items() if is_chosen]
    if len(chosen) != 1:
        raise ValueError(
            "name at least one schedule, or give --timetable FILE (not both), --choose, --layers or --cluster"
        )
    return chosen[0]


def refusal(form: str, given: Sequence[tuple[str, str]]) -> str:
    """Why an option that was given doesn't go with the form, and what to write; "" if all do.

    given: (name, as it is written) of the options on the command line, see `given_options`.
    """
    for name, written in given:
        if name in READ[form]:
            continue
        if form == CLUSTER:
            instead = f", or write {_INSTEAD[name]}" if name in _INSTEAD else ""
            return f"{written} doesn't go with --cluster, which plans whole runs: leave it out{instead}"
        others = [other for other, read in READ.items() if name in read]
        return f"{written} doesn't go with {form}: leave it out; it goes with {' and with '.join(others)}"
    return ""


def given_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> list[tuple[str, str]]:
    """(name, as it is written) of the options on the command line, also of those with their default value."""
    unset = object()
    names = vars(parser.parse_args(argv))
    found = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names, unset))))
    # argparse sets the list of positional words also where there are none.
    return [
        (name, _written(name, value)) for name, value in found.items() if value is not unset and value != []
    ]


def _written(name: str, value: object) -> str:
    if name == "form":
        return f"--{value}"
    return f"--{'no-' if name == 'recompute' and value is False else ''}{name.replace('_', '-')}"
