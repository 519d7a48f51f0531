"""Activation checkpointing that costs exactly one recompute across B and W.

F runs a block without a graph. In B the block runs forward once more, is split like a stage of its
own, and its W joins that of the B around it. (torch's split runs the recompute once in B and
once more for each group of parameters in W.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zbpp.autograd.collector import collector_of
from zbpp.autograd.split import num_hooks_made, split


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, whose activations are computed again in the backward instead of being kept.

    fn returns a tensor or a tuple of tensors (Nones allowed) and may use any parameters. Random
    numbers and autocast are in the recompute what they were in the forward. Under `backward_input` the
    block is recomputed once for B and W together; in a plain backward() too, where
    the gradients of fn's parameters go straight into `.grad` (torch.autograd.grad finds none).
    """
    leaves, spec = tree_flatten((args, kwargs))
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    # Where no input needs grad (stage 0) the dummy makes autograd come here all the same.
    dummy = torch.empty(0, requires_grad=True)
    return _Checkpoint.apply(dummy, _Call(fn, spec, leaves), *leaves)  # type: ignore[no-untyped-call]  # torch's


class _Call:
    """A call to be repeated: the function, its arguments but for tensors, and what it must find again."""

    def __init__(self, fn: Callable[..., Any], spec: TreeSpec, leaves: list[Any]) -> None:
        self.fn, self.spec = fn, spec
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
        self.cuda_states = {device: torch.cuda.get_rng_state(device) for device in devices}
        self.cpu_state = torch.get_rng_state()
        kinds = ("cpu", "cuda") if devices else ("cpu",)
        self.autocast = [
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in kinds
        ]

    def run(self, tensors: list[Tensor | None]) -> Any:
        mixed = [c if t is None else t for c, t in zip(self.constants, tensors, strict=True)]
        args, kwargs = tree_unflatten(mixed, self.spec)
        return self.fn(*args, **kwargs)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(list(self.cuda_states)))
            for name, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled))
            torch.set_rng_state(self.cpu_state)
            for device, state in self.cuda_states.items():
                torch.cuda.set_rng_state(state, device)
            yield


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dummy: Tensor, call: _Call, *leaves: Any) -> Any:
        ctx.call = call
        ctx.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        output = call.run([leaf if isinstance(leaf, Tensor) else None for leaf in leaves])
        ctx.mark_non_differentiable(
            *(each for each in _as_tuple(output) if isinstance(each, Tensor) and not each.is_floating_point())
        )
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        tensors = [_fresh(next(saved)) if is_tensor else None for is_tensor in ctx.is_tensor]
        num_hooks = num_hooks_made()
        with torch.enable_grad(), ctx.call.as_before():
            outputs = _as_tuple(ctx.call.run(tensors))
        is_hooked = num_hooks_made() > num_hooks
        roots, root_grads = [], []
        for output, grad in zip(outputs, grads, strict=True):
            if isinstance(output, Tensor) and output.requires_grad and grad is not None:
                roots.append(output)
                root_grads.append(grad)
        if not roots:
            return (None, None, *(None for _ in tensors))
        return (None, None, *_backward(ctx, roots, root_grads, tensors, is_hooked))


def _backward(
    ctx: Any, roots: list[Tensor], root_grads: list[Tensor], tensors: list[Tensor | None], is_hooked: bool
) -> tuple[Tensor | None, ...]:
    collector = collector_of(ctx)
    if collector is None:
        torch.autograd.backward(roots, root_grads)
        return tuple(None if tensor is None else tensor.grad for tensor in tensors)
    # What fn closes over may have hooks from before.
    is_hooked = is_hooked or collector.is_hooked
    grads, work = split(roots, root_grads, tuple(tensors), collector.wanted, is_hooked=is_hooked)
    collector.work += work
    return grads


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def recompute(module: nn.Module) -> None:
    """Make a module checkpoint every forward from now on; its parameters' names stay what they are."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: checkpoint(forward, *args, **kwargs)
