"""The blocks of stages whose weights are offloaded, and the checks that refuse what can't be offloaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zbpp.autograd.storages import storages_of
from zbpp.runtime.extra import brought_by
from zbpp.runtime.memory.weight_buffers import Piece, View, is_dense
from zbpp.stage_api import blocks_of

"""The name of the attribute by which a stage refers to its OffloadedWeights."""


class Block:
    """The weights of one block, their host memory, and their places in a device buffer.

    piece: the place of each weight in host memory and in a buffer. host: the host memory of all weights;
    homes: the weights as views of it. grads: host memory of the same layout for the gradients; empty until
    the first W. beside: {+1: the next block of the stage, -1: the previous block}.
    """

    def __init__(self, name: str, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        self.name, self.module, self.parameters = name, module, parameters
        self.piece = Piece(parameters)
        self.host = self.grads = torch.empty(0)
        self.homes: list[Tensor] = []
        # {number of the parameter: its gradient in `grads`}, while somebody refers to the gradient.
        self.given: dict[int, weakref.ref[Tensor]] = {}
        self.beside: dict[int, Block] = {}

    def neighbours(self, direction: int) -> list[Block]:
        """The next (+1) or the previous (-1) block of the stage, in a list; empty at the end of the stage."""
        return [self.beside[direction]] if direction in self.beside else []

    def version(self) -> int:
        """A number that grows when a weight is changed in place."""
        return sum([each._version for each in self.parameters])

    def move_to(self, host: Tensor) -> None:
        """Copy the weights to this host memory, and let the parameters refer to it."""
        self.host, self.homes = host, self.piece.views(host)
        for parameter, home in zip(self.parameters, self.homes, strict=True):
            home.copy_(parameter.detach())
            parameter.data = home

    def take_in(self) -> None:
        """Copy to `host` the weights that got other memory (`parameter.data = ...`).

        Raises RuntimeError for a weight that got another shape or dtype.
        """
        for parameter, home in zip(self.parameters, self.homes, strict=True):
            if parameter.data_ptr() == home.data_ptr():
                continue
            if (parameter.shape, parameter.dtype) != (home.shape, home.dtype):
                raise RuntimeError(
                    f"a weight of {self.name} got another shape or dtype after OffloadedWeights was made: "
                    "change shapes and dtypes before"
                )
            home.copy_(parameter.detach())
            parameter.data = home

    def gradient_home(self, number: int, empty: Callable[[int], Tensor]) -> Tensor:
        """Host memory for a parameter's gradient.

        It is the gradient's place in `grads`; new memory if the caller still holds an earlier gradient there.
        empty: makes host memory of so many bytes.
        """
        parameter, given = self.parameters[number], self.given.get(number)
        if given is not None and given() is not None:
            memory = empty(parameter.nbytes)
            home = View(parameter.dtype, 0, parameter.shape, parameter.stride()).of(memory)
        else:
            if not self.grads.nbytes:
                self.grads = empty(self.piece.nbytes)
            home = self.piece.views(self.grads)[number]
            self.given[number] = weakref.ref(home)
        return home

    @contextmanager
    def in_memory(self, memory: Tensor) -> Iterator[None]:
        """Within this context the parameters are in this memory; afterwards they are in host memory."""
        views = self.piece.views(memory)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        del views, parameter, view
        try:
            yield
        finally:
            self.go_home()

    def go_home(self) -> None:
        """Let the parameters refer to host memory."""
        for parameter, home in zip(self.parameters, self.homes, strict=True):
            parameter.data = home


def check_stages(stages: Any) -> None:
    """Raise TypeError if `stages` is no mapping of modules, ValueError if a stage is offloaded already."""
    if not isinstance(stages, Mapping) or not all(isinstance(each, nn.Module) for each in stages.values()):
        raise TypeError("OffloadedWeights takes {index: stage}: write OffloadedWeights({0: stage}, ...)")
    again = [index for index, stage in stages.items() if brought_by([stage])]
    if again:
        raise ValueError(f"the weights of stage {again[0]} are offloaded already: call OffloadedWeights once")


def find_blocks(index: int, stage: nn.Module) -> list[Block]:
    """The blocks of a stage that have parameters. Raises ValueError for a block that can't be offloaded."""
    modules = [*blocks_of(stage)] or [stage]
    names = {id(module): name for name, module in stage.named_modules()}
    blocks = []
    for module in modules:
        name = f"{names[id(module)] or type(module).__name__} of stage {index}"
        parameters = [*module.parameters()]
        for parameter in parameters:
            _refuse(name, parameter)
        if any(getattr(each, "sparse", False) for each in module.modules()):
            raise ValueError(f"{name} makes sparse gradients, which can't be offloaded: write sparse=False")
        _refuse_views(name, module)
        if "forward" in vars(module):
            raise ValueError(
                f"{name} recomputes, is compiled or has another forward of its own: make OffloadedWeights "
                "before you change its forward"
            )
        if parameters:
            blocks.append(Block(name, module, parameters))
    inside = {id(each) for block in blocks for each in block.parameters}
    outside = [name for name, each in stage.named_parameters() if id(each) not in inside]
    if outside:
        raise ValueError(
            f"{', '.join(outside)} of stage {index} belongs to no block of the stage, so no forward tells "
            "when it is needed: put it into a module that is a child of the stage"
        )
    return blocks


