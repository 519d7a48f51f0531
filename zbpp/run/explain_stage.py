"""What the split backward does with each weight of one stage of a configured model; no process group."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.autograd import Explanation, auxiliary_losses, explain
from zbpp.autograd.arguments import as_list
from zbpp.config import ExplainConfig, naming
from zbpp.run.data import build_data
from zbpp.run.model import build_model, explained_as_data
from zbpp.run.stages import compile_stages
from zbpp.stage_api import own_loss
from zbpp.training.batches import batch_for
from zbpp.training.optim.precision import PRECISIONS, give_dtypes


def explain_stage(config: ExplainConfig) -> Explanation:
    """Run one microbatch of F through one stage and explain what its B will do.

    The stages before it run first, without a graph, for an input of the right shape; the last stage's F ends
    with the loss, and auxiliary losses count as outputs. With compile=stage or layer, a warning names each
    part that can't be compiled, with the reason. Raises ConfigError.
    """
    model = build_model(config.model, config.seed)
    data = build_data(config.data, config.microbatch_size, config.seed)
    index, last = config.stage, config.num_stages - 1

    def build(index: int) -> nn.Module:
        stage: nn.Module = model.build_stage(index, config.num_stages)
        give_dtypes(stage, PRECISIONS[config.precision])
        return stage

    with naming("model"), explained_as_data("the forward failed"):
        stage = build(index)  # first: a stage that does not exist is refused before any stage runs
        first = stage if index == 0 else build(0)
        ends = {0: first, last: stage}  # whose dtype the inputs and the target get
        args, target = batch_for(ends, config.num_stages, data.train, 0, torch.device("cpu"))
        if index:
            args = _outputs_before(first, map(build, range(1, index)), args)
        compile_stages({index: stage}, config.compile, budget=1.0)
        with auxiliary_losses() as auxiliary:
            own = own_loss(stage, model.loss) if index == last else None
            output = stage(*args) if own is None else stage(*args, head=False)
            root = output if index < last else (own or model.loss)(output, target)
        return explain([*as_list(root), *auxiliary.values()], args, stage.named_parameters())


def _outputs_before(first: nn.Module, others: Iterable[nn.Module], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the stages before the explained one pass to it, as leaves that require grad."""
    with torch.no_grad():
        for stage in chain([first], others):  # one at a time is alive
            output = stage(*args)
            args = output if isinstance(output, tuple) else (output,)
    for arg in args:
        if isinstance(arg, Tensor) and arg.is_floating_point():
            arg.requires_grad_()
    return args
