"""The optimizer and its learning rate from their part of the config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zbpp.config import ConfigError, OptimizerConfig, naming, partial_of_node
from zbpp.error_text import kind_of
from zbpp.features.gradient_release.gradient_release import updates_each_alone
from zbpp.job.agreement import refuse_together
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.mesh import SHARD, MeshPosition
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.optimizer import (
    OPTIMIZERS,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from zbpp.training.optim.parameter_groups import (
    Entry,
    Named,
    as_named,
    check_all_match,
    entries_of,
    grouped,
    named_parameters,
)
from zbpp.training.optim.precision import Precision, kept_in_float32


def build_masters(pipeline: Pipeline, precision: Precision) -> MasterWeights | None:
    """The master weights of a mixed precision; else None.

    Call this after the pipeline is made, which gives all copies of a parameter the same float32 values.
    Shards need no masters: they are float32 themselves, and FSDP2 casts what it gathers from them.
    """
    if not precision.is_mixed or pipeline.place.size(SHARD) > 1:
        return None
    kept = (weight for stage in pipeline.stages.values() for weight in kept_in_float32(stage, precision))
    return MasterWeights(pipeline.parameters(), precision.compute, keep=kept)


def optimizer_of(
    pipeline: Pipeline,
    options: OptimizerConfig,
    masters: MasterWeights | None = None,
    gradient_release: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer over this rank's parameters or their masters.

    Raises ConfigError, on all ranks, for a pattern of `groups` that matches nothing on any rank, and for an
    optimizer that does not fit this place in the mesh. Collective.
    """
    with naming("optimizer"):
        entries = entries_of(options.groups)
        check_all_match(pipeline, [each for entry in entries for each in entry.patterns], "groups")
    made: torch.optim.Optimizer | None = None
    refusal = ""
    try:
        made = build_optimizer(named_parameters(pipeline, masters), options, gradient_release)
        refusal = _refusal(made, options, pipeline.timetable.num_ranks)
    except ConfigError as error:
        refusal = str(error)
    refuse_together(refusal, pipeline.place.gather, ConfigError)
    assert made is not None  # or there is a refusal
    _update_alike(made, pipeline.place)
    return made


def _update_alike(optimizer: torch.optim.Optimizer, place: MeshPosition) -> None:
    """Let all processes update a group's parameters one by one if one process must. Collective.

    Copies of a tied parameter stay equal only if the same kernels update them, and one copy may be in a group
    with DTensors while another is not.
    """
    one_by_one = place.gather([group.get("foreach") is False for group in optimizer.param_groups])
    for group, *anywhere in zip(optimizer.param_groups, *one_by_one, strict=True):
        if any(anywhere):
            group["foreach"] = False


def _refusal(optimizer: torch.optim.Optimizer, options: OptimizerConfig, num_ranks: int) -> str:
    """Why this optimizer may update the cut model differently from the whole one; "" if it does not."""
    if num_ranks == 1 or options.per_parameter or updates_each_alone(optimizer):
        return ""
    return (
        f"optimizer: {type(optimizer).__name__} is none of torch.optim's or torch-optimi's, and each rank "
        "updates its part of the model by itself: if it updates each parameter from this parameter's "
        "gradient alone, write optimizer.per_parameter=true, else parallel.num_processes=1"
    )


def build_optimizer(
    parameters: Iterable[nn.Parameter | Named], options: OptimizerConfig, gradient_release: bool = False
) -> torch.optim.Optimizer:
    """The optimizer over those of the parameters that are trainable. Raises ConfigError."""
    with naming("optimizer"):
        entries = entries_of(options.groups)
        if options.name == "custom":
            made = _custom(as_named(parameters), options.build, gradient_release, entries)
        else:
            made = OPTIMIZERS[options.name](
                parameters,
                learning_rate=options.learning_rate,
                betas=(options.beta1, options.beta2),
                eps=options.eps,
                weight_decay=options.weight_decay,
                entries=entries,
            )
        _check_options(made, entries)
    return made


