"""A plain loop over peft's model in one process: the reference for adapters."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn


def trained_by_peft(
    model: nn.Module,
    adapters: Mapping[str, Tensor],
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of peft's model, from these adapters, and its adapters at the end."""
    own = {name.removeprefix("base_model.model."): each for name, each in model.named_parameters()}
    trained = {name: each for name, each in own.items() if each.requires_grad}
    assert trained.keys() == adapters.keys()
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(adapters[name])
    optimizer, losses = make_optimizer(trained.values()), []
    for tokens, target in batches:
        loss = nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: each.detach() for name, each in trained.items()}
