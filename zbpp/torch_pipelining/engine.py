"""A zbpp.Pipeline for each schedule object of torch's.

The Pipeline is made at the first step, collectively, and again if the order or a submodule was replaced or an
error has ended it. It is closed, without a word to other ranks, when the schedule object is gone.

What is as in torch: the gradient of the batch's input is not divided by the number of microbatches, losses
and outputs are in torch's lists, modules keep their training mode in `eval`. What differs: a second step
without zero_grad adds (torch divides the earlier gradient again); losses and outputs come without a graph;
random numbers in forward are seeded from the caller's generator, one number per step.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules as torchs
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from zbpp.features.reductions.fully_shard import meshes_of
from zbpp.job.agreement import gather, gather_over
from zbpp.planning import plan
from zbpp.planning.plan import check_name
from zbpp.runtime import Pipeline, per_microbatch
from zbpp.runtime.extra import Feature
from zbpp.runtime.processes.mesh import (
    PIPELINE,
    REPLICATE,
    SHARD,
    TENSOR,
    MeshPosition,
    planned_by_rank_0,
    take_as,
)
from zbpp.schedule import PlanError, Timetable
from zbpp.torch_pipelining.features import ForwardKeywords, WeightsByUser, forward_keywords
from zbpp.torch_pipelining.order import orders_of, scales_gradients, timetable_of
from zbpp.torch_pipelining.refusal import refusal

fallbacks: list[str] = []
installed: dict[type, Any] = {}  # torch's class that runs on zbpp -> its own method

_ENGINE, _PLAN = "_zbpp_engine", "_zbpp_plan"  # attributes of a schedule object
_MOST_SEED = 2**62
_PARAMETERS = inspect.signature(plan)

Schedule = TypeVar("Schedule")


def use_plan(schedule: Any, name: str, **options: Any) -> None:
    """From the next step on, run a schedule of zbpp's with the same stages on the same ranks.

    name, options: those of `zbpp.plan`, such as "zb_auto" and memory_limit=4. Raises PlanError for an unknown
    name, TypeError for an unknown option. The next step raises PlanError on all ranks for a plan that does
    not exist, and for one that places stages on other ranks. Call it on all ranks alike.
    """
    check_name(name)
    _PARAMETERS.bind(name, 1, 1, **options)  # here, since the first rank alone will make the plan
    setattr(schedule, _PLAN, (name, options))


def run_step(
    schedule: Any,
    of_torch: Callable[..., None],
    arg_mbs: list[Any] | None = None,
    kwarg_mbs: list[Any] | None = None,
    target_mbs: list[Any] | None = None,
    losses: list[Any] | None = None,
    return_outputs: bool = True,
    **more: Any,
) -> None:
    """A schedule's `_step_microbatches`. of_torch: torch's own, for what can't run here."""
    arg_mbs, kwarg_mbs = schedule._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
    stages = stages_of(schedule)
    engine = vars(schedule).get(_ENGINE)
    if engine is None or not engine.fits(schedule, stages):
        if engine is not None:
            engine.drop()
        engine = _engine_for(schedule, stages, (arg_mbs, kwarg_mbs))
        setattr(schedule, _ENGINE, engine)
    if engine.reason:
        of_torch(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **more)
    else:
        engine.step(schedule, arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **more)


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank."""
    return schedule._stages if isinstance(schedule, torchs.PipelineScheduleMulti) else [schedule._stage]


def engine_of(schedule: Any) -> _Engine:
    """What runs the steps of a schedule that has made one."""
    engine: _Engine = vars(schedule)[_ENGINE]
    return engine


def without_engine(schedule: Schedule) -> Schedule:
    """A copy of the schedule object over the same stages, as if it had made no step here."""
    found = copy.copy(schedule)
    vars(found).pop(_ENGINE, None)
    return found


class _Engine:
    """What runs the steps of one schedule object. reason: why that is torch's runtime; "" if it is zbpp."""

    def __init__(self, schedule: Any, stages: list[Any], reason: str) -> None:
        self.reason = reason
        self._made_for = _signature(schedule, stages)
        self._plan = vars(schedule).get(_PLAN)  # kept, so that no later plan gets its id
        self._pipeline: Pipeline | None = None
        if reason:
            fallbacks.append(reason)
            warnings.warn(f"{type(schedule).__name__} runs on torch's own runtime: {reason}", stacklevel=5)
            return
        self._loss = _Loss(schedule)
        self._pipeline = _pipeline_of(schedule, stages, self._loss)
        self._end = weakref.finalize(schedule, self._pipeline.end, "its schedule is gone")
        self._end.atexit = False

    def fits(self, schedule: Any, stages: list[Any]) -> bool:
        """Whether a step of the schedule can run here. A failed Pipeline is replaced, on all ranks."""
        is_over = self._pipeline is not None and self._pipeline.is_over
        return not is_over and self._made_for == _signature(schedule, stages)

    @property
    def pipeline(self) -> Pipeline:
        """What runs the steps, if there is no `reason`."""
        assert self._pipeline is not None
        return self._pipeline

    def drop(self) -> None:
        """Give up the Pipeline, at once."""
        if self._pipeline is not None:
            self._end()

    def step(
        self,
        schedule: Any,
        arg_mbs: list[Any],
        kwarg_mbs: list[Any],
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """One iteration, with its results where torch's methods leave them."""
        pipeline, number = self.pipeline, schedule._n_microbatches
        is_scaled = scales_gradients(schedule)
        factor = number if is_scaled else 1
        args = _columns(arg_mbs, factor)
        kwargs = {name: _column([each[name] for each in kwarg_mbs], factor) for name in kwarg_mbs[0]}
        told = forward_keywords(schedule, stages_of(schedule)[0])
        kwargs |= dict.fromkeys(told, per_microbatch(range(number)))
        target = None if target_mbs is None else per_microbatch(target_mbs)
        self._loss.begin(loss_kwargs, keeps_outputs=return_outputs)
        pipeline.seed = int(torch.randint(_MOST_SEED, ()))
        try:
            if schedule._has_backward:
                pipeline.loss_scale = 1.0 if is_scaled else float(number)
                found = pipeline.step(*args, target=target, **kwargs)
            else:
                found = pipeline.forward(*args, target=target, observe=self._loss.note, **kwargs)
        finally:
            outputs = self._loss.end()
        for stage in stages_of(schedule):
            if stage.is_last:
                stage.output_chunks = outputs
                if losses is not None:
                    losses[:] = found


class _Loss:
    """The loss of a schedule of torch's, which also keeps the outputs that it is computed from."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = weakref.ref(schedule)  # the schedule holds the Pipeline, which holds this
        self._kwargs: Mapping[str, Any] | None = None
        self._outputs: list[Any] = []
        self._keeps_outputs = False

    def begin(self, kwargs: Mapping[str, Any] | None, *, keeps_outputs: bool) -> None:
        """Take the loss_kwargs of a step."""
        self._kwargs, self._keeps_outputs = kwargs, keeps_outputs

    def end(self) -> list[Any]:
        """The outputs of the step's microbatches, in order."""
        outputs, self._outputs, self._kwargs = self._outputs, [], None
        return outputs

    def note(self, output: Any, target: Any = None) -> None:
        """Keep an output."""
        if self._keeps_outputs:
            detached = tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, output)
            self._outputs.append(detached)

    def __call__(self, output: Any, target: Any) -> Any:
        schedule = self._schedule()
        assert schedule is not None  # its step runs
        if torch.is_grad_enabled():  # else a forward, which notes outputs without a loss, too
            self.note(output)
        further = (self._kwargs,) if self._kwargs else ()
        return schedule._compute_loss(output, target, *further)


