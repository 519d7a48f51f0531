"""Does a trainer that is not zbpp's compute what one process computes? Here torch's own 1F1B, with a mistake.

torchrun --standalone --nproc-per-node 2 -m zbpp.parity parity_of_another_trainer.py:right
torchrun --standalone --nproc-per-node 2 -m zbpp.parity parity_of_another_trainer.py:wrong

The second one clips each rank's gradients by the norm of this rank alone. The loss curve would look fine.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def whole() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def norm_of_all_ranks(parameters: list[nn.Parameter], limit: float) -> None:
    squares = torch.stack([each.grad.square().sum() for each in parameters]).sum()
    dist.all_reduce(squares)
    for each in parameters:
        each.grad *= min(1.0, limit / (squares.sqrt().item() + 1e-6))


def case(clip: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    stage = PipelineStage(whole()[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        inputs = [batch[0]] if stage.is_first else []
        schedule.step(*inputs, target=batch[1] if stage.is_last else None, losses=losses)
        return losses

    return {
        "step": step,
        "stages": stage,
        "names": lambda stage, name: f"{stage}.{name}",  # "weight" of stage 1 is whole()'s "1.weight"
        "whole": whole,
        "batch": (torch.ones(8, 16).cumsum(0), torch.ones(8, 16)),
        "loss_fn": nn.functional.mse_loss,
        "num_microbatches": 4,
        "clip": 0.1,
        "clip_grad_norm": lambda limit: clip([*stage.submod.parameters()], limit),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    }


def right() -> dict[str, Any]:
    return case(norm_of_all_ranks)


def wrong() -> dict[str, Any]:
    return case(nn.utils.clip_grad_norm_)
