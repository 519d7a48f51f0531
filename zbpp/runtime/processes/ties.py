"""Ties: parameters that are one parameter of the model, in several places of its stages.

Stages of one rank hold one Parameter, which is trained once. Stages of different ranks hold a copy each. The
copies start equal, their gradients are summed in every step (tied_gradients.py), and so they stay equal.

How a tie becomes known:
- a stage declares it: `stage.tied_parameters = {"head.weight": "embedding.weight"}`: the name in this stage,
  and the name in the one other stage that has it; `(0, "embedding.weight")` where several have it;
- a model's `tied()` returns such a mapping for all its stages, in names of the whole model;
- stages of one rank have one Parameter object;
- stages of different ranks would have one, if one process had built all of them. Every rank builds its own
  stages only, so rank 0 builds all of a model's stages on the meta device and compares their Parameters.

Ties join: if a is tied to b and b to c, then a, b and c are one tie.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zbpp.job.agreement import gather, gather_or_refuse
from zbpp.runtime.processes.dtensors import local_of
from zbpp.runtime.processes.mesh import SHARD, MeshPosition

ParameterPlace = tuple[int, str]
"""(stage, name of a parameter in that stage): one of the places where the model has the parameter."""
Pair = tuple[ParameterPlace, ParameterPlace]
Tie = tuple[ParameterPlace, ...]
"""All places of one parameter, in order; the rank of the first place owns the parameter."""


class ParameterFacts(NamedTuple):
    """What is known of the parameter in one place."""

    identity: tuple[int, int]  # rank, number of the object
    kind: str  # shape of this process's part, dtype, placements of a DTensor, trained or frozen
    is_sparse: bool  # its gradient


class TiedStages(dict[int, nn.Module]):
    """One rank's stages, and the ties of all ranks, which have agreed on them already.

    A Pipeline of such stages does not ask the other ranks again; all ranks give it such stages, or none does.
    """

    def __init__(self, stages: Mapping[int, nn.Module], ties: Sequence[Tie]) -> None:
        super().__init__(stages)
        self.ties = list(ties)


class Report(NamedTuple):
    """What one rank tells the others.

    facts: of its stages' parameters. declared: what a place is tied to. named: the model's tied(). shared:
    places that have one Parameter, found on meta. refusal: what is wrong; then the rest is empty.
    """

    facts: Mapping[ParameterPlace, ParameterFacts] = {}
    declared: Mapping[ParameterPlace, str | ParameterPlace] = {}
    named: Mapping[str, str] = {}
    shared: Sequence[Pair] = ()
    refusal: str = ""


def owner_of(tie: Tie, rank_of: Sequence[int]) -> int:
    """The rank that owns a tied parameter: that of its first stage."""
    first_stage, _ = tie[0]
    return rank_of[first_stage]


def ranks_of(tie: Tie, rank_of: Sequence[int]) -> tuple[int, ...]:
    """The ranks that have a copy of a tied parameter."""
    return tuple(sorted({rank_of[stage] for stage, _ in tie}))


def parameter_of(tie: Tie, stages: Mapping[int, nn.Module]) -> nn.Parameter:
    """The tied parameter, on a rank that has a copy of it."""
    return next(stages[stage].get_parameter(name) for stage, name in tie if stage in stages)


def copies_here(
    ties: Iterable[Tie], stages: Mapping[int, nn.Module], rank_of: Sequence[int], rank: int
) -> list[nn.Parameter]:
    """The tied parameters that this rank has a copy of and another rank owns."""
    return [
        parameter_of(tie, stages)
        for tie in ties
        if rank in ranks_of(tie, rank_of) and owner_of(tie, rank_of) != rank
    ]


def agree_on_ties(
    stages: Mapping[int, nn.Module], rank_of: Sequence[int], place: MeshPosition, model: Any = None
) -> list[Tie]:
    """The ties of all ranks. Collective over the mesh.

    stages: this rank's. model: what built them; then places of a tie on this rank get one Parameter, the
    first place's, and the ties are declared on the stages, as the author of a stage would. Raises ValueError
    on every process for ties that are impossible.
    """
    reports = gather(_report(stages, place.rank, len(rank_of), model), place.pipeline)
    ties, refusal = list[Tie](), next((each.refusal for each in reports if each.refusal), "")
    if not refusal:
        try:
            ties = ties_of(reports)
            check_ties(ties, reports, rank_of, is_sharded=SHARD in place.groups, is_built=model is not None)
        except ValueError as error:
            refusal = str(error)
    if any(other != ties for other in gather_or_refuse(refusal, ties, place.gather)):
        raise ValueError("copies of the pipeline tie different parameters: declare the same on all of them")
    if model is not None:
        for tie in ties:
            _unite(stages, tie)
    return ties


def _report(stages: Mapping[int, nn.Module], rank: int, num_stages: int, model: Any) -> Report:
    try:
        report = report_of(stages, rank)
        if model is None:
            return report
        named = dict(model.tied()) if callable(getattr(model, "tied", None)) else {}
        is_compared = rank == 0 and num_stages > 1
        # A copy of the model builds these stages, because build_stage may set attributes that the loss reads.
        build = copy(model).build_stage
        shared = shared_parameters(build, num_stages, model.loss) if is_compared else []
        return report._replace(named=named, shared=shared)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return Report(refusal=text if model is None else f"ties of {type(model).__name__}: {text}")


def report_of(stages: Mapping[int, nn.Module], rank: int) -> Report:
    """What is known from the stages alone. Raises ValueError for declarations that can't be read."""
    facts: dict[ParameterPlace, ParameterFacts] = {}
    declared: dict[ParameterPlace, str | ParameterPlace] = {}
    for index, stage in stages.items():
        sparse = {id(p) for module in stage.modules() if _is_sparse(module) for p in module.parameters(False)}
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            facts[index, name] = ParameterFacts(
                (rank, id(parameter)), _kind(parameter), id(parameter) in sparse
            )
        for name, other in (getattr(stage, "tied_parameters", None) or {}).items():
            if (index, name) not in facts:
                raise ValueError(
                    f"stage {index} declares {name} in tied_parameters, but has no such parameter: write a "
                    "name that its named_parameters() gives"
                )
            declared[index, name] = other
    return Report(facts, declared)


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def _kind(parameter: nn.Parameter) -> str:
    placements = f"{parameter.placements} " if hasattr(parameter, "placements") else ""
    trained = "trained" if parameter.requires_grad else "frozen"
    return f"{list(local_of(parameter).shape)} {parameter.dtype} {placements}{trained}"


