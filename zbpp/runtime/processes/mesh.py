"""The DeviceMesh that a pipeline lives in, and this process's place in it.

    dimension    its processes hold                               they see
    pipeline     different stages (outermost dimension)           the same batch
    replicate    copies of the same stages                        different data; gradients are averaged
    shard        a part of each weight of the same stages, FSDP2  different data; gradients are averaged
    context      copies of the same stages                        another part of each sequence; gradients are
                                                                  averaged
    tensor       a part of each layer (innermost dimension)       the same batch

A process belongs to one process group per dimension, together with the processes that differ from it in this
dimension alone.

The processes of dimension "context" see different tokens of the same sequences. A reduction, a norm or a
checkpoint has to know only that the tokens differ: it treats these processes as shards if the mesh has
shards, else as replicas. So the runtime works on a second mesh, in which "context" is a part of "shard" or of
"replicate" (`parameter_mesh`). The mesh that the user gave says which process reads which rows.

The experts of a layer may be spread over the processes that see different data. For experts alone replicate
x shard is then divided otherwise, in a mesh of its own (EXPERT below):

    expert         different experts (inner dimension)                different data
    expert_copies  copies of the same experts; with shards, a part    different data
                   of each weight, FSDP2

The tensors that lie on such a mesh are DTensors: zbpp/runtime/processes/dtensors.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zbpp.devices import device_for_messages, sum_over
from zbpp.error_text import kind_of
from zbpp.job.agreement import broadcast, gather_over
from zbpp.schedule import PlanError, Timetable

PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR = DIMENSIONS = (
    "pipeline",
    "replicate",
    "shard",
    "context",
    "tensor",
)
EXPERT, EXPERT_COPIES = "expert", "expert_copies"
Reshard = Literal["step", "microbatch"]
"""When gathered weights of sharded stages are freed, see Pipeline."""
RESHARD: tuple[str, ...] = get_args(Reshard)
# Attributes of a DeviceMesh: the mesh with the dimensions of experts, the one that parameters lie on, and
# what its dimensions are called here.
_EXPERTS, _PARAMETERS, _NAMES = "_zbpp_experts", "_zbpp_parameters", "_zbpp_dimensions"


def make_mesh(
    *,
    replicate: int = 1,
    shard: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    device_type: str | None = None,
) -> DeviceMesh:
    """A mesh over all processes of the job. Collective.

    Each pipeline has (number of processes) / (replicate x shard x context x tensor) ranks; ValueError is
    raised if that is no whole number. context: how many processes share each sequence, see
    zbpp/features/context/context.py. expert: over how many processes the experts of a layer are spread; it
    divides replicate x shard. device_type: "cpu", "cuda", ...; None: the accelerator's if the job's backend
    carries its tensors itself, as NCCL does; else "cpu".
    """
    check_expert_degree(replicate=replicate, shard=shard, context=context, tensor=tensor, expert=expert)
    if not dist.is_initialized():
        raise ValueError(
            "a mesh needs a process group: start the job with torchrun and call "
            "torch.distributed.init_process_group"
        )
    degrees = {"replicate": replicate, "shard": shard, "context": context, "tensor": tensor}
    num_ranks = num_pipeline_ranks(dist.get_world_size(), **degrees)
    if device_type is None:
        device_type = device_for_messages(None).type
    mesh = init_device_mesh(device_type, (num_ranks, *degrees.values()), mesh_dim_names=DIMENSIONS)
    parameter_mesh(mesh)  # made here, since not all processes make their MeshPosition at the same point
    if expert > 1:
        shape = num_ranks, replicate * shard // expert, expert
        names = PIPELINE, EXPERT_COPIES, EXPERT
        setattr(parameter_mesh(mesh), _EXPERTS, init_device_mesh(device_type, shape, mesh_dim_names=names))
    return mesh


def parameter_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh without a dimension "context", which is a part of "shard" there, or of "replicate".

    The mesh itself if the dimension has one process. The first call for a mesh is collective.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if sizes.get(CONTEXT, 1) == 1:
        return mesh
    if not hasattr(mesh, _PARAMETERS):
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"the mesh has a dimension context and {mesh.size()} of {dist.get_world_size()} processes: a "
                "mesh with this dimension is over all processes of the job"
            )
        pipeline, replicate, shard, context, tensor = (sizes.get(name, 1) for name in DIMENSIONS)
        if shard > 1:
            shard *= context
        else:
            replicate *= context
        shape, names = (pipeline, replicate, shard, tensor), (PIPELINE, REPLICATE, SHARD, TENSOR)
        made = DeviceMesh(mesh.device_type, mesh.mesh.view(shape), mesh_dim_names=names)
        setattr(mesh, _PARAMETERS, made)
    folded: DeviceMesh = getattr(mesh, _PARAMETERS)
    return folded


def check_expert_degree(*, replicate: int, shard: int, context: int, tensor: int, expert: int) -> None:
    """Raises ValueError unless experts can be spread over `expert` of the replicas and shards."""
    if type(expert) is not int or expert < 1:
        raise ValueError(f"expert={expert!r}: write a number of processes, 1 or more")
    for name, degree in (("context", context), ("tensor", tensor)):
        if expert > 1 and degree > 1:
            raise ValueError(
                f"expert={expert} doesn't go with {name}={degree}: write {name}=1, with replicate= or shard="
            )
    if replicate * shard % expert:
        step = expert // math.gcd(expert, shard)
        raise ValueError(
            f"expert={expert} does not divide replicate={replicate} x shard={shard}, whose processes share "
            f"the experts: write replicate={-(-replicate // step) * step}, or another expert="
        )


def experts_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh that has the dimensions expert_copies and expert; None without spread experts."""
    return getattr(mesh, _EXPERTS, None)


