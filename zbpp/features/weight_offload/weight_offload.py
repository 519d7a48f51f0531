"""Weights that live in host memory, and are copied to the device block by block, for F and for B.

    OffloadedWeights(stages, device)    once, before the Pipeline and the optimizer are made

    F   While a block's forward runs, its weights are in a device buffer, and the weights of the next block
        are copied to the other buffer. A weight that autograd saves (a linear layer needs its weight for dx)
        is packed as its place in the block, without memory.
    B   When autograd unpacks such a weight, the block's weights are copied to a buffer again, and the copy of
        the previous block starts.
    W   Adds to gradients on the device, block by block. A gradient that earlier steps left in host memory is
        copied to the device before its first W. In a stage's last W of a step, the gradients of each block
        are copied to host memory as soon as the block has all of them, while W goes on with other blocks.

At all other times, and whenever the caller looks, a parameter and its `.grad` are in host memory. So the
optimizer updates on the host, and its states are there. The device holds two buffers of the largest block's
size for weights, and a stage's gradients between its first W and its last one. With one microbatch these are
the same W, and the device holds the gradients of two blocks, whatever the number of blocks.

A parameter stays the same object: only `parameter.data` changes between host and device memory. Nothing may
refer to a block's device memory after its forward. OffloadedWeights checks this by the number of references
to the buffer's storage.

On a GPU a call starts copies from and to host memory and goes on. The host waits for them once, at the end of
the call: from there on the caller may read gradients and change weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import MappingProxyType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zbpp.autograd import WeightGrads, auxiliary_loss, auxiliary_losses
from zbpp.autograd.capture import PackedTensor, unpack
from zbpp.autograd.hooks import hooked_nodes
from zbpp.autograd.models.recompute import recomputed
from zbpp.autograd.offload.saved_activations import Stays
from zbpp.autograd.weight_grads import Task
from zbpp.features.weight_offload.weight_buffers import DeviceBuffers, Piece, View
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.extra import Feature, extras_of, register_extra
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.rank import Rank
from zbpp.runtime.stage import RunW
from zbpp.schedule import Action
from zbpp.schedule.dataflow_arrays import complete_stages
from zbpp.schedule.program import Instruction
from zbpp.stage_api import blocks_of
from zbpp.streams import Event, host_memory, streams_of


class OffloadedWeights(Feature):
    """Moves the weights of stages to host memory, and replaces the forward of each block.

    A Pipeline finds it by the stages, and takes it as an extra.

    A block's forward then copies the block's weights to the device when it runs. A block is a child of a
    stage; a stage without children is one block.

    stages: {index: stage}, on the CPU or on the device; their module buffers move to `device`.

    Raises ValueError for stages that can't be offloaded, and for a device on which torch lets no parameter of
    the CPU have its memory.
    """

    name = "weight_offload"
    excludes = MappingProxyType(
        {
            **dict.fromkeys(
                ("replicate", "shard", "context", "tensor"),
                "leave it at 1, with more ranks of the pipeline",
            ),
            "empty_microbatches": "its copies are planned for one timetable: leave it out",
        }
    )

    def __init__(self, stages: Mapping[int, nn.Module], device: torch.device | str | None = None) -> None:
        self.device = torch.device(device or "cpu")
        _refuse_device(self.device)
        self._streams = streams_of(self.device)
        self._is_in_call = False
        self._blocks_of = {index: _blocks(index, stage) for index, stage in sorted(stages.items())}
        self._blocks = [block for some in self._blocks_of.values() for block in some]
        _refuse_shared(self._blocks)
        self._block_of = {id(each): block for block in self._blocks for each in block.parameters}
        largest = max((block.piece.nbytes for block in self._blocks), default=0)
        for block in self._blocks:
            block.move_to(host_memory(block.piece.nbytes, self.device))
        self._buffers = DeviceBuffers(largest, self.device)
        self._to_host = ToHost(self.device)
        self._last_w: set[Action] = set()  # of each stage
        self._is_last_w = False
        self._running: Block | None = None  # the block whose forward runs
        for some in self._blocks_of.values():
            for block, following in pairwise(some):
                block.following, following.previous = following, block
        for block in self._blocks:
            block.module.forward = _OnDevice(self, block)
        register_extra(self, stages.values())  # without it they compute on the host
        for stage in stages.values():
            for module in stage.modules():
                moved = {
                    name: each.to(self.device) for name, each in module._buffers.items() if each is not None
                }
                module._buffers.update(moved)

    def on_device(self) -> list[Tensor]:
        """The memory of the device's buffers."""
        return self._buffers.memory()

    # ---- As an extra

    def attach(self, rank: Rank) -> None:
        """See Extra. Raises ValueError for ties or a replaced forward."""
        replaced = [block.name for block in self._blocks if not block.runs_on_device()]
        if any(isinstance(each, OffloadedWeights) for each in rank.extras):
            refusal = (
                "a rank's stages have several OffloadedWeights: give all stages of a rank to a single one"
            )
        elif rank.ties:
            refusal = "stages with offloaded weights can't have tied parameters: untie them"
        elif replaced:
            refusal = (
                f"the forward of {replaced[0]} was replaced (compiled?) after OffloadedWeights, and would "
                "find the weights on the host: only zbpp.autograd.recompute may wrap it"
            )
        else:
            refusal = ""
        if refusal:
            raise ValueError(refusal)
        row = rank.timetable.rows[rank.index]
        self._last_w = {row[position] for position in complete_stages(row).values()}

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """A stage's last W copies the stage's gradients to host memory."""
        if at not in self._last_w or not isinstance(at, Action):
            return run
        blocks = self._blocks_of[at.stage]

        def last(message: Message) -> Message:
            self._is_last_w = True
            result = run(message)
            self._is_last_w = False
            for block in blocks:  # those without a task in this W: the head's may have run in B
                self._to_host.send(block)
            return result

        return last

    def around_w(self, stage: int, run_w: RunW) -> RunW:
        """W goes block by block."""
        return partial(self.accumulate, run_w)

    def begin(self, call: Call) -> None:
        """Take up what the caller has changed in the weights.

        Raises RuntimeError for hooks on weights, and for a weight that got another shape or dtype.
        """
        self._is_in_call = True
        self._take_in(self._blocks)

    def end(self, call: Call, result: Result) -> None:
        """From here on the caller may change weights, also through `.data`."""
        self._is_in_call = False
        self._finish()

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        self._is_in_call = self._is_last_w = False
        self._finish()

    def _take_in(self, blocks: Iterable[Block]) -> None:
        self._buffers.forget()
        for block in blocks:
            block.take_in()

    def _finish(self) -> None:
        """Bring all gradients home, and let the host wait for all copies."""
        for block in self._blocks:
            self._to_host.send(block)
        self._buffers.finish()
        self._to_host.finish()

    # ---- F and B

    def _load(self, block: Block, neighbour: Block | None) -> Tensor:
        """The device memory with a block's weights; the copy of the block that runs next starts."""
        memory = self._buffers.load(block)
        if neighbour is not None:
            self._buffers.prefetch(neighbour)
        if not self._is_in_call:  # nobody says when the caller may change weights again
            self._buffers.finish()
        return memory

    def run(self, block: Block, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block's forward with the block's weights on the device."""
        if self._running is not None:
            raise RuntimeError(
                f"{block.name} is called within the forward of {self._running.name}, and the weights of both "
                "would be needed at the same time: make the two one block, that is, one child of the stage"
            )
        if not self._is_in_call:  # the caller calls the stage outside of a step: `begin` has not run
            self._take_in([block])
        self._running = block
        version = block.version()
        memory = self._load(block, block.following)
        references = _references(memory)
        try:
            with self._on_device(block, memory), auxiliary_losses() as found:
                output = forward(*args, **kwargs)
        finally:
            self._running = None
        if block.version() != version:
            raise RuntimeError(
                f"the forward of {block.name} changes a weight in place, and the change would be lost: make "
                "the weight a module buffer, or do not offload weights"
            )
        if _references(memory) > references and gc.collect() >= 0 and _references(memory) > references:
            raise RuntimeError(
                f"after the forward of {block.name}, something refers to a weight or to a view of one: its "
                "output, an attribute, an autograd Function (ctx.x in place of save_for_backward) or "
                "saved-tensor hooks. The weight's device memory is needed for other blocks: let the forward "
                "return or keep a clone"
            )
        for name, value in found.items():
            auxiliary_loss(name, value)
        return output

    @contextmanager
    def _on_device(self, block: Block, memory: Tensor) -> Iterator[None]:
        """Within this context the block's weights are in this memory; autograd saves their places only."""
        load = partial(self._load, block, block.previous)
        start, version = memory.untyped_storage().data_ptr(), block.version()

        def pack(tensor: Tensor) -> PackedTensor:
            return _SavedWeight(tensor, block, load, version) if _starts_at(tensor, start) else Stays(tensor)

        with block.in_memory(memory), saved_tensors_hooks(pack, unpack):
            yield

    # ---- W

    def accumulate(self, run_w: RunW, microbatch: int, weight_grads: WeightGrads) -> None:
        """Run W block by block.

        The gradients end on the device if other W's of the step may add to them, else on the host.
        """
        while weight_grads.tasks:
            block = self._block_of_task(weight_grads.tasks[0])
            part = weight_grads.take(partial(self._is_of, block))
            if block is None:  # of a loss
                run_w(microbatch, part)
                continue
            # W reads a weight's shape, layout and device, but not its values: any memory will do.
            with block.in_memory(self._buffers.any_memory()):
                block.bring_gradients({id(leaf) for leaf in part.leaves()}, self.device)
                run_w(microbatch, part)
            if self._is_last_w:
                self._to_host.send(block)
            if not self._is_in_call:
                self._finish()

    def _block_of_task(self, task: Task) -> Block | None:
        return self._block_of.get(id(task.leaf))

    def _is_of(self, block: Block | None, task: Task) -> bool:
        return self._block_of_task(task) is block

    def __reduce__(self) -> NoReturn:
        raise TypeError("stages with offloaded weights can't be copied: copy them before OffloadedWeights")


class Block:
    """The weights of one block, and their place in host memory.

    piece: the place of each weight in host memory and in a buffer. host: the host memory of all weights;
    homes: the weights as views of it. following, previous: the blocks beside it in the stage.
    """

    def __init__(self, name: str, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        self.name, self.module, self.parameters = name, module, parameters
        self.piece, self.host = Piece(parameters), torch.empty(0)
        self.homes: list[Tensor] = []
        # {number of a parameter whose gradient is on the device: the gradient's host memory, None if new}
        self.away: dict[int, Tensor | None] = {}
        self.following: Block | None = None
        self.previous: Block | None = None

    def version(self) -> int:
        """A number that grows when a weight is changed in place."""
        return sum([each._version for each in self.parameters])

    def runs_on_device(self) -> bool:
        """Whether the forward of the module is the one that OffloadedWeights has put there."""
        return isinstance(recomputed(vars(self.module).get("forward")), _OnDevice)

    def move_to(self, host: Tensor) -> None:
        """Copy the weights to this host memory, and let the parameters refer to it."""
        self.host, self.homes = host, self.piece.views(host)
        for parameter, home in zip(self.parameters, self.homes, strict=True):
            home.copy_(parameter.detach())
            parameter.data = home

    def take_in(self) -> None:
        """Copy to `host` the weights that got other memory (`parameter.data = ...`).

        Raises RuntimeError for a weight that got another shape or dtype, a hook or a main_grad.
        """
        for parameter, home in zip(self.parameters, self.homes, strict=True):
            if (parameter.shape, parameter.dtype) != (home.shape, home.dtype):
                wrong = "got another shape or dtype after OffloadedWeights was made: change these before"
            elif parameter.requires_grad and hooked_nodes([parameter]):
                wrong = "has a hook, which would not find the weight's values on the device: remove the hook"
            elif getattr(parameter, "main_grad", None) is not None:
                wrong = "has a main_grad, which offloaded weights can't have: remove it"
            else:
                if parameter.data_ptr() != home.data_ptr():
                    home.copy_(parameter.detach())
                    parameter.data = home
                continue
            raise RuntimeError(f"a weight of {self.name} {wrong}")

    def bring_gradients(self, trained: set[int], device: torch.device) -> None:
        """Copy the gradients of these parameters to the device, unless they are there; W adds to them.

        trained: ids of parameters, which are on the device.
        """
        for number, parameter in enumerate(self.parameters):
            if id(parameter) not in trained or number in self.away:
                continue
            self.away[number] = home = parameter.grad
            if home is not None:
                parameter.grad = torch.empty_like(home, device=device)
                parameter.grad.copy_(home, non_blocking=True)

    @contextmanager
    def in_memory(self, memory: Tensor) -> Iterator[None]:
        """Within this context the parameters are in this memory; afterwards they are in host memory."""
        for parameter, view in zip(self.parameters, self.piece.views(memory), strict=True):
            parameter.data = view
        del parameter, view
        try:
            yield
        finally:
            self.go_home()

    def go_home(self) -> None:
        """Let the parameters refer to host memory."""
        for parameter, home in zip(self.parameters, self.homes, strict=True):
            parameter.data = home


class ToHost:
    """Copies complete gradients to host memory, on a GPU by a stream of its own.

    The device's memory of a block's gradients is kept until that of the next block is sent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, streams_of(device)
        self._stream = None if self._streams is None else self._streams.side("gradients")
        self._leaving: list[Tensor] = []
        self._copied: Event | None = None  # behind the last copy

    def send(self, block: Block) -> None:
        """Start to copy a block's gradients. From `finish` on they are in host memory."""
        away, block.away = block.away, {}
        if not away:
            return
        leaving = []
        if self._streams is None or self._stream is None:
            for number, home in away.items():
                self._copy(block.parameters[number], home)
            return
        self._stream.wait_stream(self._streams.current())
        with self._streams.use(self._stream):
            for number, home in away.items():
                leaving += self._copy(block.parameters[number], home)
            copied = self._stream.record_event()
        self._free()
        self._leaving, self._copied = leaving, copied

    def finish(self) -> None:
        """Let the host wait for all copies."""
        copied = self._copied
        self._free()
        if copied is not None:
            copied.synchronize()

    def _free(self) -> None:
        """Free the gradients that were sent last; the memory's stream waits for their copies before."""
        if self._streams is not None and self._copied is not None:
            self._streams.current().wait_event(self._copied)
        self._leaving, self._copied = [], None

    def _copy(self, parameter: nn.Parameter, home: Tensor | None) -> list[Tensor]:
        """Copy a parameter's gradient to its host memory; returns the gradient, [] if there is none."""
        gradient = parameter.grad
        if gradient is None:
            return []
        if home is None:
            piece = Piece([parameter])
            home = piece.views(host_memory(piece.nbytes, self._device))[0]
        # A copy to another layout has a temporary tensor, and can't be put off.
        is_alike = (gradient.dtype, gradient.stride()) == (home.dtype, home.stride())
        home.copy_(gradient, non_blocking=is_alike)
        parameter.grad = home
        return [gradient]


class _SavedWeight:
    """A saved tensor that is a view of a block's weights: a PackedTensor without memory.

    load: copies the block's weights to a device buffer, and returns the buffer's memory. version: of the
    block, when its forward began.
    """

    stays = False

    def __init__(self, tensor: Tensor, block: Block, load: Callable[[], Tensor], version: int) -> None:
        self.shape = tensor.shape
        self._view = View(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        self._is_conj, self._is_neg = tensor.is_conj(), tensor.is_neg()
        self._block, self._load, self._saved_version = block, load, version

    @property
    def _version(self) -> int:
        return self._block.version()

    def check(self) -> None:
        """Raise RuntimeError if a weight of the block was changed in place since F."""
        if self._version != self._saved_version:
            raise RuntimeError(
                f"a weight of {self._block.name} was changed in place between F and B, but B needs the "
                "values that F used: let the optimizer step after the last backward"
            )

    def unpack(self) -> Tensor:
        """The tensor, in a device buffer."""
        self.check()
        tensor = self._view.of(self._load())
        tensor = tensor.conj() if self._is_conj else tensor
        return torch._neg_view(tensor) if self._is_neg else tensor

    def tensors(self) -> Iterator[Tensor]:
        """Nothing is kept alive."""
        return iter(())


class _OnDevice:
    """Replaces a block's forward: runs it with the block's weights on the device."""

    def __init__(self, weights: OffloadedWeights, block: Block) -> None:
        self._weights, self._block = weights, block
        self.module = block.module  # a recompute looks for the modules that a forward uses
        self._before = vars(block.module).get("forward")  # one that only casts, see _refusal_of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._block.module
        forward = self._before or MethodType(type(module).forward, module)
        return self._weights.run(self._block, forward, args, kwargs)


def _references(memory: Tensor) -> int:
    """The number of references to the storage of this memory."""
    count: int = torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
    return count


def _starts_at(tensor: Tensor, start: int) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() == start
    except (RuntimeError, NotImplementedError):  # a tensor without a storage
        return False


# ---- What can be offloaded


def _blocks(index: int, stage: nn.Module) -> list[Block]:
    """The blocks of a stage that have parameters. Raises ValueError for a stage that can't be offloaded."""
    if extras_of([stage]):
        raise ValueError(f"the weights of stage {index} are offloaded already: call OffloadedWeights once")
    names = {id(module): name for name, module in stage.named_modules()}
    blocks = []
    for module in [*blocks_of(stage)] or [stage]:
        name = f"{names[id(module)] or type(module).__name__} of stage {index}"
        parameters = [*module.parameters()]
        refusal = _refusal_of(module, parameters)
        if refusal:
            raise ValueError(f"{name} can't be offloaded: {refusal}")
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


def _refusal_of(module: nn.Module, parameters: Iterable[nn.Parameter]) -> str:
    """Why a block can't be offloaded; "" if it can."""
    forward = vars(module).get("forward")
    if forward is not None and not getattr(forward, "only_casts", False):
        return "it recomputes, is compiled or has another forward of its own: make OffloadedWeights before"
    if any(getattr(each, "sparse", False) for each in module.modules()):
        return "it makes sparse gradients: write sparse=False"
    for each in parameters:
        if type(each.data) is not Tensor or each.layout is not torch.strided or not _is_dense(each):
            return "a parameter is no plain dense tensor (sharded over a mesh?)"
        if getattr(each, "main_grad", None) is not None:
            return "a parameter has a main_grad: write precision=float32 or bfloat16, without master weights"
        if each.grad is not None:
            return "a parameter has a gradient already: set it to None"
    return ""


def _is_dense(parameter: nn.Parameter) -> bool:
    """Whether the parameter's elements fill its memory without gaps, in any order of dimensions."""
    places = zip(parameter.shape, parameter.stride(), strict=True)
    return parameter.numel() in (0, 1 + sum((size - 1) * stride for size, stride in places))


def _refuse_device(device: torch.device) -> None:
    """Raise ValueError if torch does not let a parameter of the CPU have its memory on the device."""
    if not torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device)):
        raise ValueError(
            f"weights can't be offloaded from {device}: torch does not let a CPU parameter's `data` be "
            "there. Offload activations instead"
        )


def _refuse_shared(blocks: Iterable[Block]) -> None:
    """Raise ValueError if two blocks share a parameter or its memory."""
    owner: dict[int, Block] = {}
    for block in blocks:
        for parameter in block.parameters:
            other = owner.setdefault(parameter.data_ptr() or id(parameter), block)
            if other is not block:
                raise ValueError(
                    f"{other.name} and {block.name} share a parameter or its memory, which would have to be "
                    "in two buffers: untie them, or do not offload weights"
                )
