"""The contract between zbpp and a user's model: two methods, no base class.

A model never sees a rank, a group, a microbatch or a schedule. It is asked for one stage at a time, so that
no process ever holds the whole model. Both `Pipeline(model, ...)` and the trainer take it. It may have more:

    metrics(output, target) -> dict[str, Tensor]
        Numbers beside the loss, such as {"accuracy": ...}, of one held-out microbatch; `output` is the last
        stage's, in eval mode and without gradients. Their means over the rows are logged as
        evaluation_accuracy, and so on.
    layer_counts(num_stages) -> list[int]
        How many layers each stage gets, for the summary of a run.
    parallelize(stage, mesh) -> None
        Shards a stage that build_stage made, in place, over the ranks of a torch DeviceMesh with one
        dimension, with torch.distributed.tensor.parallel. All ranks of the mesh call it with equal stages.
        Names and whole values of the parameters stay. The stage still gets and returns whole plain tensors,
        equal on all ranks. Raises ValueError, before anything is changed, if the number of ranks doesn't fit.
    check_pipeline(pipeline) -> None
        Called on every rank once the Pipeline is built. Raises ValueError, on all ranks, for a mistake that
        shows in all stages together; `pipeline.place.gather` tells each rank of the others.
    keeps_documents_apart(num_stages) -> bool
        Whether a row may hold several documents: stage 0 takes (input_ids, position_ids), positions begin at
        0 with each document, and no token sees another document's. data.batching=tokens then packs rows.
    tied() -> dict[str, str]
        The parameters that are one parameter of the model, in names of the whole model:
        {"head.weight": "embedding.weight"}. Each stage may make a tensor of its own for it.

The forward of any stage may add to the loss: `zbpp.auxiliary_loss("balance", value)`.

The last stage may compute the loss itself, so that no logits of a whole microbatch need exist. Then the model
marks its `loss` with `by_last_stage`, and the last stage has forward(..., head=True) and a method
loss(hidden, target): with head=False, forward returns what `loss` takes. Training calls the two, and so does
an evaluation without outputs and metrics. All else, and a Pipeline with another loss_fn, gets whole outputs.

The target may have other names. A stage's `target_names` maps each name to a function, which turns the value
that a whole batch has under this name into the target. All stages of a model have the same names. A caller
may then pass the target as a keyword of such a name, and the trainer's batch may hold it under such a name.

A step may cut sequences into slices (num_slices of a timetable). Then forward runs once per slice, with the
slice's tokens, and takes `sequence_slice: SequenceSlice | None = None` (zbpp/autograd/models/past.py): its
`whole` gives attention the keys and values of earlier slices, and its `start` is the position of the first
token. None: the sequence comes whole. A stage in which no token depends on another one has no such argument,
and says so by `mixes_time = False`, in its class or on the object. A stage whose model can't be run in slices
has a method check_slices(), which raises ValueError with the reason.

In 16 bits a stage may keep some of its tensors in other dtypes: a method declared_dtypes(dtype) returns
{name in the stage: dtype}. Parameters that it does not name get `dtype`, and buffers stay as they are.

A parameter that is tied is trained as one: all its places start with the values of the first stage's, and get
the sum of all gradients. Stages of one rank (zb_v: the first and the last) get one Parameter; each other rank
has a copy, with a gradient and optimizer states of its own.
Stages that share one Parameter object are found without `tied`, by building all of them on the meta device. A
stage that no model builds declares what it shares with other stages: `stage.tied_parameters = {"head.weight":
"embedding.weight"}`, the parameter's name in this stage and in the other one, or {"head.weight": (0,
"embedding.weight")} where several have the name.
Tied parameters have one shape and dtype, and all of them are frozen or none is; else they are refused.

A loss that is a mean over targets says how many a microbatch has: mark it by `mean_over_tokens`, or by
`mean_over(count)`. Then each target of a step weighs the same, however they are spread over microbatches and
replicas. Without a mark each microbatch weighs the same.

Random numbers that forward draws (dropout) are seeded by (seed, step, stage, microbatch): they are the same
under every schedule and in every recompute, but not with another number of stages. So a model with dropout
has the same losses under all schedules of one cut; a model without dropout also under all cuts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from zbpp.error_text import kind_of


@runtime_checkable
class PipelineModel(Protocol):
    """What Pipeline and the trainer need of a model; in YAML it is named by `_target_`."""

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """Stage `index` of `num_stages`, in forward order, on the CPU.

        Stage 0 gets the batch's inputs (see zbpp/data/source.py). Each later stage gets what the stage
        before it returned: a tensor, or a tuple of tensors, which become its positional arguments, each in
        memory of its own even where two of them shared theirs. Parameter names and initial weights must not
        depend on `num_stages`: the names of all stages together are those of the whole model, under which its
        weights are saved. Raises ValueError if the model can't be cut into that many stages.
        """
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor | Mapping[str, Tensor]:
        """The scalar mean loss of one microbatch; `output` is the last stage's.

        Or {name: scalar}: the loss is their sum, and each is logged under its name. No name is "loss". Or
        (sum, count), of a loss that is marked by `mean_over`.
        """
        ...


METHODS = "build_stage(self, index, num_stages)", "loss(self, output, target)"


def missing_methods(model: object) -> list[str]:
    """The methods, as one writes them, that an object lacks to be a PipelineModel."""
    return [each for each in METHODS if not hasattr(model, each.partition("(")[0])]


class RefusedStage(ValueError):
    """build_stage has other arguments than those of the contract, or returned no module with values."""


def stage_of(model: PipelineModel, index: int, num_stages: int) -> nn.Module:
    """What the model's build_stage returns. Raises RefusedStage."""
    name = type(model).__name__
    try:
        signature(model.build_stage).bind(index, num_stages)
    except TypeError as error:
        raise RefusedStage(f"build_stage of {name}: {error}; write def {METHODS[0]}") from None
    stage: object = model.build_stage(index, num_stages)
    if isinstance(stage, nn.Module):
        check_has_values(index, stage)
        return stage
    hint = ": is a return missing?" if stage is None else ": return the one stage of this index"
    returned = f"returned {kind_of(stage)}, not a torch.nn.Module"
    raise RefusedStage(f"build_stage({index}, {num_stages}) of {name} {returned}{hint}")


