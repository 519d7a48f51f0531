"""Ties: parameters that are one parameter of the model, in several places of its stages.

Stages of one rank hold one Parameter, which is trained once. Stages of different ranks hold a copy each. The
copies start equal, their gradients are summed in every step (tied_gradients.py), and so they stay equal.

Who says what is tied:
- a stage: `stage.tied_parameters = {"head.weight": "embedding.weight"}`: the name in this stage, and the name
  in another one; `(0, "embedding.weight")` where several stages use the other name;
- a model: `tied()` returns such a mapping for all its stages, in names of the whole model;
- nobody, if stages share a Parameter object: on one rank that is seen, and the stages that a model builds are
  built on the meta device, one after the other, and compared (shared_parameters.py).

Ties join: what is tied to the same parameter is one tie, however it was said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.mesh import local_of
from zbpp.runtime.shared_parameters import Place, shared_parameters
from zbpp.runtime.world import gather

Tie = tuple[Place, ...]
"""All places of one parameter, in order; the first one's rank owns it."""


class Facts(NamedTuple):
    """What is compared of a parameter. identity: the same in all places of a rank that have one Parameter."""

    identity: int
    shape: list[int]  # of this process's part
    dtype: str
    placements: str  # of a DTensor
    is_trained: bool
    is_sparse: bool  # its gradient
    rank: int = -1  # filled in when the reports of all ranks are put together


class TieReport(NamedTuple):
    """What one rank tells the others, or what all have told. declared: what a place is tied to."""

    facts: dict[Place, Facts]
    declared: dict[Place, str | Place]


class _Told(NamedTuple):
    """A rank's report on stages that a model built, and what the model says; or what is wrong."""

    report: TieReport
    named: Mapping[str, str] = {}
    shared: Sequence[tuple[Place, Place]] = ()
    stages: Sequence[int] = ()
    refusal: str = ""


def declare_ties(
    model: Any,
    stages: Mapping[int, nn.Module],
    num_stages: int,
    *,
    is_rank_0: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write into each stage's `tied_parameters` what the model says or shares. Collective over the group.

    stages: this rank's, built by the model. Stages of this rank that hold copies get one Parameter, the first
    stage's. Raises ValueError on every rank for ties that are impossible.
    """
    told: list[_Told] = gather(_told(model, stages, num_stages if is_rank_0 else 1), group)
    for each in told:
        if each.refusal:
            raise ValueError(each.refusal)
    everyone = put_together([each.report for each in told])
    shared = list(chain.from_iterable(each.shared for each in told))
    ties = ties_of(everyone, told[0].named, [pair for pair in shared if everyone.facts.keys() >= set(pair)])
    check_alike(ties, everyone.facts)
    of_loss = [first for first, (stage, _) in shared if stage == num_stages]
    last_rank = next(rank for rank, each in enumerate(told) if num_stages - 1 in each.stages)
    _check_loss(of_loss, last_rank, ties, everyone.facts)
    _unite(stages, ties)
    for first, *others in ties:
        for stage, name in others:
            if stage in stages:
                known = getattr(stages[stage], "tied_parameters", None) or {}
                stages[stage].tied_parameters = {**known, name: first}  # type: ignore[assignment]


def _told(model: Any, stages: Mapping[int, nn.Module], num_stages: int) -> _Told:
    """num_stages: 1 on ranks that need not build the stages on meta."""
    try:
        named = dict(model.tied()) if callable(getattr(model, "tied", None)) else {}
        shared = shared_parameters(model.build_stage, num_stages, model.loss) if num_stages > 1 else []
        return _Told(report_of(stages), named, shared, list(stages))
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return _Told(TieReport({}, {}), refusal=f"ties of {type(model).__name__}: {text}")


def report_of(stages: Mapping[int, nn.Module]) -> TieReport:
    """This rank's report. Raises ValueError for `tied_parameters` that name nothing of their stage."""
    report = TieReport({}, {})
    for index, stage in stages.items():
        facts = _facts(stage)
        report.facts.update({(index, name): each for name, each in facts.items()})
        for name, other in _declared(index, stage).items():
            if name not in facts:
                raise ValueError(
                    f"stage {index} declares {name} in tied_parameters, but has no such parameter"
                )
            report.declared[index, name] = other
    return report


def put_together(reports: Sequence[TieReport]) -> TieReport:
    """The report on all stages. reports: per rank."""
    together = TieReport({}, {})
    for rank, (facts, declared) in enumerate(reports):
        together.facts.update({place: each._replace(rank=rank) for place, each in facts.items()})
        together.declared.update(declared)
    return together


def _declared(index: int, stage: nn.Module) -> Mapping[str, str | Place]:
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
    everyone: TieReport, named: Mapping[str, str] | None = None, shared: Iterable[tuple[Place, Place]] = ()
) -> list[Tie]:
    """The ties of all ranks.

    everyone: what all ranks have told. named: a model's tied(). shared: pairs of places known to have one
    Parameter. Raises ValueError for a declaration that names no parameter, or more than one.
    """
    by_identity: defaultdict[Any, list[Place]] = defaultdict(list)
    by_name: defaultdict[str, list[Place]] = defaultdict(list)
    for place, facts in everyone.facts.items():
        by_identity[facts.rank, facts.identity].append(place)
        by_name[place[1]].append(place)
    certain: list[Iterable[Place]] = [*by_identity.values(), *shared]
    certain += [_named_places(pair, by_name) for pair in (named or {}).items()]
    rows = everyone.declared.items()
    certain += [(p, _existing(p, other, by_name)) for p, other in rows if isinstance(other, tuple)]
    groups = _merged(certain)
    found = [(p, _only_one(p, other, by_name, groups)) for p, other in rows if isinstance(other, str)]
    return sorted(tuple(sorted(group)) for group in _merged([*groups, *found]) if len(group) > 1)