# ---- All reports together


def ties_of(reports: Sequence[Report]) -> list[Tie]:
    """The ties of all ranks. Raises ValueError for a declaration that names no parameter, or several."""
    by_identity: defaultdict[tuple[int, int], list[ParameterPlace]] = defaultdict(list)
    by_name: defaultdict[str, list[ParameterPlace]] = defaultdict(list)
    facts = facts_of(reports)
    for place in facts:
        by_identity[facts[place].identity].append(place)
        by_name[place[1]].append(place)
    groups: list[Iterable[ParameterPlace]] = [*by_identity.values()]
    for pair in reports[0].named.items():
        if missing := [name for name in pair if name not in by_name]:
            raise ValueError(
                f"tied() ties {pair[0]} to {pair[1]}, but no stage has {missing[0]}: write names that "
                "named_parameters() of the stages gives"
            )
        groups.append([place for name in pair for place in by_name[name]])
    for report in reports:
        groups += [(p, _only_one(p, other, by_name)) for p, other in report.declared.items()]
        groups += [pair for pair in report.shared if pair[1] in facts]  # it is not, if it is in the loss
    group_of: dict[ParameterPlace, set[ParameterPlace]] = {}
    for group in groups:
        joined = {place for each in group for place in group_of.get(each, {each})}
        group_of.update(dict.fromkeys(joined, joined))
    return sorted({tuple(sorted(group)) for group in group_of.values() if len(group) > 1})


def facts_of(reports: Iterable[Report]) -> dict[ParameterPlace, ParameterFacts]:
    """The facts of all ranks."""
    return {place: facts for each in reports for place, facts in each.facts.items()}


def _only_one(
    place: ParameterPlace, other: str | ParameterPlace, by_name: Mapping[str, list[ParameterPlace]]
) -> ParameterPlace:
    """The one place that a declaration means."""
    name = other[1] if isinstance(other, tuple) else other
    found = [each for each in by_name.get(name, []) if each != place and (other in (name, each))]
    if len(found) == 1:
        return found[0]
    stages = f"stages {', '.join(str(stage) for stage, _ in found)} have" if found else "no other stage has"
    raise ValueError(
        f"stage {place[0]} declares {place[1]} to be tied to {other}, which {stages}: write "
        f"tied_parameters = {{{place[1]!r}: (stage, name)}}, with a name that its named_parameters() gives"
    )