def _custom(
    parameters: Sequence[Named], node: dict[str, Any], gradient_release: bool, entries: Sequence[Entry]
) -> torch.optim.Optimizer:
    """The optimizer that `build` names, with its own options where no entry of `groups` sets others."""
    groups = grouped(parameters, entries, lambda named, options: {}, [{}])
    further: dict[str, Any] = {}
    if str(node["_target_"]).startswith("optimi."):
        # optimi's StableAdamW (0.3.3) chooses Triton before it has looked at a parameter: on the CPU, too.
        can_use_triton = all(
            type(each.parameter) is nn.Parameter and each.parameter.is_cuda for each in parameters
        )
        further = {"gradient_release": gradient_release, "triton": None if can_use_triton else False}
    made = partial_of_node("optimizer.build", {**further, **node})(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer.build returns {kind_of(made)}, which is no torch.optim.Optimizer")
    return made


def _check_options(optimizer: torch.optim.Optimizer, entries: Sequence[Entry]) -> None:
    """Raise ConfigError for an option in `groups` that the optimizer does not have: torch ignores it."""
    num_without = len(optimizer.param_groups) // (len(entries) + 1)  # the groups that no entry is for
    known = {name for group in optimizer.param_groups[:num_without] for name in group} - {"params"}
    known |= optimizer.defaults.keys()
    for number, entry in enumerate(entries):
        for name in entry.options:
            if name not in known:
                raise ConfigError(
                    f"optimizer.groups[{number}] has {name}, which is no option of "
                    f"{type(optimizer).__name__}; it has {', '.join(sorted(known))}"
                )


# ---------------------------------------------------------------- the learning rate


def learning_rate_factor(options: OptimizerConfig, num_steps: int) -> Callable[[int], float] | None:
    """The factor on the learning rate at each step; None if a scheduler sets the rate."""
    if options.lr_scheduler:
        return None
    warmup: dict[str, Any] = {"warmup_steps": options.warmup_steps}
    if options.lr_schedule == "constant":
        return partial(warmup_constant, **warmup)
    falling = {**warmup, "num_steps": num_steps, "min_ratio": options.min_ratio}
    if options.lr_schedule == "wsd":
        return partial(warmup_stable_decay, **falling, decay_steps=max(1, num_steps // 5))
    return partial({"cosine": warmup_cosine, "linear": warmup_linear}[options.lr_schedule], **falling)


def build_scheduler(optimizer: torch.optim.Optimizer, options: OptimizerConfig) -> LRScheduler | None:
    """The scheduler that `lr_scheduler` names, after the linear warm-up; None if it names none.

    Raises ConfigError.
    """
    if not options.lr_scheduler:
        return None
    key, warmup_steps = "optimizer.lr_scheduler", options.warmup_steps
    made = None
    if warmup_steps > 1:
        # Made first: a scheduler's constructor notes the initial rates, which later ones begin with.
        made = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1 / warmup_steps, total_iters=warmup_steps - 1
        )
    found = _scheduler(key, options.lr_scheduler, optimizer)
    if made is None:
        return found
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [made, found], milestones=[warmup_steps])


def _scheduler(key: str, node: dict[str, Any], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The scheduler of a node. Those under its key `schedulers` (as of SequentialLR) are made before it."""
    own = {name: value for name, value in node.items() if name != "schedulers"}
    inner = [
        _scheduler(f"{key}.schedulers[{number}]", each, optimizer)
        for number, each in enumerate(node.get("schedulers", []))
    ]
    further = {"schedulers": inner} if inner else {}
    made = partial_of_node(key, own)(optimizer=optimizer, **further)
    if not isinstance(made, LRScheduler):
        raise ConfigError(f"{key} returns {kind_of(made)}, which is no LRScheduler of torch")
    return made
