"""Do traced stages compute what their module computes? Forward, gradients and buffers, on an example.

A trace contains what forward did to tensors, but not what torch.export does not see: the backward of a custom
autograd Function, hooks on gradients, Python state. So copies of module and stages are run, and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zbpp.closeness import is_close, largest
from zbpp.devices import restored_generators

Values = dict[str, Tensor | None]


def check_equal(
    module: nn.Module, stages: Mapping[int, nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise ValueError unless the stages, one after the other, do what `module` does in both modes."""
    if any(each.is_meta for each in module.parameters()):
        raise ValueError("the stages of a module on the meta device can't be run: write check=False")
    whole, parts = deepcopy(module), deepcopy(dict(stages))
    for training in (True, False):
        for each in (whole, *parts.values()):
            if each.training is not training:
                each.train(training)
        expected = _run(whole, [whole], args, kwargs)
        try:
            found = _run(partial(_one_after_another, parts), [*parts.values()], args, kwargs)
        except RuntimeError as error:
            raise ValueError(
                f"the stages fail where {type(module).__name__} does not: {error}; "
                "move the split points, or write a PipelineModel by hand"
            ) from error
        where = f"{type(module).__name__} in {'training' if training else 'eval'} mode"
        for kind, theirs in expected.items():
            _compare(where, kind, found[kind], theirs)


def _run(
    forward: Callable[..., Any],
    modules: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Values]:
    """The results of one forward and backward, by kind and name."""
    args, kwargs = tree_map_only(Tensor, lambda each: each.detach().clone(), (args, dict(kwargs)))
    parameters = [each for module in modules for each in module.named_parameters(remove_duplicate=False)]
    devices = {each.device for _, each in parameters}
    for _, each in parameters:
        each.grad = None
    with torch.enable_grad(), restored_generators(*devices):
        torch.manual_seed(0)
        outputs = [each for each in tree_leaves(forward(*args, **kwargs)) if isinstance(each, Tensor)]
        graphs = [each for each in outputs if each.requires_grad]
        torch.autograd.backward(graphs, [torch.randn_like(each) for each in graphs])
    buffers = {name: each.clone() for module in modules for name, each in module.named_buffers()}
    return {
        "outputs": {f"{number}": each.detach() for number, each in enumerate(outputs)},
        "gradients": {name: each.grad for name, each in parameters},
        "buffers": {**buffers},
    }


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
    least = 1e-3 * largest(expected.values())
    for name, theirs in expected.items():
        ours = found.get(name)
        if ours is None or theirs is None:
            is_equal = not any(bool(each.any()) for each in (ours, theirs) if each is not None)
        else:
            is_float = theirs.is_floating_point() or theirs.is_complex()
            precision = math.sqrt(torch.finfo(theirs.dtype).eps) if is_float else 0.0
            is_equal = ours.dtype == theirs.dtype and is_close(ours, theirs, precision, least=least)
        if not is_equal:
            raise ValueError(
                f"the stages don't compute what {where} does: of the {kind} {name!r} differs; torch.export "
                "sees no backward of a custom autograd Function, no hooks on gradients, no Python state: "
                "write a PipelineModel by hand, or check=False if the difference is meant"
            )
