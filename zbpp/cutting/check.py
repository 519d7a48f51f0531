"""Do traced stages compute what their module computes? Forward, gradients and buffers, on an example.

A trace contains what forward did to tensors, but not what torch.export does not see: the backward of a custom
autograd Function, hooks on gradients, Python state. So module and stages are both run, and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

Values = dict[str, Tensor | None]


class _Run(NamedTuple):
    """The results of one forward and backward, by name."""

    outputs: Values
    gradients: Values
    buffers: Values


def check_equal(
    module: nn.Module, stages: Mapping[int, nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise ValueError unless the stages, one after the other, do what `module` does in both modes.

    `.grad`, buffers, modes and random numbers are afterwards as they were.
    """
    if any(each.is_meta for each in module.parameters()):
        raise ValueError("the stages of a module on the meta device can't be run: write check=False")
    for training in (True, False):
        with modes_kept(module, *stages.values()), torch.enable_grad():
            if module.training is not training:
                module.train(training)
            for stage in stages.values():
                stage.train(training)
            expected = _run(module, module, args, kwargs)
            try:
                found = _run(module, partial(_one_after_another, stages), args, kwargs)
            except RuntimeError as error:
                raise ValueError(
                    f"the stages fail where {type(module).__name__} does not: {error}; "
                    "move the split points, or write a PipelineModel by hand"
                ) from error
        where = f"{type(module).__name__} in {'training' if training else 'eval'} mode"
        for kind, ours, theirs in zip(_Run._fields, found, expected, strict=True):
            _compare(where, kind, ours, theirs)


@contextmanager
def modes_kept(*modules: nn.Module) -> Iterator[None]:
    """Each submodule is afterwards in the mode (training or eval) that it was in."""
    modes = [(each, each.training) for module in modules for each in module.modules()]
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


def _run(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Run:
    args, kwargs = tree_map_only(Tensor, lambda each: each.detach().clone(), (args, dict(kwargs)))
    weights = {name: each for name, each in module.named_parameters() if each.requires_grad}
    with _buffers_kept(module), torch.random.fork_rng(_cuda_devices(module)):
        torch.manual_seed(0)
        outputs = [each for each in tree_leaves(forward(*args, **kwargs)) if isinstance(each, Tensor)]
        graphs = [each for each in outputs if each.requires_grad]
        grads: tuple[Tensor | None, ...] = (None,) * len(weights)
        if graphs and weights:
            starts = [torch.randn_like(each) for each in graphs]
            grads = torch.autograd.grad(graphs, list(weights.values()), starts, allow_unused=True)
        return _Run(
            outputs={f"{number}": each.detach() for number, each in enumerate(outputs)},
            gradients=dict(zip(weights, grads, strict=True)),
            buffers={name: each.clone() for name, each in module.named_buffers()},
        )


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put buffers and their values back afterwards, also a buffer that forward has replaced."""
    before = {name: (each, each.clone()) for name, each in module.named_buffers()}
    try:
        yield
    finally:
        for name, (buffer, values) in before.items():
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, buffer)
            with torch.no_grad():
                buffer.copy_(values)


def _cuda_devices(module: nn.Module) -> list[torch.device]:
    return list({each.device for each in module.parameters() if each.device.type == "cuda"})


def _one_after_another(stages: Mapping[int, nn.Module], *args: Any, **kwargs: Any) -> Any:
    versions = {buffer: buffer._version for stage in stages.values() for buffer in stage.buffers()}
    value = stages[0](*args, **kwargs)
    for index in range(1, len(stages)):
        passed = value if isinstance(value, tuple) else (value,)
        # Copies, as if they had been sent to another rank: changing one in place must not change another.
        value = stages[index](*[each.clone() for each in passed])
    for buffer, version in versions.items():
        names = [name for stage in stages.values() for name, each in stage.named_buffers() if each is buffer]
        if len(names) > 1 and buffer._version != version:
            raise ValueError(
                f"forward changes the buffer {names[0]!r}, which {len(names)} stages use: "
                "move the split points so that one stage has all its uses"
            )
    return value


def _compare(where: str, kind: str, found: Values, expected: Values) -> None:
    """Raise ValueError for the first value that is off by more than rounding; None counts as zero."""
    largest = max((float(each.abs().max()) for each in _filled(expected)), default=0.0)
    for name, theirs in expected.items():
        ours = found.get(name)
        if ours is None or theirs is None:
            is_equal = not any(bool(each.any()) for each in (ours, theirs) if each is not None)
        else:
            # Relative to the largest value, which in a small tensor is at least 1e-3 of the largest of all.
            is_float = theirs.is_floating_point() or theirs.is_complex()
            precision = math.sqrt(torch.finfo(theirs.dtype).eps) if is_float else 0.0
            scale = max([1e-3 * largest, *(float(each.abs().max()) for each in _filled({name: theirs}))])
            is_equal = (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) and torch.allclose(
                ours, theirs, rtol=0, atol=precision * scale, equal_nan=True
            )
        if not is_equal:
            raise ValueError(
                f"the stages don't compute what {where} does: of the {kind} {name!r} differs; torch.export "
                "sees no backward of a custom autograd Function, no hooks on gradients, no Python state: "
                "write a PipelineModel by hand, or check=False if the difference is meant"
            )


def _filled(values: Values) -> list[Tensor]:
    """The tensors with at least one element; NaN and infinities as 0."""
    numbers = (each for each in values.values() if each is not None and each.dtype != torch.bool)
    filled = [each for each in numbers if each.numel()]
    return [each.detach().nan_to_num(0.0, 0.0, 0.0) for each in filled]