def _columns(arg_mbs: list[Any], factor: int) -> list[Any]:
    """The positional arguments of `Pipeline.step`: of each argument its value in every microbatch."""
    rows = [each if isinstance(each, tuple) else (each,) for each in arg_mbs]
    return [_column(column, factor) for column in zip(*rows, strict=True)]


def _column(values: Iterable[Any], factor: int) -> Any:
    """An argument's value in every microbatch.

    factor: the gradient of the argument is multiplied by it, since torch does not divide that gradient by the
    number of microbatches.
    """

    def scaled(value: Any) -> Any:
        if factor == 1 or not (isinstance(value, Tensor) and value.requires_grad):
            return value
        return _Scaled.apply(value, factor)  # type: ignore[no-untyped-call]  # torch's

    return per_microbatch([tree_map(scaled, each) for each in values])


class _Scaled(torch.autograd.Function):
    """The identity; its backward multiplies the gradient by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


# ---------------------------------------------------------------- making it


def _engine_for(schedule: Any, stages: list[Any], batch: Any) -> _Engine:
    """The engine of a schedule object. Collective: one rank that can't run its part here decides for all."""
    own = refusal(schedule, stages, batch)
    found = gather_over(own, (stages[0].group, *_data_groups(stages[0].submod).values()))
    return _Engine(schedule, stages, next(filter(None, found), ""))


