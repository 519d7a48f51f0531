"""Ties that a model knows of: its `tied()`, and the Parameter objects that its stages share.

Every rank builds its own stages only, so none sees by itself that a stage elsewhere has the same Parameter.
Rank 0 therefore builds all stages on the meta device and compares them (shared_parameters.py). The ties that
are found are declared on the stages, as the author of a stage would: `stage.tied_parameters = {...}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from zbpp.runtime.shared_parameters import Pair, ParameterPlace, shared_parameters
from zbpp.runtime.ties import (
    Facts,
    Tie,
    TieReport,
    check_alike,
    declare,
    put_together,
    replace_parameter,
    report_of,
    text_of,
    ties_of,
)
from zbpp.runtime.world import gather


class _ModelReport(NamedTuple):
    """What one rank tells the others about stages that a model built.

    named: the model's tied(). shared: pairs of places that have one Parameter, found on meta; the loss counts
    as a stage behind the last one. stages: those of the rank. refusal: what is wrong; then the rest is empty.
    """

    report: TieReport
    named: Mapping[str, str] = {}
    shared: Sequence[Pair] = ()
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
    """Declare on this rank's stages the ties that the model knows of. Collective over the group.

    stages: this rank's, built by the model. Places of a tie on this rank get one Parameter, the first
    place's. Raises ValueError on every rank for ties that are impossible.
    """
    reports: list[_ModelReport] = gather(_model_report(model, stages, num_stages, is_rank_0), group)
    for each in reports:
        if each.refusal:
            raise ValueError(each.refusal)
    everyone = put_together([each.report for each in reports])
    shared = list(chain.from_iterable(each.shared for each in reports))
    between_stages = [pair for pair in shared if everyone.facts.keys() >= set(pair)]  # none with the loss
    ties = ties_of(everyone, reports[0].named, between_stages)
    check_alike(ties, everyone.facts)
    with_loss = [first for first, (stage, _) in shared if stage == num_stages]
    last_rank = next(rank for rank, each in enumerate(reports) if num_stages - 1 in each.stages)
    _check_loss(with_loss, last_rank, ties, everyone.facts)
    _unite(stages, ties)
    for first, *others in ties:
        for stage, name in others:
            if stage in stages:
                declare(stages[stage], name, first)


def _model_report(
    model: Any, stages: Mapping[int, nn.Module], num_stages: int, is_rank_0: bool
) -> _ModelReport:
    try:
        named = dict(model.tied()) if callable(getattr(model, "tied", None)) else {}
        is_compared = is_rank_0 and num_stages > 1
        shared = shared_parameters(model.build_stage, num_stages, model.loss) if is_compared else []
        return _ModelReport(report_of(stages), named, shared, list(stages))
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return _ModelReport(TieReport({}, {}), refusal=f"ties of {type(model).__name__}: {text}")


def _check_loss(
    with_loss: Iterable[ParameterPlace],
    last_rank: int,
    ties: Iterable[Tie],
    facts: Mapping[ParameterPlace, Facts],
) -> None:
    """Raise ValueError for a parameter of the loss that no stage on the last stage's rank has.

    with_loss: the places that share a Parameter with the loss.
    """
    for place in with_loss:
        tie = next((each for each in ties if place in each), (place,))
        if last_rank not in {facts[each].rank for each in tie}:
            raise ValueError(
                f"{text_of(tie)} is a parameter of the loss, too, which rank {last_rank} computes: choose a "
                "schedule that puts both on one rank, such as zb_v, or move that part of the loss into the "
                "last stage"
            )


def _unite(stages: Mapping[int, nn.Module], ties: Iterable[Tie]) -> None:
    """Put the first place's Parameter into all places of a tie that this rank has."""
    for tie in ties:
        places = [place for place in tie if place[0] in stages]
        for index, name in places[1:]:
            first_stage, first_name = places[0]
            new, old = stages[first_stage].get_parameter(first_name), stages[index].get_parameter(name)
            replace_parameter(stages[index], old, new)
