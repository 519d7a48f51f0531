"""A multilayer perceptron for regression: the smallest model that makes a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.models.layers import StagedModel, TokenwiseStage, check_positive, fan_in_std


class Mlp(StagedModel):
    """Linear layers with ReLU between them, by stages: [batch, in_features] -> [batch, out_features].

    Between stages [batch, hidden_size]. `layers_per_stage`: how many layers each stage gets; by default equal
    numbers, and one more on earlier stages if they don't divide evenly. Initial weights depend on `seed` and
    on their names only. Raises ValueError for sizes below 1.
    """

    def __init__(
        self,
        *,
        in_features: int,
        hidden_size: int,
        out_features: int,
        num_layers: int,
        layers_per_stage: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        check_positive(in_features=in_features, hidden_size=hidden_size)
        check_positive(out_features=out_features, num_layers=num_layers)

        def layer(number: int) -> nn.Module:
            last = number == num_layers - 1
            linear = nn.Linear(
                in_features if number == 0 else hidden_size, out_features if last else hidden_size
            )
            return linear if last else nn.Sequential(linear, nn.ReLU())

        super().__init__(
            layer=layer,
            num_layers=num_layers,
            layers_per_stage=layers_per_stage,
            std=fan_in_std,
            seed=seed,
            stage=TokenwiseStage,
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean square error over all elements."""
        return F.mse_loss(output, target)
