"""Activation checkpointing that costs exactly one recompute across B and W.

F runs a block with gradients on, as the recompute does, and drops its graph at once. In B the block runs
forward once more and is split like a stage of its own; its tasks of W join those of the B around it. (torch's
split runs the recompute once in B, and once more for each group of parameters in W.) The recompute uses the
values that F used: see forward_state.py.

Auxiliary losses (auxiliary.py) that the block reports become further outputs of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from zbpp.autograd.collector import collector_of, refuse_create_graph
from zbpp.autograd.hooks import node_of, num_hooks_made, without_hooks
from zbpp.autograd.leaf_grad import set_aside
from zbpp.autograd.models.auxiliary import auxiliary_loss, auxiliary_losses
from zbpp.autograd.models.forward_state import ForwardState, version
from zbpp.autograd.models.structures import Structure, flatten, hidden_tensors
from zbpp.autograd.split import split
from zbpp.devices import devices_with_generators, generator_states, restored_generators, set_generator_states


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, whose activations are not kept but computed again in the backward.

    Arguments and outputs may be any values. Tensors are found inside lists, tuples, dicts, namedtuples,
    dataclasses and all else that torch.utils._pytree knows, however deep. fn may use any parameters. Random
    numbers, autocast, buffers and torch.is_grad_enabled() are the same in the recompute as in the forward;
    buffers are updated once, by the forward. B and W together recompute the block once. A plain backward()
    recomputes it once, too, and adds the gradients of fn's parameters straight to `.grad`:
    torch.autograd.grad finds none.

    Pass a tensor that was computed outside to fn as an argument. If fn closes over such a tensor, this
    backward also goes through the graph that the tensor was computed by, and two checkpoints that close over
    the same tensor raise RuntimeError.

    Hooks of a `saved_tensors_hooks` context inside fn must not return the very tensor that they are given:
    the graph of the forward would refer to itself and never be freed.

    Raises RuntimeError if fn changes an argument in place, be it a tensor or what holds it, and TypeError if
    fn returns an object of another kind that holds tensors with gradients. The backward raises RuntimeError
    if fn reports other auxiliary losses than in the forward, and if a parameter or a buffer above 64 KiB was
    changed in place since the forward. Buffers and parameters are those of the modules that fn refers to: fn
    itself, the module whose method it is, its closure and bound arguments. Other Python values that fn reads,
    such as an attribute that another module sets, or Python's random numbers, are in the recompute what they
    are then, as in torch's checkpoint.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    # On stage 0 no input needs grad: the dummy makes autograd call this Function's backward all the same.
    dummy = torch.empty(0, requires_grad=True)
    given, structure = flatten((args, kwargs))
    call = _RepeatedCall(fn, structure, given)
    outputs = _Checkpoint.apply(dummy, call, *given, *call.hooked)  # type: ignore[no-untyped-call]  # torch's
    return call.without_auxiliary(list(outputs))


class _RepeatedCall:
    """A call that will be repeated: the function, its arguments that are no tensors, and the state it ran in.

    given: the arguments, flattened; structure: theirs.
    """

    output: Structure  # of what fn has returned in the forward
    auxiliary: tuple[str, ...]  # the names that fn has reported in the forward

    def __init__(self, fn: Callable[..., Any], structure: Structure, given: list[Any]) -> None:
        self.fn, self.structure = fn, structure
        self.constants = [None if isinstance(each, Tensor) else each for each in given]
        self.state = ForwardState((fn, self.constants))
        given_ids = {id(each) for each in given}
        # Autograd must know that these leaves are used here: it fires their hooks after their last use.
        self.hooked = [leaf for leaf in self.state.hooked() if id(leaf) not in given_ids]
        used = self.state.devices | {each.device for each in given if isinstance(each, Tensor)}
        devices = devices_with_generators(used)
        self.generators, self.cpu_state = generator_states(devices), torch.get_rng_state()
        kinds = {"cpu", *(each.type for each in devices)}
        self.autocast = [
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in kinds
        ]

    def forward(self, tensors: list[Tensor | None]) -> tuple[Any, ...]:
        """The leaves of the output, then the auxiliary losses that fn reported."""
        begin = torch._C._autograd._get_sequence_nr()
        arguments = self._arguments(tensors)
        # As in the recompute, gradients are on, and so is forward-mode AD, which a Function turns off. The
        # graph ends with this call: no hook may offload or count the tensors that it saves.
        with torch.enable_grad(), _set_fwd_grad_enabled(True), _without_saved_tensors_hooks():
            output, auxiliary = self._run(arguments)
        leaves, self.output = flatten(output)
        self.auxiliary = tuple(auxiliary)
        given = self._leaves(tensors)
        _refuse_changed_containers(arguments, given)
        given_ids = {*map(id, given)}
        _refuse_hidden([each for each in leaves if id(each) not in given_ids])
        return tuple(
            _without_graph(each, begin)
            if isinstance(each, Tensor) and each.requires_grad and id(each) not in given_ids
            else each
            for each in (*leaves, *auxiliary.values())
        )

    def recompute(self, tensors: list[Tensor | None]) -> tuple[Any, ...]:
        """The same as `forward`, once more."""
        output, auxiliary = self._run(self._arguments(tensors))
        if auxiliary.keys() != set(self.auxiliary):
            raise RuntimeError(
                f"a checkpoint's function reported the auxiliary losses {sorted(self.auxiliary)} in its "
                f"forward and {sorted(auxiliary)} in its recompute: report the same ones whenever it runs"
            )
        leaves, _ = flatten(output)
        if len(leaves) != self.output.size:
            raise RuntimeError(
                f"a checkpoint's function returned {self.output.size} values in its forward and "
                f"{len(leaves)} in its recompute: return the same structure whenever it runs"
            )
        return *leaves, *(auxiliary[name] for name in self.auxiliary)

    def without_auxiliary(self, outputs: list[Any]) -> Any:
        """Report the auxiliary losses among the outputs; return what fn returned."""
        size = self.output.size
        for name, value in zip(self.auxiliary, outputs[size:], strict=True):
            auxiliary_loss(name, value)
        return self.output.filled(outputs[:size])

    def _leaves(self, tensors: list[Tensor | None]) -> list[Any]:
        pairs = zip(self.constants, tensors, strict=True)
        return [constant if tensor is None else tensor for constant, tensor in pairs]

    def _arguments(self, tensors: list[Tensor | None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = self.structure.filled(self._leaves(tensors))
        return arguments

    def _run(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Any, dict[str, Tensor]]:
        args, kwargs = arguments
        with auxiliary_losses() as auxiliary:
            output = self.fn(*args, **kwargs)
        return output, auxiliary

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(restored_generators(*self.generators))
            for name, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled))
            stack.enter_context(self.state.restored())
            torch.set_rng_state(self.cpu_state)
            set_generator_states(self.generators)
            yield


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dummy: Tensor, call: _RepeatedCall, *inputs: Any) -> Any:
        tensors = [each if isinstance(each, Tensor) else None for each in inputs[: len(call.constants)]]
        ctx.call = call
        ctx.is_tensor = [tensor is not None for tensor in tensors]
        saved = [tensor for tensor in tensors if tensor is not None]
        ctx.save_for_backward(*saved)
        # Autograd notes the versions of saved tensors after this forward: it misses changes that fn makes.
        versions = [*map(version, saved)]
        outputs = call.forward(tensors)
        _refuse_changed(saved, versions)
        ctx.set_materialize_grads(False)  # an output that nothing uses gets None, not zeros
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_create_graph("zbpp.checkpoint, whose recompute has no second derivative", "do not checkpoint")
        saved = iter(ctx.saved_tensors)
        tensors = [_fresh(next(saved)) if is_tensor else None for is_tensor in ctx.is_tensor]
        num_hooks = num_hooks_made()
        with torch.enable_grad(), ctx.call.as_in_forward():
            outputs = ctx.call.recompute(tensors)
        is_hooked = num_hooks_made() > num_hooks
        roots, root_grads = [], []
        for output, grad in zip(outputs, grads, strict=True):
            if isinstance(output, Tensor) and output.requires_grad and grad is not None:
                roots.append(output)
                root_grads.append(grad)
        collector = collector_of(ctx)
        if not roots:
            return (None, None, *(None for _ in (*tensors, *ctx.call.hooked)))
        if collector is None:
            return (None, None, *_plain_backward(roots, root_grads, tensors, ctx.call.hooked))
        # A tensor that fn closes over may have hooks from before.
        is_hooked = is_hooked or collector.is_hooked
        # A tensor that fn closes over may also have been computed from the inputs of the B around this one.
        inputs = (*tensors, *collector.inputs)
        # If fn closes over a computed tensor, this pass goes through the graph around the checkpoint, too.
        keep = collector.keep
        at_once = collector.at_once
        grads, tasks, large = split(
            roots, root_grads, inputs, collector.wanted, is_hooked=is_hooked, keep=keep, at_once=at_once
        )
        collector.put_off(tasks)
        collector.large += large
        collector.input_grads.append(grads[len(tensors) :])
        return (None, None, *grads[: len(tensors)], *(None for _ in ctx.call.hooked))


def _refuse_changed(tensors: list[Tensor], versions: list[int]) -> None:
    for tensor, before in zip(tensors, versions, strict=True):
        if version(tensor) != before:
            raise RuntimeError(
                f"a checkpoint's function changes its argument of shape {tuple(tensor.shape)} in place: the "
                "recompute would change it once more; let the function clone it first, or write a new "
                "tensor (x = x * 3, not x.mul_(3))"
            )


def _refuse_changed_containers(arguments: tuple[Any, Any], given: list[Any]) -> None:
    """fn has got lists, dicts and dataclasses of its own. The caller does not see what fn puts there."""
    args, kwargs = arguments
    if all(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
        return
    leaves, _ = flatten(arguments)
    if [*map(id, leaves)] != [*map(id, given)]:
        raise RuntimeError(
            "a checkpoint's function changes a list, dict or dataclass among its arguments: the recompute "
            "would change it once more; let the function make a new one and return it"
        )


def _refuse_hidden(leaves: list[Any]) -> None:
    for each in leaves:
        if any(tensor.grad_fn is not None for tensor in hidden_tensors(each)):
            raise TypeError(
                f"a checkpoint's function returns a {type(each).__name__}, inside which no tensors are "
                "found: make it a dataclass, return a dict, or register the class by "
                "torch.utils._pytree.register_pytree_node"
            )


def _plain_backward(
    roots: list[Tensor], root_grads: list[Tensor], tensors: list[Tensor | None], hooked: list[Tensor]
) -> list[Tensor | None]:
    """Gradients of the tensors and of the hooked leaves, whose gradients so far and hooks are left alone.

    Raises RuntimeError for a graph that is gone: of a tensor that the checkpoint's function closes over.
    """
    with without_hooks([*map(node_of, hooked)]), set_aside(hooked):
        try:
            torch.autograd.backward(roots, root_grads)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise RuntimeError(
                "a checkpoint's function uses a tensor that was computed outside, and another backward has "
                "gone through that tensor's graph: pass the tensor to the function as an argument"
            ) from error
        return [None if each is None else each.grad for each in (*tensors, *hooked)]


def _without_graph(output: Tensor, begin: int) -> Tensor:
    """The values of an output. begin: the number of the first node of the graph that fn made.

    Autograd lets nobody change the output of a Function in place if that output is a view. So an output that
    fn computed becomes a tensor of its own. A view stays an alias, and so does a tensor from outside of fn (a
    parameter, say), whose in-place changes must be counted.
    """
    node = output.grad_fn
    is_own = node is not None and node._sequence_nr() >= begin and not output._is_view()
    return output.data if is_own else output.detach()


@contextmanager
def _without_saved_tensors_hooks() -> Iterator[None]:
    """Take off the hooks of the `saved_tensors_hooks` contexts around this one; put them back at the end."""
    autograd: Any = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def recompute(module: nn.Module) -> None:
    """Make a module checkpoint every forward from now on. The names of its parameters stay the same.

    Copies of the module, made by copy.deepcopy or pickle, do so too.
    """
    module.forward = _Recomputed(module)


class _Recomputed:
    """Takes the place of a module's forward.

    It refers to the module, not to a bound method, so that in a copy of the module it refers to the copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.before = module, vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A partial shows the checkpoint the module, whatever object `before` is.
        return checkpoint(partial(_forward_of, self.module, self.before), *args, **kwargs)


def _forward_of(module: nn.Module, before: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """The module's forward: `before` if it is given, else the class's own."""
    return type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)


def recomputed(forward: Any) -> Any:
    """The forward that `recompute` has wrapped, None if it is the class's own; any other forward itself."""
    while isinstance(forward, _Recomputed):
        forward = forward.before
    return forward
