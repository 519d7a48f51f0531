"""Each parameter and buffer of a rank's stages once, with a text that says where it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn


class Named(NamedTuple):
    """A tensor of a stage. stage: None for one of the loss."""

    name: str
    stage: int | None
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name} of {'the loss' if self.stage is None else f'stage {self.stage}'}"


def parameters_of(stages: Mapping[int, nn.Module], loss: object = None) -> Iterator[Named]:
    """The parameters, in stage order."""
    seen: set[int] = set()
    for index, module in _roots(stages, loss):
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield Named(name, index, parameter)


def buffers_of(stages: Mapping[int, nn.Module], loss: object = None) -> Iterator[Named]:
    """The buffers, in stage order."""
    seen: set[int] = set()
    for index, module in _roots(stages, loss):
        for name, buffer in module.named_buffers():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield Named(name, index, buffer)


def sharing_stages(stages: Mapping[int, nn.Module], loss: object, last: int) -> list[int]:
    """The stages that share a parameter with another one. last: the pipeline's last stage, with the loss."""
    own = {index: set(map(id, module.parameters())) for index, module in stages.items()}
    if last in own and isinstance(loss, nn.Module):
        own[last] |= set(map(id, loss.parameters()))
    counts = Counter(each for ids in own.values() for each in ids)
    return [index for index, ids in own.items() if any(counts[each] > 1 for each in ids)]


def _roots(stages: Mapping[int, nn.Module], loss: object) -> Iterator[tuple[int | None, nn.Module]]:
    yield from sorted(stages.items())
    if isinstance(loss, nn.Module):
        yield None, loss