def check_has_values(index: int, stage: nn.Module) -> None:
    """Raises RefusedStage for a stage with a parameter or buffer on the meta device."""
    named = (*stage.named_parameters(), *stage.named_buffers())
    name = next((name for name, each in named if each.is_meta), "")
    if name and torch.get_default_device().type != "meta":  # else somebody looks for shared parameters only
        raise RefusedStage(
            f"stage {index} has {name} on the meta device, where tensors have no values: call "
            'stage.to_empty(device="cpu") and give the parameters and buffers their values first'
        )


def check_pipeline(model: object, pipeline: object) -> None:
    """Call the model's check_pipeline, if it has one. Collective. Raises ValueError as it does."""
    check = getattr(model, "check_pipeline", None)
    if check is not None:
        check(pipeline)


Function = TypeVar("Function", bound=Callable[..., object])


def widens_itself(function: Function) -> Function:
    """Mark a model's loss or metrics: it computes in float32 whatever the dtype of the output.

    A mixed precision casts the output of the last stage to float32 for all other functions.
    """
    function.widens_itself = True  # type: ignore[attr-defined]  # a function takes attributes
    return function


IGNORED = -100  # the target that a cross-entropy leaves out, in torch and in transformers


def num_tokens(target: Any) -> Tensor:
    """How many targets there are in labels: whole numbers, of which -100 is none."""
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        raise ValueError(
            f"mean_over_tokens counts a tensor of whole numbers, not {_described(target)}: mark the loss by "
            "zbpp.stage_api.mean_over(count), with count(target) -> number of targets"
        )
    return (target != IGNORED).sum()


def _described(target: Any) -> str:
    return str(target.dtype) if isinstance(target, Tensor) else type(target).__name__


def mean_over(count: Callable[[Any], Tensor | float]) -> Callable[[Function], Function]:
    """Mark a loss(output, target) that is a mean over count(target) targets, or that returns (sum, count).

    The loss of a step is then the mean over all its targets: those of all microbatches and of all replicas
    and shards. A microbatch may have no target if the loss returns (sum, count), or 0 for it.
    """

    def mark(function: Function) -> Function:
        function.num_targets = count  # type: ignore[attr-defined]
        return function

    return mark


