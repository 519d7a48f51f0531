"""A language model in eight small parts, which is cut into stages, and its batches."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, ROWS = 11, 6, 8


class ToyLm:
    """Embedding, six layers and a head.

    tied: whether embedding and head have one Parameter object, or copies that `tied` declares to be one.
    """

    def __init__(
        self, tied: Literal["", "object", "copies"] = "", dtype: torch.dtype = torch.float64
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(6)]
        self._tied = tied
        self.parts: dict[str, Any] = {"embedding": nn.Embedding(VOCAB, HIDDEN)}
        self.parts |= {f"layer_{i}": layer for i, layer in enumerate(layers)}
        self.parts["head"] = nn.Linear(HIDDEN, VOCAB, bias=False)
        for part in self.parts.values():
            part.to(dtype)
        if tied == "object":
            self.parts["head"].weight = self.parts["embedding"].weight

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        names = list(self.parts)
        stage = nn.Sequential()
        for name in names[len(names) * index // num_stages : len(names) * (index + 1) // num_stages]:
            stage.add_module(name, self.parts[name])
        return stage

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def tied(self) -> dict[str, str]:
        return {"head.weight": "embedding.weight"} if self._tied == "copies" else {}


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Tokens, and the tokens behind them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (rows, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def rows_of(place: Any, *tensors: Tensor) -> list[Tensor]:
    """The rows of a batch that a process of the mesh reads."""
    size = len(tensors[0]) // place.num_data_parts
    return [each[place.data_part * size :][:size] for each in tensors]
