"""The model of a case: its stages and loss, with weights that are always the same, and its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from helpers.drawn_cases import TIED, Case, kind_of
from helpers.drawn_layers import (
    BOUNDARIES,
    EMBEDDINGS,
    LAYERS,
    TIME,
    VOCAB,
    WIDTH,
    WRAPPERS,
    ZBPP_CHECKPOINTS,
    Boundary,
    Use,
    Wrapped,
)
from zbpp.autograd import recompute


class Stage(nn.Sequential):
    """Layers between two boundaries; a keyword scales what they compute."""

    def __init__(self, layers: list[nn.Module], before: Boundary, behind: Boundary) -> None:
        super().__init__(*layers)
        self.merge, self.split = before.merge, behind.split

    def forward(self, *given: Any, scale: Tensor | None = None) -> Any:
        x = super().forward(self.merge(*given))
        return self.split(x if scale is None else x * scale)


def build_stages(
    layers: tuple[tuple[str, ...], ...], boundaries: tuple[str, ...], *, is_plain: bool
) -> list[Stage]:
    """The stages of a model whose weights are always the same. layers: of each stage, "wrapper/.../layer"."""
    torch.manual_seed(0)
    tied = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
    between = boundaries or ("one",) * (len(layers) - 1)
    sides = [BOUNDARIES[each] for each in ("one", *between, "one")]
    return [
        Stage([_layer(text, tied, is_plain) for text in texts], before, behind)
        for texts, (before, behind) in zip(layers, pairwise(sides), strict=True)
    ]


def recompute_marked(stages: Iterable[nn.Module]) -> None:
    """Call `recompute` on the layers whose wrapper is that."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, Wrapped) and module.is_recomputed:
                recompute(module)


def _layer(text: str, tied: nn.Parameter, is_plain: bool) -> nn.Module:
    *wrappers, kind = text.split("/")
    if kind == TIED:
        layer: nn.Module = Use(nn.functional.linear, tied)
    else:
        layer = (LAYERS | EMBEDDINGS)["function" if is_plain and kind == "defer" else kind]()
    for wrapper in reversed(wrappers):
        is_left_out = is_plain and wrapper in ZBPP_CHECKPOINTS
        layer = Wrapped(layer, nn.Module.__call__ if is_left_out else WRAPPERS[wrapper])
        layer.is_recomputed = wrapper == "recompute" and not is_plain
    return layer


class Loss(nn.Module):
    """The distance to the target, with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.weight * output - target).square().mean()


def two_losses(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"near": (output - target).square().mean(), "small": 0.1 * output.square().mean()}


class Model:
    """The modules of a case: stages, the loss, and one in front of the first stage."""

    def __init__(self, case: Case, *, is_plain: bool) -> None:
        self.case, self.is_plain = case, is_plain
        stages = build_stages(case.layers, case.boundaries, is_plain=is_plain)
        self.stages: dict[int, nn.Module] = dict(enumerate(stages))
        self.loss: Any = {"mean": nn.functional.mse_loss, "dict": two_losses, "module": Loss()}[case.loss]
        self.front = nn.Linear(WIDTH, WIDTH) if "front" in case.switches else nn.Identity()
        self.tied = [key for key in self.named() if key[0] in self.stages and self._is_tied(*key)]
        trained = [key for key, p in self.named().items() if p.requires_grad and key not in self.tied]
        self.thawing = {place: (place, name) for place, name in trained}.values()

    def _is_tied(self, stage: int, name: str) -> bool:
        return kind_of(self.case.layers[stage][int(name.split(".")[0])]) == TIED

    def keep(self, indices: Sequence[int]) -> None:
        """Drop what other ranks train. Tied weights are declared as such: other ranks have copies."""
        for index, name in self.tied:
            if index != self.tied[0][0]:
                declared = getattr(self.stages[index], "tied_parameters", {})
                self.stages[index].tied_parameters = {**declared, name: self.tied[0]}
        if len(self.stages) - 1 not in indices and isinstance(self.loss, nn.Module):
            self.loss = nn.functional.mse_loss
        if 0 not in indices:
            self.front = nn.Identity()
        self.stages = {index: self.stages[index] for index in indices}

    def named(self) -> dict[tuple[Any, str], nn.Parameter]:
        """All parameters by (place, name); a tied one under each of its names."""
        modules = {**self.stages, "front": self.front, "loss": self.loss}
        return {
            (place, name): parameter
            for place, module in modules.items()
            if isinstance(module, nn.Module)
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    def parameters(self) -> list[nn.Parameter]:
        return [*dict.fromkeys(self.named().values())]

    def freeze(self, is_frozen: bool) -> None:
        """Freeze or thaw one weight of each module."""
        for key, parameter in self.named().items():
            if key in self.thawing:
                parameter.requires_grad_(not is_frozen)

    def batch(self, step: int, part: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Inputs, target and keywords of one part of a step's data."""
        generator = torch.Generator().manual_seed(1000 * part + step)
        dtype = torch.bfloat16 if self.case.weights == "masters" and not self.is_plain else torch.float64
        rows = 2 * self.case.num_microbatches
        x, target, scale = (
            torch.randn(size, generator=generator).bfloat16().to(dtype)
            for size in ((rows, TIME, WIDTH), (rows, TIME, WIDTH), (rows, 1, 1))
        )
        if kind_of(self.case.layers[0][0]) in EMBEDDINGS:
            x = torch.randint(VOCAB, (rows, TIME), generator=generator)
        return x, target, {"scale": scale} if "keyword" in self.case.switches else {}