def check_ties(
    ties: Iterable[Tie],
    reports: Sequence[Report],
    rank_of: Sequence[int],
    *,
    is_sharded: bool,
    is_built: bool,
) -> None:
    """Raise ValueError for ties that can't be trained as one parameter. is_built: by a model."""
    facts = facts_of(reports)
    for tie in ties:
        first: dict[int, ParameterPlace] = {}  # by rank
        for place in tie:
            if facts[place].kind != facts[tie[0]].kind:
                raise ValueError(
                    f"{text_of((tie[0], place))} are tied, but one is {facts[tie[0]].kind}, the other "
                    f"{facts[place].kind}: make them alike, or do not tie them"
                )
            other = first.setdefault(rank_of[place[0]], place)
            if is_sharded and other[0] != place[0]:
                raise ValueError(
                    f"{text_of((other, place))} are one parameter on one rank, and shards would make two of "
                    "it: choose a schedule that puts these stages on different ranks, such as zb_h1, or use "
                    "replicate= instead of shard="
                )
            if not is_built and facts[other].identity != facts[place].identity:
                raise ValueError(
                    f"{text_of((other, place))} are tied and on one rank, but they are two tensors: assign "
                    "one Parameter to both modules"
                )
        if len(first) > 1 and any(facts[place].is_sparse for place in tie):
            raise ValueError(
                f"{text_of(tie)} are tied and on several ranks, which can't sum sparse gradients: write "
                "sparse=False"
            )
    with_loss = [one for each in reports for one, other in each.shared if other not in facts]
    for place in with_loss:
        tie = next((each for each in ties if place in each), (place,))
        if rank_of[-1] not in {rank_of[stage] for stage, _ in tie}:
            raise ValueError(
                f"{text_of(tie)} is a parameter of the loss, too, which rank {rank_of[-1]} computes: choose "
                "a schedule that puts both on one rank, such as zb_v, or move that part of the loss into the "
                "last stage"
            )


def text_of(tie: Tie) -> str:
    """`embedding.weight of stage 0 and head.weight of stage 3`."""
    return " and ".join(f"{name} of stage {index}" for index, name in tie)


def _unite(stages: Mapping[int, nn.Module], tie: Tie) -> None:
    """Put the first place's Parameter into all places that this rank has, and declare the tie there."""
    mine = [(stages[index], name) for index, name in tie if index in stages]
    for stage, name in mine:
        old, new = stage.get_parameter(name), mine[0][0].get_parameter(mine[0][1])
        for module in stage.modules():
            for leaf, each in module._parameters.items():
                if each is old:
                    module._parameters[leaf] = new
    for index, name in tie[1:]:
        if index in stages:
            declared = getattr(stages[index], "tied_parameters", None) or {}
            stages[index].tied_parameters = {**declared, name: tie[0]}  # type: ignore[assignment]


# ---- Parameter objects that a model's stages share


def shared_parameters(
    build_stage: Callable[[int, int], nn.Module], num_stages: int, loss: Any = None
) -> list[Pair]:
    """Pairs of places that have one Parameter; [] also for a model that can't be built on meta.

    loss: if it is a module, its parameters count as those of a stage `num_stages`, behind the last one.
    Call this after the stages that will be trained were built, for they may have the model's own modules.
    """
    # One stage at a time is alive. A Parameter that a later stage has, too, is kept alive by the model; any
    # other one is freed and may leave its id to a later one, so a weak reference says which one was seen.
    seen: dict[int, tuple[Any, ParameterPlace]] = {}
    found = []
    num_modules = num_stages + 1 if isinstance(loss, nn.Module) else num_stages
    with warnings.catch_warnings(), torch.random.fork_rng([]), torch.device("meta"), _OnMeta():
        warnings.simplefilter("ignore")
        for index in range(num_modules):
            try:
                module = build_stage(index, num_stages) if index < num_stages else loss
            except Exception:  # the model needs real tensors: it has to declare what its stages share
                return []
            for name, parameter in module.named_parameters():
                known, place = seen.get(id(parameter), (None, (index, name)))
                if known is not None and known() is parameter:
                    found.append((place, (index, name)))
                else:
                    seen[id(parameter)] = ref(parameter), (index, name)
    return found


class _OnMeta(TorchFunctionMode):
    """Replaces every device=... in calls of torch by the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
