"""What a Pipeline is given: a schedule's name becomes a timetable, a model becomes stages.

Whether the ranks of a pipeline fit together is checked before anything runs. What is wrong on one rank is
raised on every rank: none is left waiting for a rank that gave up.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zbpp.devices import device_for_messages, whole
from zbpp.error_text import error_text, kind_of
from zbpp.job.agreement import check_equal, gather, gather_or_refuse
from zbpp.planning import plan
from zbpp.runtime.extra import extras_of
from zbpp.runtime.parameters import Names, names_of
from zbpp.runtime.processes.dtensors import is_spread
from zbpp.runtime.processes.groups import unique_name
from zbpp.runtime.processes.mesh import EXPERT, SHARD, TENSOR, MeshPosition, planned_by_rank_0
from zbpp.runtime.processes.tensor_parallel import has_split_parameters, parallelize
from zbpp.runtime.processes.ties import Tie, TiedStages, agree_on_ties
from zbpp.runtime.processes.wrapped_stages import refusal_of
from zbpp.schedule import Timetable
from zbpp.stage_api import PipelineModel, RefusedStage, check_has_values, missing_methods, stage_of

# torch's class -> the user's name for it. Found by name among a module's bases, so that nothing is imported.
_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DDP": "replicate()",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
}


def timetable_of(
    timetable: Timetable | str | None, num_microbatches: int | None, place: MeshPosition
) -> Timetable:
    """The timetable itself, or the plan of that name for the ranks of a pipeline.

    Raises TypeError or ValueError for arguments that don't determine a timetable, PlanError if there is no
    such plan.
    """
    if isinstance(timetable, Timetable):
        if num_microbatches not in (None, timetable.num_microbatches):
            raise ValueError(
                f"num_microbatches={num_microbatches}, but the timetable has {timetable.num_microbatches}: "
                "leave num_microbatches out, or plan for it"
            )
        return timetable
    if not isinstance(timetable, str):
        found = "no timetable was given" if timetable is None else f"got {type(timetable).__name__}"
        raise TypeError(
            f'a Pipeline needs a timetable, {found}: write Pipeline({{0: module}}, "zb_h1", '
            'num_microbatches=8, loss_fn=...); a zbpp.plan("zb_h1", ...) may stand in place of the name'
        )
    if num_microbatches is None:
        raise ValueError(
            f'Pipeline(stages, "{timetable}") does not say num_microbatches: add num_microbatches=8'
        )
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but there is no process group, so each "
            "would train by itself: call torch.distributed.init_process_group first, or give a timetable "
            "for one rank"
        )
    num_ranks = dist.get_world_size(place.pipeline) if dist.is_initialized() else 1
    return planned_by_rank_0(partial(plan, timetable, num_ranks, num_microbatches), place)


def rank_in(group: dist.ProcessGroup | None, timetable: Timetable) -> int:
    """This process's rank in the pipeline. Raises ValueError if the group doesn't fit the timetable."""
    if timetable.num_ranks == 1 and group is None:
        return 0
    if not dist.is_initialized():
        raise ValueError(
            f"the timetable is for {timetable.num_ranks} ranks, but there is no process group: start the job "
            "with torchrun and call torch.distributed.init_process_group, or plan for one rank"
        )
    size = dist.get_world_size(group)
    if size != timetable.num_ranks:
        raise ValueError(f"the timetable is for {timetable.num_ranks} ranks, the process group has {size}")
    return dist.get_rank(group)


def model_of(stages: object) -> PipelineModel | None:
    """The model that was given in place of stages, or None."""
    if isinstance(stages, Mapping | type) or not isinstance(stages, PipelineModel):
        return None
    return stages


def built_stages(
    model: PipelineModel, indices: Iterable[int], num_stages: int, device: torch.device, place: MeshPosition
) -> dict[int, nn.Module]:
    """{stage index: module} of these stages, on `device`, split over the mesh's tensor dimension.

    Raises ValueError if the model can't build or split one.
    """
    stages: dict[int, nn.Module] = {}
    for index in indices:
        try:
            stage = stage_of(model, index, num_stages)
        except RefusedStage:
            raise
        except Exception as error:
            call = f"build_stage({index}, {num_stages}) of {type(model).__name__}"
            raise ValueError(f"{call} raised {type(error).__name__}: {error}") from error
        stages[index] = stage.to(device)
    parallelize(model, stages, place.mesh)
    return stages


def device_of(
    stages: Iterable[nn.Module],
    group: dist.ProcessGroup | None,
    given: torch.device | str | None = None,
    kinds: Collection[str] = (),
) -> torch.device:
    """Where the stages' tensors and messages are.

    Stages without tensors: the given device, or one of the kind that the other ranks' stages are on, or the
    group's. kinds: those of the other ranks. On gloo a GPU is as good as the CPU: its messages go through
    host memory.
    """
    found = _place_of(stages)
    if found is not None:
        return found
    if given is not None:
        return whole(given)
    (kind,) = kinds if len(kinds) == 1 else (device_for_messages(group),)
    return whole(kind)


def _place_of(stages: Iterable[nn.Module]) -> torch.device | None:
    """Where the stages' tensors are; None if they have none."""
    stages = [*stages]
    for extra in extras_of(stages):
        device: torch.device | None = getattr(extra, "device", None)  # where it puts the stages' tensors
        if device is not None:
            return whole(device)
    tensors = (tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers()))
    return next((each.device for each in tensors), None)