def _signature(schedule: Any, stages: list[Any]) -> Any:
    """What a Pipeline is made for: the modules, the order, the plan."""
    orders = orders_of(schedule) if isinstance(schedule, torchs.PipelineScheduleMulti) else {}
    rows = tuple((rank, id(row), len(row)) for rank, row in orders.items())
    return [id(each.submod) for each in stages], rows, schedule._n_microbatches, id(vars(schedule).get(_PLAN))


def _pipeline_of(schedule: Any, stages: list[Any], loss: _Loss) -> Pipeline:
    """A Pipeline over a schedule's stages. Collective. Raises ValueError or PlanError on all ranks."""
    timetable = timetable_of(schedule)
    mesh = _mesh_of(stages)
    if _PLAN in vars(schedule):
        name, options = vars(schedule)[_PLAN]
        timetable = _planned(
            timetable, name, options, MeshPosition(mesh, None if mesh is not None else stages[0].group)
        )
    modules = {each.stage_index: _unwrapped(each.submod) for each in stages}
    return Pipeline(
        modules,
        timetable,
        None if schedule._loss_fn is None else loss,
        None if mesh is not None else stages[0].group or dist.group.WORLD,
        mesh=mesh,
        dynamic_shapes=getattr(schedule, "dynamic_shapes", False),
        extras=_features_of(schedule, stages),
    )


def _features_of(schedule: Any, stages: list[Any]) -> list[Feature]:
    """The features of a schedule's Pipeline."""
    builders = {each.stage_index: each.dw_builder for each in stages if each.dw_builder is not None}
    found: list[Feature] = [WeightsByUser(builders)] if builders else []
    told = forward_keywords(schedule, stages[0])
    return [*found, ForwardKeywords(schedule, stages, told)] if told else found


def _planned(own: Timetable, name: str, options: Mapping[str, Any], place: MeshPosition) -> Timetable:
    """The plan of this name, made on the first rank. Raises PlanError on all ranks."""

    def make() -> Timetable:
        made = plan(name, own.num_ranks, own.num_microbatches, **options)
        if made.rank_of != own.rank_of:
            raise PlanError(
                f"{name} places its stages on the ranks {list(made.rank_of)}, and the schedule's stages are "
                f"on {list(own.rank_of)}: name another plan, or its placement"
            )
        return made

    return planned_by_rank_0(make, place)


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _data_groups(module: nn.Module) -> dict[str, dist.ProcessGroup]:
    """The groups that a stage's wrapper reduces gradients over, by their dimension of a Pipeline's mesh."""
    if isinstance(module, DistributedDataParallel):
        return {REPLICATE: module.process_group}
    if not isinstance(module, FSDPModule):
        return {}
    mesh = max((reduced for _, reduced in meshes_of(module)), key=DeviceMesh.size)
    return dict(zip((REPLICATE, SHARD)[-mesh.ndim :], mesh.get_all_groups(), strict=True))


def _mesh_of(stages: list[Any]) -> DeviceMesh | None:
    """The mesh of the pipeline and of its stages' wrapper, made of the user's own groups; None without one.

    Collective over the pipeline and over the data groups.
    """
    first = stages[0]
    groups = _data_groups(first.submod)
    if not groups:
        return None
    for mesh, reduced in (pair for each in stages for pair in meshes_of(each.submod)):
        of_tensor = (TENSOR,) * (mesh.ndim - reduced.ndim)
        take_as(mesh, tuple(groups)[-reduced.ndim :] + of_tensor)
    pipeline: Any = first.group or dist.group.WORLD
    ranks: Any = [dist.get_rank()]
    for group in reversed(groups.values()):
        ranks = gather(ranks, group)
    table = torch.tensor(gather(ranks, pipeline))
    members = [pipeline, *groups.values()]
    shape = [dist.get_world_size(each) for each in members]
    names = (PIPELINE, *groups)
    device = torch.device(first.device).type
    return DeviceMesh.from_group(members, device, mesh=table.reshape(shape), mesh_dim_names=names)
