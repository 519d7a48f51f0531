"""Ties: parameters that are one parameter of the model, in several places of its stages.

Stages of one rank hold one Parameter, which is trained once. Stages of different ranks hold a copy each. The
copies start equal, their gradients are summed in every step (tied_gradients.py), and so they stay equal.

How a tie becomes known:
- a stage declares it: `stage.tied_parameters = {"head.weight": "embedding.weight"}`: the name in this stage,
  and the name in another one; `(0, "embedding.weight")` where several stages use the other name;
- a model's `tied()` returns such a mapping for all its stages, in names of the whole model (model_ties.py);
- stages of one rank have one Parameter object;
- stages of different ranks would have one, if one process had built all of them: see model_ties.py.

Ties join: if a is tied to b and b to c, then a, b and c are one tie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from zbpp.runtime.mesh import local_of
from zbpp.runtime.shared_parameters import Pair, ParameterPlace

Tie = tuple[ParameterPlace, ...]
"""All places of one parameter, in order; the rank of the first place owns the parameter."""
PlacesByName = Mapping[str, list[ParameterPlace]]


class Facts(NamedTuple):
    """What is known of the parameter in one place. identity: on one rank, equal for one Parameter object."""

    identity: int
    shape: list[int]  # of this process's part
    dtype: str
    placements: str  # of a DTensor
    is_trained: bool
    is_sparse: bool  # its gradient
    rank: int = -1  # filled in when the reports of all ranks are put together


class TieReport(NamedTuple):
    """The parameters of one rank's stages, or of all stages; and what each declaration ties a place to."""

    facts: dict[ParameterPlace, Facts]
    declared: dict[ParameterPlace, str | ParameterPlace]


def report_of(stages: Mapping[int, nn.Module]) -> TieReport:
    """This rank's report. Raises ValueError for `tied_parameters` that name no parameter of their stage."""
    report = TieReport({}, {})
    for index, stage in stages.items():
        facts = _facts(stage)
        report.facts.update({(index, name): each for name, each in facts.items()})
        for name, other in _declared(index, stage).items():
            if name not in facts:
                raise ValueError(
                    f"stage {index} declares {name} in tied_parameters, but has no such parameter: write a "
                    "name that its named_parameters() gives"
                )
            report.declared[index, name] = other
    return report


def put_together(reports: Sequence[TieReport]) -> TieReport:
    """The report on all stages, from one report per rank."""
    everyone = TieReport({}, {})
    for rank, (facts, declared) in enumerate(reports):
        everyone.facts.update({place: each._replace(rank=rank) for place, each in facts.items()})
        everyone.declared.update(declared)
    return everyone


def declare(stage: nn.Module, name: str, other: ParameterPlace) -> None:
    """Declare that a parameter of the stage is tied to another place."""
    known = getattr(stage, "tied_parameters", None) or {}
    stage.tied_parameters = {**known, name: other}  # type: ignore[assignment]  # a plain attribute


def _declared(index: int, stage: nn.Module) -> Mapping[str, str | ParameterPlace]:
    declared = getattr(stage, "tied_parameters", None) or {}
    if not isinstance(declared, Mapping) or not all(map(_is_tied_to, declared.values())):
        raise ValueError(
            f"stage {index} has tied_parameters={declared!r}: write a dict from a name of this stage to a "
            "name of another one, {'head.weight': 'embedding.weight'}, or to (stage, name)"
        )
    return declared


def _is_tied_to(other: Any) -> bool:
    return isinstance(other, str) or (isinstance(other, tuple) and list(map(type, other)) == [int, str])


def _facts(stage: nn.Module) -> dict[str, Facts]:
    sparse = {id(p) for module in stage.modules() if _is_sparse(module) for p in module.parameters(False)}
    return {
        name: Facts(
            id(each),
            list(local_of(each).shape),
            str(each.dtype),
            str(getattr(each, "placements", "")),
            each.requires_grad,
            id(each) in sparse,
        )
        for name, each in stage.named_parameters(remove_duplicate=False)
    }


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def ties_of(
    everyone: TieReport, named: Mapping[str, str] | None = None, shared: Iterable[Pair] = ()
) -> list[Tie]:
    """The ties of all ranks.

    everyone: the report on all stages. named: a model's tied(). shared: pairs of places known to have one
    Parameter. Raises ValueError for a declaration that names no parameter, or more than one.
    """
    by_identity: defaultdict[Any, list[ParameterPlace]] = defaultdict(list)
    by_name: defaultdict[str, list[ParameterPlace]] = defaultdict(list)
    for place, facts in everyone.facts.items():
        by_identity[facts.rank, facts.identity].append(place)
        by_name[place[1]].append(place)
    certain: list[Iterable[ParameterPlace]] = [*by_identity.values(), *shared]
    certain += [_named_places(pair, by_name) for pair in (named or {}).items()]
    rows = everyone.declared.items()
    certain += [(p, _existing(p, other, by_name)) for p, other in rows if isinstance(other, tuple)]
    groups = _merged(certain)
    # A name without a stage comes last: several stages may use it, if they are known by now to be one tie.
    by_bare_name = [(p, _only_one(p, other, by_name, groups)) for p, other in rows if isinstance(other, str)]
    return sorted(tuple(sorted(group)) for group in _merged([*groups, *by_bare_name]) if len(group) > 1)