def mean_over_tokens(function: Function) -> Function:
    """`mean_over(num_tokens)`: targets are whole numbers, and -100 is none."""
    return mean_over(num_tokens)(function)


def mark_of(function: object, name: str) -> Any:
    """A mark of a loss or metrics function, `num_targets` or `widens_itself`; None without one.

    A functools.partial of a marked function is marked, too.
    """
    while isinstance(function, functools.partial) and not hasattr(function, name):
        function = function.func
    return getattr(function, name, None)


TargetNames = Mapping[str, Callable[[Any], Any]]


def target_names(stages: Iterable[nn.Module]) -> TargetNames:
    """The stages' `target_names`, see above: {another name of the target: from its value to the target}."""
    found: Iterable[Any] = (getattr(each, "target_names", None) for each in stages)
    return next((each for each in found if each is not None), {})


def by_last_stage(function: Function) -> Function:
    """Mark a model's loss(output, target): the last stage's own `loss`, if it has one, computes the same."""
    function.by_last_stage = True  # type: ignore[attr-defined]
    return function


def own_loss(stage: nn.Module, loss_fn: object) -> Callable[..., Any] | None:
    """The last stage's own loss(hidden, target), if it takes the place of `loss_fn`.

    It does not if the stage has hooks, which are given what the stage returns: logits.
    """
    if not getattr(loss_fn, "by_last_stage", False) or has_hooks(stage):
        return None
    return getattr(stage, "loss", None)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of somebody else than torch's parallelism."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    is_foreign = any(not str(each.__module__).startswith("torch.distributed.") for each in hooks)
    return is_foreign or bool(module._backward_hooks or module._backward_pre_hooks)


def takes_slices(stage: nn.Module, index: int) -> bool:
    """Whether the forward of a stage takes `sequence_slice`; False where it declares mixes_time = False.

    index: the stage's number, for the error. Raises ValueError for a stage that can't be run in slices.
    """
    check = getattr(stage, "check_slices", None)
    if check is not None:
        check()
    # The class's forward: recompute puts one with (*args, **kwargs) on the object. The module that
    # torch.compile returns has the given one inside.
    inner: nn.Module = getattr(stage, "_orig_mod", stage)
    own = type(inner)
    if "sequence_slice" in signature(own.forward).parameters:
        return True
    if getattr(stage, "mixes_time", True):
        raise ValueError(
            f"stage {index}, a {own.__name__}, can't be run in slices of a sequence: its forward has "
            "no argument sequence_slice. If no token of its output depends on another token, declare "
            "mixes_time = False on the stage; else let its attention take keys and values from "
            "sequence_slice.whole (zbpp/stage_api.py)"
        )
    return False


def batch_norms(module: nn.Module) -> Iterator[nn.Module]:
    """The BatchNorms inside a module. A mixed precision keeps their weights in float32, as autocast does.

    torch wants their weights and their statistics in one dtype, and statistics need float32. Their inputs may
    have 16 bits.
    """
    return (each for each in module.modules() if isinstance(each, _BatchNorm))


def declared_dtypes(stage: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each floating-point parameter and buffer of a stage that computes in a 16-bit `dtype`.

    Weights of a BatchNorm or InstanceNorm are float32. What the stage declares by its own declared_dtypes
    holds.
    """
    inner = getattr(stage, "_orig_mod", None)  # of the module that torch.compile returns
    if inner is not None:
        return {f"_orig_mod.{name}": each for name, each in declared_dtypes(inner, dtype).items()}
    with_statistics = (each for each in stage.modules() if isinstance(each, _NormBase))
    norms = {parameter for norm in with_statistics for parameter in norm.parameters()}
    found = {
        name: torch.float32 if each in norms else dtype
        for name, each in stage.named_parameters(remove_duplicate=False)
        if each.is_floating_point()
    }
    buffers = stage.named_buffers(remove_duplicate=False)
    found |= {name: each.dtype for name, each in buffers if each.is_floating_point()}
    declare = getattr(stage, "declared_dtypes", None)
    declared = {} if declare is None else declare(dtype)
    return found | {name: each for name, each in declared.items() if name in found}


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module. A ModuleList or ModuleDict is never called: its children count instead."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from blocks_of(child)
        else:
            yield child