def num_pipeline_ranks(num_processes: int, **degrees: int) -> int:
    """How many ranks each pipeline of the job has. Raises ValueError if the degrees don't fit."""
    wrong = {name: degree for name, degree in degrees.items() if type(degree) is not int or degree < 1}
    if wrong:
        name, degree = next(iter(wrong.items()))
        raise ValueError(f"{name}={degree!r}: write a number of processes, 1 or more")
    product = math.prod(degrees.values())
    if num_processes % product:
        text = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise ValueError(
            f"{num_processes} processes can't be divided into {text} = {product}: start a multiple of "
            f"{product} processes, or lower a degree"
        )
    return num_processes // product


def take_as(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Take the dimensions of a user's own mesh for these ones of the pipeline's, whatever they are called."""
    setattr(mesh, _NAMES, names)


def is_taken(mesh: DeviceMesh) -> bool:
    """Whether `take_as` has named the mesh's dimensions."""
    return hasattr(mesh, _NAMES)


def names_in(mesh: DeviceMesh) -> tuple[str, ...]:
    """What the dimensions of a mesh are called here; () if they have no names."""
    names: tuple[str, ...] = getattr(mesh, _NAMES, mesh.mesh_dim_names or ())
    return names


class MeshPosition:
    """This process's groups and coordinates in a mesh; without a mesh, in a pipeline that stands alone.

    group: the pipeline's group, if there is no mesh. Raises ValueError for a mesh that zbpp can't use.

    given: the mesh that was given. dimensions: {dimension of it: number of processes} of those with more than
    one, without the pipeline. context: the group of that dimension; None for one process. mesh: the one that
    parameters lie on, see above. groups: of each dimension of `mesh` but the pipeline, if it has more than
    one process. expert_groups: the same for expert and expert_copies.
    """

    def __init__(self, mesh: DeviceMesh | None, group: dist.ProcessGroup | None = None) -> None:
        if mesh is not None:
            _check(mesh, group)
        self.given = mesh
        given = _groups_in(mesh)
        self.dimensions = {name: dist.get_world_size(each) for name, each in given.items()}
        self.context = given.get(CONTEXT)
        self.mesh = None if mesh is None else parameter_mesh(mesh)
        self.groups = _groups_in(self.mesh)
        self.pipeline = group if self.mesh is None else self.mesh.get_group(PIPELINE)
        self.expert_groups = _groups_in(experts_mesh(self.mesh))

    def has(self, name: str) -> bool:
        """Whether the mesh has this dimension, be it of one process."""
        return self.mesh is not None and name in (self.mesh.mesh_dim_names or ())

    def size(self, name: str) -> int:
        """How many processes the group of a dimension has; `name` is any dimension but "pipeline"."""
        group = self.group(name)
        return 1 if group is None else dist.get_world_size(group)

    def coordinate(self, name: str) -> int:
        """This process's number in the group of a dimension; `name` is any dimension but "pipeline"."""
        group = self.group(name)
        return 0 if group is None else dist.get_rank(group)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The group of a dimension; None for one process. `name` is any dimension but "pipeline"."""
        if name == CONTEXT:
            return self.context
        return self.groups.get(name) or self.expert_groups.get(name)

    def mesh_groups(self) -> list[dist.ProcessGroup]:
        """The groups of all dimensions of the mesh; none without a mesh."""
        meshes = dict.fromkeys([self.given, self.mesh, experts_mesh(self.mesh)])
        return [group for each in meshes if each is not None for group in each.get_all_groups()]

    @property
    def rank(self) -> int:
        """This process's rank in its pipeline."""
        return dist.get_rank(self.pipeline) if dist.is_initialized() else 0

    def divided_over(self, call: str) -> dict[str, int]:
        """{dimension: number of processes} of the dimensions over which the tokens of one call are divided.

        All replicas and shards make a step together. In an evaluation each context group has a batch of its
        own, and divides the sequences. The innermost dimension comes first.
        """
        names = (SHARD, REPLICATE) if call == "step" else (CONTEXT,)
        return {name: self.size(name) for name in names if self.size(name) > 1}

    @property
    def num_token_parts(self) -> int:
        """Into how many parts a step's tokens are divided: parts of rows, and of these parts of sequences."""
        return math.prod(self.divided_over("step").values())

    @property
    def token_part(self) -> int:
        """Which part of a step's tokens this process computes, from 0."""
        part, step = 0, 1
        for name, size in self.divided_over("step").items():
            part, step = part + step * self.coordinate(name), step * size
        return part

    @property
    def num_data_parts(self) -> int:
        """Into how many parts a step's rows are divided: each replica and each shard reads one.

        The processes of one context group read the same.
        """
        return self.num_token_parts // self.size(CONTEXT)

    @property
    def data_part(self) -> int:
        """Which part of a step's rows this process reads, from 0."""
        return self.token_part // self.size(CONTEXT)

    @property
    def num_pipelines(self) -> int:
        """How many pipelines the mesh has."""
        return math.prod(map(self.size, self.groups))

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of every dimension but the pipeline."""
        return not any(map(self.coordinate, self.groups))

    @property
    def dimensions_of_parts(self) -> tuple[str, ...]:
        """Their processes hold different parts of a parameter. Replicas do so only if experts are spread."""
        return (TENSOR, SHARD, REPLICATE) if self.expert_groups else (TENSOR, SHARD)

    def sum_over(self, dimensions: Iterable[str], values: torch.Tensor) -> None:
        """Sum the values, in place, over these dimensions of `mesh`. Collective."""
        for name in dimensions:
            if name in self.groups:
                sum_over(self.groups[name], values)

    def gather(self, value: Any) -> list[Any]:
        """The value of every process of the mesh, on every process. Collective.

        The ranks of one pipeline stand side by side, those of the first pipeline first.
        """
        return gather_over(value, (self.pipeline, *self.groups.values()))

    def broadcast(self, value: Any) -> Any:
        """The value of the mesh's first process, on every process. Collective."""
        value = broadcast(value, self.pipeline)
        for group in self.groups.values():
            value = broadcast(value, group)
        return value


def _groups_in(mesh: DeviceMesh | None) -> dict[str, dist.ProcessGroup]:
    """{dimension: its group}, of those with more than one process, without the pipeline."""
    if mesh is None:
        return {}
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return {name: mesh.get_group(name) for name, size in sizes if name != PIPELINE and size > 1}


def _check(mesh: DeviceMesh, group: dist.ProcessGroup | None) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is {kind_of(mesh)}: write mesh=zbpp.make_mesh(replicate=2)")
    if group is not None:
        raise ValueError("mesh and group are both given: a mesh has its own groups, leave group out")
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in DIMENSIONS]
    if PIPELINE not in names or unknown or list(names) != sorted(names, key=DIMENSIONS.index):
        raise ValueError(
            f"the mesh has the dimensions {', '.join(names) or '(without names)'}: a Pipeline takes "
            f"{', '.join(DIMENSIONS)}, in this order, pipeline always; zbpp.make_mesh(replicate=2) makes one"
        )


def planned_by_rank_0(make: Callable[[], Timetable], place: MeshPosition | None = None) -> Timetable:
    """Call `make` on the mesh's first process alone; return its timetable on all, or raise its PlanError.

    Ranks that planned from their own measurements could disagree. So one plans, and the plan travels as text.
    place: None for all processes of the job. Collective.
    """
    place = place or MeshPosition(None)
    text = refusal = ""
    if not dist.is_initialized() or (place.is_first and dist.get_rank(place.pipeline) == 0):
        try:
            text = str(make())
        except PlanError as error:
            refusal = str(error)
    text, refusal = place.broadcast((text, refusal))
    if refusal:
        raise PlanError(refusal)
    return Timetable.parse(text)
