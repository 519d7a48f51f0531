"""Whether the ranks of a pipeline fit together, checked before anything runs.

What is wrong on one rank is raised on every rank: none is left waiting for a rank that gave up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zbpp.runtime.arguments import built_stages, device_for_messages, model_of
from zbpp.runtime.groups import unique_name
from zbpp.runtime.parameters import names_of, refuse_tied_across_ranks, tied_of
from zbpp.runtime.ties import check_ties
from zbpp.runtime.world import check_agreement, gather
from zbpp.schedule import Timetable
from zbpp.stage_api import PipelineModel

# torch's class -> the user's name for it. Found by name among a module's bases, so that nothing is imported.
_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DDP": "replicate()",
    "FSDPModule": "FSDP2 (fully_shard)",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
}


class Agreed(NamedTuple):
    """What every rank knows after the check.

    stages: this rank's. names: per rank, {stage: the names in its state_dict}. key: the same on every rank,
    and unique in the job.
    """

    stages: dict[int, nn.Module]
    names: list[dict[int, list[str]]]
    key: str


@dataclass(kw_only=True)
class _Report:
    """What one rank tells the others of its stages. refusal: what is wrong with them, or nothing."""

    refusal: str = ""
    is_built: bool = False  # by a PipelineModel
    stages: list[int] = field(default_factory=list)
    names: dict[int, list[str]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    key: str = field(default_factory=unique_name)


def check_ranks_agree(timetable: Timetable, dynamic_shapes: bool, group: dist.ProcessGroup | None) -> None:
    """Raise AgreementError on every rank unless all ranks have the same timetable and dynamic_shapes."""
    digest = hashlib.sha256(str(timetable).encode()).hexdigest()[:16]
    check_agreement("pipelines", {"dynamic_shapes": dynamic_shapes, "timetable (by hash)": digest}, group)


def agree_on_stages(
    given: Mapping[int, nn.Module] | PipelineModel,
    timetable: Timetable,
    rank: int,
    device: torch.device | str | None,
    group: dist.ProcessGroup | None,
) -> Agreed:
    """Build this rank's stages if a model was given, and check those of all ranks together. Collective.

    device: as in Pipeline. Raises ValueError on every rank if the stages of one don't fit.
    """
    failure: Exception | None = None
    stages: dict[int, nn.Module] = {}
    model = model_of(given)
    try:
        stages = _stages_of(given, timetable, rank, device, group)
        report = _Report(
            is_built=model is not None, stages=sorted(stages), names=names_of(stages), tied=tied_of(stages)
        )
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        failure, report = error, _Report(refusal=text)
    reports: list[_Report] = gather(report, group)
    for other, each in enumerate(reports):
        if each.refusal:
            text = f"rank {other}: {each.refusal}" if len(reports) > 1 else each.refusal
            raise ValueError(text) from failure
        expected = timetable.stages_of(other)
        if each.stages != expected:
            raise ValueError(
                f"rank {other} owns stages {expected} of this timetable, got modules for {each.stages}"
            )
    names = [each.names for each in reports]
    refuse_tied_across_ranks([each.tied for each in reports], names)
    if all(each.is_built for each in reports) and model is not None:
        check_ties(model.build_stage, timetable.rank_of, is_rank_0=rank == 0, group=group)
    return Agreed(stages, names, reports[0].key)


def _stages_of(
    given: Any,
    timetable: Timetable,
    rank: int,
    device: torch.device | str | None,
    group: dist.ProcessGroup | None,
) -> dict[int, nn.Module]:
    """This rank's stages. Raises ValueError for what can't be a Pipeline's `stages`."""
    model = model_of(given)
    if model is not None:
        chosen = device_for_messages(group) if device is None else torch.device(device)
        stages = built_stages(model, timetable.stages_of(rank), timetable.num_stages, chosen)
    elif not isinstance(given, Mapping):
        raise ValueError(_neither_stages_nor_model(given))
    elif device is not None:
        raise ValueError(
            f"device={str(device)!r} is for the stages that a model builds: move given stages there by "
            "module.to(device), before the Pipeline is made"
        )
    else:
        stages = dict(given)
    for index, module in stages.items():
        _check_stage(index, module)
    return stages


def _neither_stages_nor_model(given: Any) -> str:
    if isinstance(given, type):
        name = given.__name__
        return f"stages is the class {name}, not an instance: write Pipeline({name}(...), ...)"
    text = (
        f"stages is a {type(given).__name__}: write Pipeline({{stage index: module}}, ...) with the stages "
        "that this rank owns; a whole model on one rank is {0: model}"
    )
    methods = ("build_stage(index, num_stages)", "loss(output, target)")
    missing = [method for method in methods if not hasattr(given, method.partition("(")[0])]
    if len(missing) == 1:
        return f"{text}; as a model that builds its own stages it lacks {missing[0]}"
    return f"{text}; or give a model with {' and '.join(methods)}"


def _check_stage(index: Any, module: Any) -> None:
    if type(index) is not int or not isinstance(module, nn.Module):
        raise ValueError(
            f"stages has {index!r}: {type(module).__name__}; a key is a stage's index, an int from 0, "
            "and its value a torch.nn.Module"
        )
    wrapper = next(filter(None, map(_wrapper_of, module.modules())), "")
    if wrapper:
        raise ValueError(
            f"stage {index} is wrapped in {wrapper}, whose reductions expect a plain backward pass: "
            "gradients would be wrong. Give the Pipeline the plain module; to train replicas, average "
            "`.grad` after step() with torch.distributed.all_reduce"
        )


def _wrapper_of(module: nn.Module) -> str:
    """What wraps the module, or nothing."""
    bases = (base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch."))
    return next((_WRAPPERS[base] for base in bases if base in _WRAPPERS), "")
