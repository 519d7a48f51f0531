"""Tensor parallelism of a stage made of transformer blocks: each rank has some heads and some MLP columns.

    layer                         weight      its input     its output
    embedding                     Shard(1)    whole         gathered
    query, key, value, gate, up   Shard(0)    whole         a shard of the last dimension: some heads
    output, down                  Shard(1)    that shard    summed over the ranks
    norms                         whole       whole         whole
    head                          Shard(0)    whole         gathered: logits
    head with the embedding's weight  Shard(1)  a shard of the hidden dimension  summed over the ranks: logits

With sequence parallelism the norms and the residual sums between these layers work on a shard of the
sequence. The whole sequence is gathered before query and gate, and the sums after output and down are
scattered along the sequence.

Tensors between stages, logits and loss are whole, and equal on all ranks of the mesh. The embedding is
sharded along the hidden dimension, so that W needs no communication: every rank has every token, and its
shard of the gradient needs the same columns of dy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from zbpp.models.layers import Block, check_divides

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

Styles = dict[str, "ParallelStyle"]
"""Name of a module -> how torch shards it."""


class BlockPlan(NamedTuple):
    """The names of the modules that are sharded: `columns`, `rows` in each block, `embedding` in the stage.

    columns: the linear layers with weight Shard(0); rows: those with weight Shard(1). is_tied: the
    head has the embedding's weight, so it is sharded along the same dimension.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    embedding: str
    sequence_parallel: bool = False
    is_tied: bool = False


def parallelize(stage: nn.Module, mesh: DeviceMesh, plan: BlockPlan, sizes: Mapping[str, int]) -> None:
    """Shard a stage in place over the ranks of a mesh with one dimension.

    The parameters keep their names and whole values. Every rank must have the same initial values, since
    nothing is communicated. sizes: {name: a size of the model that the number of ranks has to divide}.
    Raises ValueError, before anything is changed, if a size can't be divided or the mesh has several
    dimensions.
    """
    check_mesh(mesh)
    for name, size in sizes.items():
        check_divides(name, size, "the tensor-parallel degree", mesh.size())
    shard(stage, mesh, _styles(stage, plan))
    if plan.sequence_parallel:
        shard(stage, mesh, _sequence_boundaries(stage))
        stage.register_forward_pre_hook(_SequenceCheck(mesh.size()), prepend=True)


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises ValueError if a mesh has more than one dimension."""
    if mesh.ndim != 1:
        raise ValueError(
            f"a stage is sharded over one dimension, and this mesh has {mesh.ndim}: {mesh.mesh_dim_names}; "
            'give the one that is to share the weights, mesh["tensor"]'
        )


def shard(stage: nn.Module, mesh: DeviceMesh, styles: Styles) -> None:
    """torch's parallelize_module, without communication; parameters stay frozen, and shared, if they were."""
    from torch.distributed.tensor.parallel import parallelize_module

    frozen = [name for name, parameter in stage.named_parameters() if not parameter.requires_grad]
    shared = _shared_names(stage)
    parallelize_module(stage, mesh, styles, src_data_rank=None)
    for name in frozen:
        stage.get_parameter(name).requires_grad_(False)
    _share_again(stage, shared)


def _shared_names(stage: nn.Module) -> list[list[str]]:
    """The names of each parameter that several modules of the stage have."""
    names: dict[int, list[str]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _share_again(stage: nn.Module, shared: list[list[str]]) -> None:
    """Make shared parameters one object again: torch makes a DTensor for each module that has one."""
    for first, *others in shared:
        kept: Any = stage.get_parameter(first)
        for name in others:
            if getattr(stage.get_parameter(name), "placements", None) != getattr(kept, "placements", None):
                raise ValueError(
                    f"{first} and {name} are one parameter, but would be sharded differently: give both "
                    "modules styles with the same placement, or do not tie them"
                )
            owner, _, leaf = name.rpartition(".")
            setattr(stage.get_submodule(owner), leaf, kept)


def _styles(stage: nn.Module, plan: BlockPlan) -> Styles:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    between = Shard(1) if plan.sequence_parallel else Replicate()
    names = [name for name, _ in stage.named_modules()]
    styles: Styles = {}
    for name, module in stage.named_children():
        if isinstance(module, Block):
            styles |= {f"{name}.{part}": style for part, style in _block_styles(plan, between).items()}
    if plan.embedding in names:
        styles[plan.embedding] = ColwiseParallel(output_layouts=Replicate())
    if "norm" in names and plan.sequence_parallel:
        styles["norm"] = SequenceParallel()
    if "head" in names:
        style = RowwiseParallel if plan.is_tied else ColwiseParallel
        styles["head"] = style(input_layouts=between, output_layouts=Replicate())
    return styles


def _block_styles(plan: BlockPlan, between: Any) -> Styles:
    """The styles of one block. between: the placement of the residual sum.

    The inputs of attention and MLP are gathered once, not again by each layer of `columns`.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    gather = {"input_layouts": between, "desired_input_layouts": Replicate()}
    styles: Styles = {part: PrepareModuleInput(**gather) for part in ("attention", "mlp")}
    styles |= {name: ColwiseParallel() for name in plan.columns}
    styles |= {name: RowwiseParallel(output_layouts=between) for name in plan.rows}
    if plan.sequence_parallel:
        styles |= {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    return styles


# ---- Sequence parallelism


def _sequence_boundaries(stage: nn.Module) -> Styles:
    """Cut the sequence where it enters the blocks, gather it where it leaves them for another stage."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
    )

    parts = [name for name, _ in stage.named_children()]
    into: dict[str, Any] = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}
    out_of: dict[str, Any] = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    styles: Styles = {}
    if "embedding" in parts:
        styles["embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    if "embedding" not in parts and "head" not in parts:
        styles[""] = PrepareModuleInputOutput(**into, use_local_input=True, **out_of)
    elif "head" not in parts:
        styles[""] = PrepareModuleOutput(**out_of)
    elif "embedding" not in parts:
        styles[""] = PrepareModuleInput(**into, use_local_output=True)
    return styles


class _SequenceCheck:
    """A hook that refuses sequences which the ranks can't share evenly, and documents that are told apart."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) > 1:
            raise ValueError(
                "sequence_parallel=true cuts rows, and position_ids tell their documents apart: write "
                "model.sequence_parallel=false, or batches without position_ids (data.across_documents=true)"
            )
        check_divides("the sequence's length", args[0].shape[1], "the tensor-parallel degree", self.num_ranks)