def may_compile(stage: nn.Module) -> bool:
    """Whether zbpp or torch.compile was asked to compile the stage or a part of it."""
    return any(
        each._compiled_call_impl is not None  # module.compile()
        or "_orig_mod" in each._modules  # torch.compile(module)
        or getattr(vars(each).get("forward"), "compiles", False)  # compile_stage(module)
        for each in stage.modules()
    )


# ---- Do the ranks of the pipeline fit together?


class Agreed(NamedTuple):
    """What every rank knows after the check.

    stages: this rank's. names: per rank, `names_of` its stages. ties: of all ranks. key: the same on every
    rank of the pipeline, and unique in the job. kinds: of the devices that the ranks' stages are on.
    """

    stages: dict[int, nn.Module]
    names: list[Names]
    ties: list[Tie]
    key: str
    kinds: set[str]


@dataclass(kw_only=True)
class _Report:
    """What one rank tells the others of its stages. refusal: what is wrong with them, or nothing."""

    refusal: str = ""
    stages: list[int] = field(default_factory=list)
    names: Names = field(default_factory=dict)
    kind: str = ""  # of the device that their tensors are on; "" without tensors
    shapes: str = ""  # of the parameters, with their names and dtypes; as a hash
    key: str = field(default_factory=unique_name)


def check_ranks_agree(
    timetable: Timetable | str | None, num_microbatches: int | None, place: MeshPosition, **options: Any
) -> None:
    """Raise AgreementError everywhere unless all processes were given the same. Collective.

    Called first of all: ranks with different arguments would not wait for each other at the same points. The
    error calls processes by their ranks in the pipeline; in a mesh, where these come again, in the job.
    """
    named: Any = timetable
    if isinstance(timetable, Timetable):
        if timetable.num_ranks == 1 and place.pipeline is None:
            return  # this process trains by itself
        named = f"a Timetable with the hash {_hash(str(timetable))}"
        num_microbatches = num_microbatches or timetable.num_microbatches
    if place.rank < 0:
        raise ValueError("this process is not in the process group that it was given for the pipeline")
    mine = {"timetable": named, "num_microbatches": num_microbatches, **options}
    number = place.rank if place.mesh is None else place.mesh.get_rank()
    numbers, given = zip(*place.gather((number, mine)), strict=True)
    check_equal("arguments of Pipeline", given, numbers)


def agree_on_stages(
    given: Mapping[int, nn.Module] | PipelineModel,
    timetable: Timetable,
    rank: int,
    device: torch.device | str | None,
    place: MeshPosition,
) -> Agreed:
    """Build this rank's stages if a model was given, and check those of all ranks together. Collective.

    device: as in Pipeline. Raises ValueError on every process of the mesh if the stages of one don't fit.
    """
    failure: BaseException | None = None
    stages: dict[int, nn.Module] = {}
    try:
        stages = _stages_of(given, timetable, rank, device, place)
        place_of = _place_of(stages.values())
        report = _Report(
            stages=sorted(stages),
            names=names_of(stages),
            kind="" if place_of is None else place_of.type,
            shapes=_hash(_shapes(stages)),
        )
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        is_told = isinstance(error, ValueError)  # then the refusal has its text, and goes on from its cause
        text = str(error) if is_told else error_text(error)
        failure, report = error.__cause__ if is_told else error, _Report(refusal=text)
    reports: list[_Report] = gather(report, place.pipeline)
    refusal, has_split = _refusal(reports, timetable), has_split_parameters(stages.values())
    mine = rank, report.shapes, has_split
    everyone = gather_or_refuse(refusal, mine, place.gather, cause=failure)
    if place.size(TENSOR) > 1 and not any(has_split for _, _, has_split in everyone):
        raise ValueError(
            "the mesh has a tensor dimension, but no parameter of the stages is split over it: each process "
            "would train the same copy. Split them with torch's parallelize_module(stage, mesh['tensor'], "
            "...) before the Pipeline is made"
        )
    if len({(other, shapes) for other, shapes, _ in everyone}) > timetable.num_ranks:
        raise ValueError(
            "processes that stand at the same rank of the pipeline have stages with different parameters "
            "(names, shapes or dtypes): build them alike"
        )
    if isinstance(given, TiedStages):
        ties = given.ties
    else:
        ties = agree_on_ties(stages, timetable.rank_of, place, model_of(given))
    kinds = {each.kind for each in reports if each.kind}
    return Agreed(stages, [each.names for each in reports], ties, reports[0].key, kinds)


