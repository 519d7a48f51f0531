"""A mixture of experts as a layer's MLP: each token goes to the k experts that the router prefers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.autograd.models.auxiliary import auxiliary_loss
from zbpp.autograd.models.exchange import Exchange, counts_of, through_experts
from zbpp.autograd.models.grouped_linear import grouped_linear
from zbpp.autograd.models.sharded import local_part


class Experts(nn.Module):
    """The SwiGLUs of all experts, stacked; with expert parallelism each process has some of them.

    (x [tokens, hidden], chosen experts [tokens, k]) -> what they make of each token [tokens, k, hidden].
    gate_up: [experts, 2 x intermediate, hidden], the gates first. down: [experts, hidden, intermediate].
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.exchange = Exchange()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        gate_up, down = local_part(self.gate_up), local_part(self.down)

        def compute(rows: Tensor, counts: Tensor) -> Tensor:
            gate, up = grouped_linear(rows, gate_up.mT, counts).chunk(2, dim=-1)
            return grouped_linear(F.silu(gate) * up, down.mT, counts)

        return through_experts(x, chosen, self.num_experts, self.exchange, compute)


class MixtureOfExperts(nn.Module):
    """The k experts with the largest router probabilities, weighted by these, which are made to sum to 1.

    As in Mixtral (arXiv:2401.04088). Reports the auxiliary loss "balance": balance_loss x experts x the sum
    over experts of (share of the tokens' choices x mean probability), which is least, balance_loss x k, where
    all experts get as many tokens (Switch Transformer, arXiv:2101.03961).
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, k: int, balance_loss: float
    ) -> None:
        super().__init__()
        self.k, self.balance_loss = k, balance_loss
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = Experts(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.balance_loss and self.training:
            auxiliary_loss("balance", self.balance_loss * _imbalance(probabilities, chosen))
        y = self.experts(tokens, chosen)
        mixed: Tensor = (y * weights.to(y.dtype).unsqueeze(-1)).sum(1)
        return mixed.view(x.shape)


def _imbalance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    num_tokens, num_experts = probabilities.shape
    shares = counts_of(chosen, num_experts) / num_tokens
    return num_experts * (shares * probabilities.mean(0)).sum()