def _refuse(name: str, parameter: nn.Parameter) -> None:
    """Raise ValueError for a parameter that can't be offloaded."""
    if type(parameter.data) is not Tensor or parameter.layout is not torch.strided or not is_dense(parameter):
        reason = "is no plain dense tensor (sharded over a mesh?)"
    elif getattr(parameter, "main_grad", None) is not None:
        reason = "has a main_grad: write precision=float32 or bfloat16, without master weights"
    elif parameter.grad is not None:
        reason = "has a gradient already: set it to None"
    else:
        return
    raise ValueError(f"a parameter of {name} can't be offloaded: it {reason}")


def _refuse_views(name: str, module: nn.Module) -> None:
    """Raise ValueError for a module buffer that shares memory with a weight, and would not move with it."""
    weights = {storage._cdata for each in module.parameters() for storage in storages_of(each)}
    for buffer_name, buffer in module.named_buffers():
        if any(storage._cdata in weights for storage in storages_of(buffer)):
            raise ValueError(
                f"the buffer {buffer_name} of {name} is a view of a weight, and would keep the weight's old "
                "values: make the view in forward, or let the buffer be a clone"
            )


def refuse_hooks(block: Block) -> None:
    """Raise RuntimeError if a weight of the block has a hook or a main_grad."""
    for parameter in block.parameters:
        _refuse_hook(block, parameter)


def _refuse_hook(block: Block, parameter: nn.Parameter) -> None:
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise RuntimeError(
            f"a weight of {block.name} has a hook, which would not find the weight's values on the device: "
            "remove the hook, or do not offload weights"
        )
    if getattr(parameter, "main_grad", None) is not None:
        raise RuntimeError(f"a weight of {block.name} has a main_grad: offloaded weights can't have one")


def refuse_shared(blocks: Sequence[Block]) -> None:
    """Raise ValueError if two blocks share a parameter, or two different parameters share memory."""
    for block in blocks:
        _refuse_overlap(block)
    owner: dict[int, Block] = {}
    for block in blocks:
        for parameter in block.parameters:
            for storage in storages_of(parameter):
                other = owner.setdefault(storage.data_ptr() if storage.nbytes() else id(parameter), block)
                if other is not block:
                    raise ValueError(
                        f"{other.name} and {block.name} share a parameter or its memory, which would have to "
                        "be in two buffers: untie them, or do not offload weights"
                    )


def _refuse_overlap(block: Block) -> None:
    spans = sorted(
        (each.data_ptr(), each.data_ptr() + each.nbytes) for each in block.parameters if each.numel()
    )
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise ValueError(
            f"two parameters of {block.name} use the same memory, and would get separate memory on the host: "
            "let the modules share one Parameter object, or do not offload weights"
        )


def raise_held(block: Block) -> NoReturn:
    """Raise RuntimeError: after a block's forward, something still refers to the block's device memory."""
    raise RuntimeError(
        f"after the forward of {block.name}, something refers to a weight or to a view of one: its output, "
        "an attribute, an autograd Function (ctx.x in place of save_for_backward) or saved-tensor hooks. The "
        "weight's device memory is needed for other blocks: let the forward return or keep a clone"
    )


def move_buffers(stage: nn.Module, device: torch.device) -> None:
    """Move a stage's module buffers to the device."""
    for module in stage.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