def _refusal(reports: Sequence[_Report], timetable: Timetable) -> str:
    """What is wrong with the stages of this pipeline, or nothing."""
    for other, each in enumerate(reports):
        if each.refusal:
            return f"rank {other}: {each.refusal}" if len(reports) > 1 else each.refusal
        expected = timetable.stages_of(other)
        if each.stages != expected:
            return f"rank {other} owns stages {expected} of this timetable, got modules for {each.stages}"
    return ""


def _shapes(stages: Mapping[int, nn.Module]) -> str:
    rows = (
        (index, *row)
        for index, stage in stages.items()
        for row in chain(stage.named_parameters(), stage.named_buffers())
    )
    return str([(index, name, list(p.shape), str(p.dtype), p.requires_grad) for index, name, p in rows])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stages_of(
    given: Any,
    timetable: Timetable,
    rank: int,
    device: torch.device | str | None,
    place: MeshPosition,
) -> dict[int, nn.Module]:
    """This rank's stages. Raises ValueError for what can't be a Pipeline's `stages`."""
    model = model_of(given)
    if model is not None:
        chosen = device_for_messages(place.pipeline) if device is None else whole(device)
        stages = built_stages(model, timetable.stages_of(rank), timetable.num_stages, chosen, place)
    elif not isinstance(given, Mapping):
        raise ValueError(_neither_stages_nor_model(given))
    elif device is not None and _place_of(_modules_in(given)) is not None:
        raise ValueError(
            f"device={str(device)!r} is for the stages that a model builds: move given stages there by "
            "module.to(device), before the Pipeline is made"
        )
    else:
        stages = dict(given)
    for index, module in stages.items():
        _check_stage(index, module, place)
    return stages


def _modules_in(stages: Mapping[Any, Any]) -> list[nn.Module]:
    return [each for each in stages.values() if isinstance(each, nn.Module)]


def _neither_stages_nor_model(given: Any) -> str:
    if isinstance(given, type):
        return f"stages is the class {given.__name__}: give an instance of it, {given.__name__}()"
    missing = missing_methods(given)
    if len(missing) == 1:
        return f"stages is {kind_of(given)}, a model that lacks {missing[0]}: write this method, too"
    if isinstance(given, nn.Module):
        return (
            f"stages is {kind_of(given)}, a whole module: zbpp.split_sequential or zbpp.trace_stages cuts it "
            "into stages; for a model of transformers write Pipeline(zbpp.models.hf.HuggingFace(path=...), "
            "...); on one rank {0: module}"
        )
    return (
        f"stages is {kind_of(given)}: write Pipeline({{stage index: module}}, ...) with the stages that this "
        "rank owns (a whole model on one rank is {0: model}), or give a model, that is, an instance with "
        "build_stage(index, num_stages) and loss(output, target)"
    )


def _check_stage(index: Any, module: Any, place: MeshPosition) -> None:
    if type(index) is not int or not isinstance(module, nn.Module):
        raise ValueError(
            f"stages has {index!r}: {type(module).__name__}; a key is a stage's index, an int from 0, "
            "and its value a torch.nn.Module"
        )
    wrapper = next(filter(None, map(_wrapper_of, module.modules())), "")
    if wrapper:
        raise ValueError(
            f"stage {index} is wrapped in {wrapper}, whose reductions expect a plain backward pass: "
            "gradients would be wrong. Give the Pipeline the plain module, and let it reduce them: "
            "Pipeline(..., mesh=zbpp.make_mesh(replicate=2))"
        )
    check_has_values(index, module)
    refusal = refusal_of(module, place) or _wrong_mesh(module, place)
    if refusal:
        raise ValueError(f"stage {index} {refusal}")
    if EXPERT not in place.expert_groups and any(map(is_spread, module.parameters())):
        raise ValueError(
            f"stage {index} has experts that are spread over processes, and the pipeline's mesh does not say "
            "over which: write Pipeline(..., mesh=zbpp.make_mesh(..., expert=2)) with the number they have"
        )
    if place.num_token_parts > 1:
        _check_dense(index, module)


def _wrong_mesh(stage: nn.Module, place: MeshPosition) -> str:
    """What is wrong with a stage on a GPU and a mesh of CPUs, or nothing: FSDP2 and DTensor move weights."""
    mesh = place.mesh
    if mesh is None or mesh.device_type != "cpu" or not {SHARD, TENSOR} & place.groups.keys():
        return ""
    found = next((each.device.type for each in stage.parameters() if each.device.type != "cpu"), "")
    return found and (
        "is not on the CPU, where the mesh is, and shards go where the mesh is: write make_mesh(..., "
        f'device_type="{found}")'
    )


def _check_dense(index: int, stage: nn.Module) -> None:
    for name, module in stage.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(
                f"{name or 'the module'} of stage {index} makes sparse gradients, which replicas can't "
                "average: write sparse=False"
            )


def _wrapper_of(module: nn.Module) -> str:
    """What wraps the module, or nothing."""
    bases = (base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch."))
    return next((_WRAPPERS[base] for base in bases if base in _WRAPPERS), "")