def _merged(groups: Iterable[Iterable[Place]]) -> list[set[Place]]:
    """The groups, with those joined that have a place in common."""
    group_of: dict[Place, set[Place]] = {}
    for group in groups:
        joined = {place for each in group for place in group_of.get(each, {each})}
        group_of.update(dict.fromkeys(joined, joined))
    return list({id(group): group for group in group_of.values()}.values())


def _named_places(pair: tuple[str, str], by_name: Mapping[str, list[Place]]) -> list[Place]:
    """All places of two names of the whole model: there a name is one parameter."""
    for name in pair:
        if name not in by_name:
            raise ValueError(f"tied() ties {pair[0]} to {pair[1]}, but no stage has {name}")
    return [place for name in pair for place in by_name[name]]


def _existing(place: Place, other: Place, by_name: Mapping[str, list[Place]]) -> Place:
    if other == place or other not in by_name.get(other[1], []):
        what = "which is itself" if other == place else f"which stage {other[0]} does not have"
        raise ValueError(f"stage {place[0]} declares {place[1]} to be tied to {other}, {what}")
    return other


def _only_one(
    place: Place, other: str, by_name: Mapping[str, list[Place]], groups: Iterable[set[Place]]
) -> Place:
    """The place of the parameter that is called `other`. Raises ValueError unless it is one parameter."""
    found = [each for each in by_name.get(other, []) if each != place]
    says = f"stage {place[0]} declares {place[1]} to be tied to {other}"
    if not found:
        raise ValueError(f"{says}, which no {'other ' if place[1] == other else ''}stage has")
    if not any(group.issuperset(found) for group in groups):
        stages = ", ".join(str(stage) for stage, _ in found)
        raise ValueError(
            f"{says}, which stages {stages} have: write the stage, too, {{{place[1]!r}: ({found[0][0]}, "
            f"{other!r})}}"
        )
    return found[0]


def check_alike(ties: Iterable[Tie], facts: Mapping[Place, Facts]) -> None:
    """Raise ValueError for places of a tie whose parameters differ, or that ranks can't sum gradients of."""
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
    return f"of different {field}, {one} and {two}: one parameter has one"


def text_of(tie: Tie) -> str:
    """`embedding.weight of stage 0 and head.weight of stage 3`."""
    return " and ".join(f"{name} of stage {index}" for index, name in tie)


def _check_loss(
    of_loss: Iterable[Place], last_rank: int, ties: Iterable[Tie], facts: Mapping[Place, Facts]
) -> None:
    """Raise ValueError for a parameter of the loss that no stage on the last stage's rank has.

    of_loss: places that have one Parameter with the loss.
    """
    for place in of_loss:
        tie = next((each for each in ties if place in each), (place,))
        if last_rank not in {facts[each].rank for each in tie}:
            raise ValueError(
                f"{text_of(tie)} is a parameter of the loss, too, which rank {last_rank} computes: choose a "
                "schedule that puts both on one rank, such as zb_v, or move that part of the loss into the "
                "last stage"
            )


def check_united(ties: Iterable[Tie], facts: Mapping[Place, Facts]) -> None:
    """Raise ValueError if a rank holds a tied parameter twice."""
    for tie in ties:
        first: dict[int, Place] = {}
        for place in tie:
            other = first.setdefault(facts[place].rank, place)
            if facts[other].identity != facts[place].identity:
                raise ValueError(
                    f"{text_of((other, place))} are tied and on one rank, but they are two tensors: assign "
                    "one Parameter to both modules"
                )


def _unite(stages: Mapping[int, nn.Module], ties: Iterable[Tie]) -> None:
    """Give all places of a tie that these stages have the first one's Parameter."""
    for tie in ties:
        places = [place for place in tie if place[0] in stages]
        for index, name in places[1:]:
            new, old = stages[places[0][0]].get_parameter(places[0][1]), stages[index].get_parameter(name)
            _replace(stages[index], old, new)


def _replace(stage: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """In every module that has it: the stage may have it under several names."""
    for module in stage.modules():
        for leaf, each in module._parameters.items():
            if each is old:
                module._parameters[leaf] = new