def _merged(groups: Iterable[Iterable[ParameterPlace]]) -> list[set[ParameterPlace]]:
    """The groups, with those joined that have a place in common."""
    group_of: dict[ParameterPlace, set[ParameterPlace]] = {}
    for group in groups:
        joined = {place for each in group for place in group_of.get(each, {each})}
        group_of.update(dict.fromkeys(joined, joined))
    return list({id(group): group for group in group_of.values()}.values())


def _named_places(pair: tuple[str, str], by_name: PlacesByName) -> list[ParameterPlace]:
    """All places of two names of the whole model, where one name is one parameter."""
    for name in pair:
        if name not in by_name:
            raise ValueError(
                f"tied() ties {pair[0]} to {pair[1]}, but no stage has {name}: write names that "
                "named_parameters() of the stages gives"
            )
    return [place for name in pair for place in by_name[name]]


def _existing(place: ParameterPlace, other: ParameterPlace, by_name: PlacesByName) -> ParameterPlace:
    if other == place or other not in by_name.get(other[1], []):
        what = "which is itself" if other == place else f"which stage {other[0]} does not have"
        raise ValueError(
            f"stage {place[0]} declares {place[1]} to be tied to {other}, {what}: write (stage, name) of "
            "another parameter, or leave the declaration out"
        )
    return other


def _only_one(
    place: ParameterPlace, other: str, by_name: PlacesByName, groups: Iterable[set[ParameterPlace]]
) -> ParameterPlace:
    """A place of the one parameter that has the name `other`.

    groups: the places that are known to have one parameter. Raises ValueError for no or several parameters.
    """
    found = [each for each in by_name.get(other, []) if each != place]
    says = f"stage {place[0]} declares {place[1]} to be tied to {other}"
    if not found:
        raise ValueError(
            f"{says}, which no {'other ' if place[1] == other else ''}stage has: write a name that "
            "named_parameters() of another stage gives"
        )
    if not any(group.issuperset(found) for group in groups):
        stages = ", ".join(str(stage) for stage, _ in found)
        raise ValueError(
            f"{says}, which stages {stages} have: write the stage, too, {{{place[1]!r}: ({found[0][0]}, "
            f"{other!r})}}"
        )
    return found[0]


def check_alike(ties: Iterable[Tie], facts: Mapping[ParameterPlace, Facts]) -> None:
    """Raise ValueError for a tie whose parameters differ, or whose gradients can't be summed over ranks."""
    for tie in ties:
        for field in ("shape", "dtype", "placements", "is_trained"):
            values = [getattr(facts[place], field) for place in tie]
            other = next((each for each in values if each != values[0]), values[0])
            if other != values[0]:
                raise ValueError(f"{text_of(tie)} are tied, but {_difference(field, values[0], other)}")
        if len({facts[place].rank for place in tie}) > 1 and any(facts[place].is_sparse for place in tie):
            raise ValueError(
                f"{text_of(tie)} are tied and on several ranks, which can't sum sparse gradients: write "
                "sparse=False"
            )


def _difference(field: str, one: Any, two: Any) -> str:
    if field == "is_trained":
        return "one of them is frozen: freeze all of them, or none"
    return f"of different {field}, {one} and {two}: make them alike, or do not tie them"


def text_of(tie: Tie) -> str:
    """`embedding.weight of stage 0 and head.weight of stage 3`."""
    return " and ".join(f"{name} of stage {index}" for index, name in tie)


def check_apart(ties: Iterable[Tie], rank_of: Sequence[int]) -> None:
    """Raise ValueError if two stages of one rank have a tied parameter: FSDP2 would make two of it."""
    for tie in ties:
        first: dict[int, ParameterPlace] = {}
        for place in tie:
            other = first.setdefault(rank_of[place[0]], place)
            if other[0] != place[0]:
                raise ValueError(
                    f"{text_of((other, place))} are one parameter on one rank, and shards would make two of "
                    "it: choose a schedule that puts these stages on different ranks, such as zb_h1, or use "
                    "replicate= instead of shard="
                )


def check_united(ties: Iterable[Tie], facts: Mapping[ParameterPlace, Facts]) -> None:
    """Raise ValueError if a rank holds a tied parameter twice."""
    for tie in ties:
        first: dict[int, ParameterPlace] = {}
        for place in tie:
            other = first.setdefault(facts[place].rank, place)
            if facts[other].identity != facts[place].identity:
                raise ValueError(
                    f"{text_of((other, place))} are tied and on one rank, but they are two tensors: assign "
                    "one Parameter to both modules"
                )


def replace_parameter(stage: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Put a Parameter in another one's place, in every module and under every name of the stage."""
    for module in stage.modules():
        for leaf, each in module._parameters.items():
            if each is old:
                module._parameters[leaf] = new
