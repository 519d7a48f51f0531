"""An optimizer's groups of parameters, by patterns of the names that parameters have in the whole model.

    [{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}, {"match": "head.*", "lr": 1e-4}]

The first entry that matches a parameter decides on the parameter's options. A pattern is a shell's (fnmatch)
and has to match a whole name. A tied parameter has all its names on every rank, so its copies get the same
options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from zbpp.runtime import Pipeline
from zbpp.training.optim.master_weights import MasterWeights

Group = dict[str, Any]

_ALIASES = {"learning_rate": "lr"}  # the config's names for an optimizer's options


class Named(NamedTuple):
    """A parameter for an optimizer, with all its names in the whole model; (): the names are not known."""

    names: tuple[str, ...]
    parameter: nn.Parameter


class Entry(NamedTuple):
    """An entry of `groups`: options for parameters that match one of the patterns."""

    patterns: tuple[str, ...]
    options: Mapping[str, Any]

    def matches(self, names: Iterable[str]) -> bool:
        """Whether a pattern matches one of the names."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.patterns)


def named_parameters(pipeline: Pipeline, masters: MasterWeights | None = None) -> list[Named]:
    """This rank's parameters, or their masters, to make an optimizer of."""
    return [
        Named(names, parameter if masters is None else masters.of(parameter))
        for names, parameter in pipeline.parameter_names()
    ]


def as_named(parameters: Iterable[nn.Parameter | Named]) -> list[Named]:
    """The parameters as Named; a bare parameter gets no names."""
    return [each if isinstance(each, Named) else Named((), each) for each in parameters]


def entries_of(groups: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """The entries of the config's `groups`. Raises ValueError for one without `match` or options."""
    return [_entry(number, dict(each)) for number, each in enumerate(groups)]


def _entry(number: int, options: dict[str, Any]) -> Entry:
    match = options.pop("match", None)
    patterns = (match,) if isinstance(match, str) else tuple(match or ())
    if not patterns or not all(isinstance(each, str) and each for each in patterns):
        raise ValueError(
            f"groups[{number}] has match={match!r}: write the names that it is for, such as match: "
            "['*.bias', '*norm*']"
        )
    renamed = {_ALIASES.get(name, name): value for name, value in options.items()}
    if not renamed or "params" in renamed:
        raise ValueError(
            f"groups[{number}] needs options of the optimizer for {', '.join(patterns)}, such as "
            "weight_decay: 0 or lr: 1e-4"
        )
    rate = renamed.get("lr", 0.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float | Tensor):
        raise ValueError(f"groups[{number}] has lr={rate!r}: write a number, such as lr: 1e-4")
    return Entry(patterns, renamed)


def grouped(
    parameters: Iterable[Named],
    entries: Sequence[Entry],
    split: Callable[[Named, Mapping[str, Any]], Mapping[str, Any]],
    defaults: Sequence[Mapping[str, Any]],
) -> list[Group]:
    """The trainable parameters in groups: those without an entry first, then those of each entry in turn.

    Each of these sets has one group for each of `defaults`, the options that apply where the entry sets none;
    split(parameter, options of its entry) chooses the parameter's. All ranks have the same groups in the same
    order, whatever parameters they have; a group may be empty.
    """
    all_options: list[Mapping[str, Any]] = [{}, *(each.options for each in entries)]
    places: dict[int, tuple[int, int]] = {}
    trained = [each for each in parameters if each.parameter.requires_grad]
    for named in trained:
        number = 1 + next((i for i, each in enumerate(entries) if each.matches(named.names)), -1)
        further = split(named, all_options[number])
        places[id(named.parameter)] = number, list(defaults).index(further)
    groups: list[Group] = []
    for number, options in enumerate(all_options):
        for kind, further in enumerate(defaults):
            mine = [each.parameter for each in trained if places[id(each.parameter)] == (number, kind)]
            groups.append({"params": mine, **_one_by_one(mine), **further, **options})
    return groups


def _one_by_one(parameters: Iterable[nn.Parameter]) -> dict[str, bool]:
    """The option without which torch's optimizers fail on a GPU for parameters of several kinds, or nothing.

    There they update all parameters of a group in one call by default, and torch has no such call for
    DTensors beside plain tensors, nor for DTensors on several meshes.
    """
    kinds = {getattr(each, "device_mesh", None) for each in parameters}
    return {"foreach": False} if len(kinds) > 1 else {}


def unmatched(all_names: Iterable[Iterable[str]], patterns: Iterable[str]) -> list[str]:
    """The patterns that match no name."""
    names = [name for each in all_names for name in each]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def check_all_match(pipeline: Pipeline, patterns: Sequence[str], key: str) -> None:
    """Raise ValueError on all ranks for a pattern that matches no parameter on any rank. Collective."""
    if not patterns:  # equal on all ranks
        return
    own = [names for names, _ in pipeline.parameter_names()]
    everywhere = pipeline.place.gather((unmatched(own, patterns), [names[0] for names in own]))
    wrong = set(patterns).intersection(*(missing for missing, _ in everywhere))
    if wrong:
        examples = list(dict.fromkeys(name for _, names in everywhere for name in names))
        raise ValueError(no_match(key, sorted(wrong), examples))


def no_match(key: str, patterns: Sequence[str], names: Sequence[str]) -> str:
    """The message for patterns that match none of the names."""
    shown = ", ".join(names if len(names) <= 5 else [*names[:4], "...", names[-1]])
    return (
        f"{key}: {', '.join(patterns)} matches no parameter of the model; a pattern matches a whole name, "
        f"as '*.bias' does, and the names are {shown}"
    )
