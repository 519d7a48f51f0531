"""The messages of captured actions: tensors at fixed addresses, shared as lifetimes.py allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import torch
from torch import Tensor

from zbpp.runtime.graphs.lifetimes import Life, lives, share
from zbpp.runtime.graphs.maker import NotCapturable
from zbpp.runtime.layout import Layout, Message, TensorLayout
from zbpp.runtime.p2p import BufferPool
from zbpp.schedule import Program, Recv, Value

_Place = tuple[Value, int]  # a message, and the position of a tensor in it


def static_messages(
    program: Program, num_stages: int, layouts: Mapping[Value, Layout], device: torch.device
) -> dict[Value, Message]:
    """The tensors of each message that has a layout and memory of its own on this rank."""
    found = {value: life for value, life in lives(program, num_stages).items() if value in layouts}
    by_layout: dict[TensorLayout, dict[_Place, Life]] = {}
    for value, life in found.items():
        for position, layout in enumerate(layouts[value]):
            if layout is not None:
                by_layout.setdefault(layout, {})[value, position] = life
    tensors = {
        place: tensor
        for layout, each in by_layout.items()
        for place, tensor in _tensors(layout, each, device).items()
    }
    return {
        value: tuple([tensors.get((value, position)) for position in range(len(layouts[value]))])
        for value in found
    }


def _tensors(
    layout: TensorLayout, found: Mapping[_Place, Life], device: torch.device
) -> dict[_Place, Tensor]:
    numbers = share(found)
    buffers = [
        torch.zeros(layout.shape, dtype=layout.dtype, device=device).requires_grad_(layout.requires_grad)
        for _ in range(max(numbers.values()) + 1)
    ]
    return {place: buffers[number] for place, number in numbers.items()}


@torch.no_grad()
def copy_message(made: Message, static: Message) -> None:
    """Copy what an action has made to its fixed place. Raises NotCapturable if it is made otherwise."""
    if len(made) != len(static) or any((a is None) != (b is None) for a, b in zip(made, static, strict=True)):
        raise NotCapturable("it gives other tensors than in the step before")
    for tensor, place in zip(made, static, strict=True):
        if tensor is not None and place is not None and tensor is not place:
            if tensor.shape != place.shape or tensor.dtype != place.dtype:
                raise NotCapturable("it gives tensors of other shapes than in the step before")
            place.copy_(tensor)


class PlannedBuffers(BufferPool):
    """Gives out the tensors of one link's messages, in the order in which each pass receives them."""

    def __init__(self, device: torch.device, messages: Sequence[Message]) -> None:
        super().__init__(device)
        self._tensors = [tensor for message in messages for tensor in message if tensor is not None]
        self._next = cycle(self._tensors)

    def begin(self) -> None:
        """A pass begins."""
        self._next = cycle(self._tensors)

    def take(self, layout: TensorLayout) -> Tensor:
        """The next tensor. Raises ValueError if it has another layout."""
        tensor = next(self._next)
        found = TensorLayout(tensor.dtype, tensor.shape, tensor.requires_grad)
        if found != layout:
            raise ValueError(f"a captured step receives {found}, but the message has {layout}")
        return tensor

    def buffers(self) -> list[Tensor]:
        """The distinct tensors."""
        return [*{id(each): each for each in self._tensors}.values()]

    def clear(self) -> None:
        """Nothing to forget: graphs read these tensors."""

    def __len__(self) -> int:
        return len(self.buffers())


def planned_buffers(
    program: Program, messages: Mapping[Value, Message], device: torch.device
) -> dict[int, PlannedBuffers]:
    """The receive buffers of each rank that sends here."""
    received: dict[int, list[Message]] = {}
    for each in program.instructions:
        if isinstance(each, Recv):
            received.setdefault(each.peer, []).append(messages[each.value])
    return {peer: PlannedBuffers(device, each) for peer, each in received.items()}
