"""A tiny mixture of experts with a balance loss and a z-loss, cut into any number of stages."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.tensors import drawn
from zbpp import auxiliary_loss

NUM_LAYERS, SIZE, NUM_EXPERTS = 4, 6, 3


class MoeLayer(nn.Module):
    """Each row goes to the expert that the router prefers (Switch Transformer, arXiv:2101.03961)."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(SIZE, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(NUM_EXPERTS))
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(drawn(*parameter.shape, seed=100 * number + seed))
        self.double()

    def compute(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and the auxiliary losses: what forward returns, and what it reports."""
        logits = self.router(x)
        probabilities = logits.softmax(-1)
        gates, chosen = probabilities.max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            y = y.index_add(0, rows, gates[rows, None] * expert(x[rows]))
        share = F.one_hot(chosen, NUM_EXPERTS).to(x).mean(0)
        losses = {
            "balance": 0.1 * NUM_EXPERTS * (share * probabilities.mean(0)).sum(),
            "z": 0.01 * logits.logsumexp(-1).square().mean(),
        }
        return torch.tanh(x + y), losses

    def forward(self, x: Tensor) -> Tensor:
        y, losses = self.compute(x)
        for name, value in losses.items():
            auxiliary_loss(name, value)
        return y


class Moe:
    """A model of four layers, without a base class: rows of six numbers in and out."""

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        first, after = (NUM_LAYERS * each // num_stages for each in (index, index + 1))
        return nn.Sequential(OrderedDict((f"layer_{n}", MoeLayer(n)) for n in range(first, after)))

    def loss(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"error": F.mse_loss(output, target), "size": 0.1 * output.square().mean()}
