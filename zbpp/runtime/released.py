"""Makes the GradientRelease of a rank's stages, and refuses what gradient release can't go with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from zbpp.runtime.gradient_release import GradientRelease, parameters_of
from zbpp.runtime.mesh import REPLICATE, SHARD, Place
from zbpp.runtime.optimizer_accumulation import OptimizerAccumulation
from zbpp.runtime.stage_updates import StageUpdates
from zbpp.runtime.weight_offload import offloaded_weights

_WRITE_STEP = "write gradient_release=step (accumulate=False)"


def make_gradient_release(
    optimizer: torch.optim.Optimizer,
    stages: Mapping[int, nn.Module],
    late: Iterable[nn.Parameter],
    of_loss: Iterable[nn.Parameter],
    place: Place,
    last_stage: int,
    num_microbatches: int,
    *,
    accumulate: bool,
    keep_squares: bool,
) -> GradientRelease:
    """The GradientRelease of one rank's stages.

    late: the parameters that several stages or ranks share. of_loss: all parameters of the loss, on the rank
    that computes it. Raises ValueError for an optimizer, a stage or a mesh that gradient release can't go
    with.
    """
    of_loss = list(of_loss)
    if offloaded_weights(stages.values()) is not None:
        raise ValueError(
            "the gradients of offloaded weights live in host memory, where gradient release would free no "
            "device memory: leave gradient release off, or write memory.offload_weights=false"
        )
    own = [*dict.fromkeys([*(each for stage in stages.values() for each in stage.parameters()), *of_loss])]
    _check_parameters(optimizer, own)
    not_own = {id(each) for each in (*late, *of_loss)}
    parts = {
        index: [each for each in stage.parameters() if id(each) not in not_own]
        for index, stage in stages.items()
    }
    if not accumulate:
        return StageUpdates(optimizer, parts, keep_squares=keep_squares)
    _check_place(place)
    _check_accumulated(optimizer, own, late)
    for stage in stages.values():
        _check_dense(stage)
    in_stages = {
        id(each) for index, stage in stages.items() if index != last_stage for each in stage.parameters()
    }
    if any(id(each) in in_stages for each in of_loss):
        raise ValueError(f"the loss shares a parameter with a stage that is not the last: {_WRITE_STEP}")
    if last_stage in parts:
        parts[last_stage] += of_loss
    return OptimizerAccumulation(optimizer, parts, num_microbatches)


def _check_parameters(optimizer: torch.optim.Optimizer, own: list[nn.Parameter]) -> None:
    trained = [each for each in own if each.requires_grad]
    optimized = set(map(id, parameters_of(optimizer)))
    if any(getattr(each, "main_grad", None) is not None for each in trained):
        raise ValueError(
            "parameters have a main_grad (MasterWeights), which stays allocated through all steps, so "
            "gradient release would free nothing: write precision=bfloat16 with optimizer.kahan_sum=true, or "
            "parallel.shard=2 or more, where the float32 gradients can be released"
        )
    if trained and not any(id(each) in optimized for each in trained):
        raise ValueError(
            "the optimizer holds no parameter of this rank's stages: make it of pipeline.parameters(), after "
            "the Pipeline"
        )
    for parameter in trained:
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            if getattr(getattr(hook, "func", None), "__module__", "") == "optimi.gradientrelease":
                raise ValueError(
                    "optimi.prepare_for_gradient_release was called on a stage, and its hooks would update "
                    "the stage in each microbatch: leave the call out, or call "
                    "optimi.remove_gradient_release(stage)"
                )


def _check_place(place: Place) -> None:
    for name in (REPLICATE, SHARD):
        if name in place.groups:
            raise ValueError(
                f"accumulate with {name}={place.size(name)}: a gradient would have to be reduced over all "
                f"processes in each microbatch before it enters the optimizer's state; {_WRITE_STEP}"
            )


def _check_accumulated(
    optimizer: torch.optim.Optimizer, own: Iterable[nn.Parameter], late: Iterable[nn.Parameter]
) -> None:
    optimized = set(map(id, parameters_of(optimizer)))
    if any(id(each) in optimized and each.requires_grad for each in late):
        raise ValueError(
            "accumulate with a parameter that several stages share (tied weights): its gradient in a "
            f"microbatch is complete only when all these stages have run their W; untie it, or {_WRITE_STEP}"
        )
    if optimized - set(map(id, own)):
        raise ValueError(
            "accumulate with parameters in the optimizer that belong to no stage of this rank: make another "
            f"optimizer for them, or {_WRITE_STEP}"
        )


def _check_dense(stage: nn.Module) -> None:
    for name, module in stage.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(
                f"{name} makes sparse gradients, which optimi's optimizers can't take: write sparse=False, "
                "or gradient_release=step with torch.optim.SparseAdam"
            )
