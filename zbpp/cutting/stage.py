"""A traced stage: one graph for training mode and one for eval mode, over the whole model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Layout(NamedTuple):
    """Dtype and shape of a tensor when it was traced."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def layout(value: Any) -> Layout | Any:
    """The layout of a tensor; any other value as it is."""
    return Layout(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value


def describe(values: Iterable[Any]) -> str:
    """`(float32[4, 64], None)`, for error messages."""
    return f"({', '.join(map(str, values))})"


@dataclass(frozen=True)
class Trace:
    """A stage in one mode: run(stage, *inputs) -> outputs, both flat.

    takes: the layout of each input, or the input itself if it is no tensor. inputs: the structure of the
    module's (args, kwargs), for the first stage; outputs: that of what it returns, for the last one.
    """

    index: int
    run: Callable[..., tuple[Any, ...]]
    takes: tuple[Any, ...]
    inputs: TreeSpec | None
    outputs: TreeSpec | None

    def __call__(self, stage: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        values = args if self.inputs is None else _flat(args, kwargs, self.inputs)
        if len(values) != len(self.takes) or not all(map(_fits, values, self.takes)):
            raise ValueError(
                f"stage {self.index} was traced for {describe(self.takes)}, got "
                f"{describe(map(layout, values))}: a traced stage takes the shapes and dtypes of the example "
                "only: trace with an example of one microbatch"
            )
        results = self.run(stage, *values)
        if self.outputs is not None:
            return tree_unflatten(results, self.outputs)
        return results[0] if len(results) == 1 else results

    def __deepcopy__(self, memo: object) -> Self:
        return self  # immutable


def _flat(args: tuple[Any, ...], kwargs: Mapping[str, Any], structure: TreeSpec) -> tuple[Any, ...]:
    """The leaves, in the example's order. Raises TypeError for arguments of another structure."""
    positional, keywords = structure.children()
    if kwargs.keys() == set(keywords.context):
        kwargs = {name: kwargs[name] for name in keywords.context}
    values, found = tree_flatten((args, dict(kwargs)))
    if found != structure:
        values, found = tree_flatten(_as_tuples((args, dict(kwargs))))
        example = tree_unflatten(range(structure.num_leaves), structure)
        structure = tree_flatten(_as_tuples(example))[1]
    if found != structure:
        raise TypeError(
            f"stage 0 got {len(args)} positional arguments and the keywords {list(kwargs)}; the example has "
            f"{positional.num_children} and {keywords.context}: pass all of them, in the same structure"
        )
    return tuple(values)


def _as_tuples(value: Any) -> Any:
    """A nest with tuples in place of lists: torch's default_collate makes lists of them."""
    if isinstance(value, dict):
        return {key: _as_tuples(each) for key, each in value.items()}
    return tuple(map(_as_tuples, value)) if type(value) in (list, tuple) else value


def in_structure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], structure: TreeSpec, signature: Signature
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments of forward, those by position and those by name as in the example."""
    positional, keywords = structure.children()
    if any(each.kind is Parameter.VAR_POSITIONAL for each in signature.parameters.values()):
        return args, dict(kwargs)
    given = signature.bind(*args, **kwargs).arguments
    named = {name: given[name] for name in keywords.context if name in given}
    rest = {name: value for name, value in given.items() if name not in named}
    behind = [*rest][positional.num_children :]
    if any(rest[name] is not signature.parameters[name].default for name in behind):
        return args, dict(kwargs)  # the example has no such argument
    return tuple(rest.values())[: positional.num_children], named


def _fits(value: Any, taken: Any) -> bool:
    if isinstance(taken, Layout):
        return isinstance(value, Tensor) and (value.dtype, value.shape) == taken
    return type(value) is type(taken) and bool(value == taken)


class TracedStage(nn.Module):
    """Takes what the stage before it returned; the first stage takes the module's arguments.

    Its submodules only hold parameters and buffers: what wraps one of them has no effect, and modes are those
    of the whole stage.
    traces: {training: Trace}. state: parameters and buffers by their names in the whole model; persistent:
    the names that belong into a state_dict. extras: constants and subgraphs of the traces. signature: of the
    whole module's forward, on the first stage, which takes arguments by position and by name as that does.
    """

    signature: Signature | None = None

    def __init__(
        self,
        traces: Mapping[bool, Trace],
        state: Mapping[str, Tensor],
        persistent: Collection[str],
        extras: Mapping[str, Tensor | nn.Module],
    ) -> None:
        super().__init__()
        self._traces = dict(traces)
        for name, tensor in state.items():
            _hold(self, name, tensor, is_persistent=name in persistent)
        for name, extra in extras.items():
            if isinstance(extra, nn.Module):
                self.add_module(name, extra)
            else:
                self.register_buffer(name, extra, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trace = self._traces[self.training]
        if self.signature is not None and trace.inputs is not None:
            with suppress(TypeError):  # the trace says what does not fit
                args, kwargs = in_structure(args, kwargs, trace.inputs, self.signature)
        return trace(self, args, kwargs)


def _hold(stage: nn.Module, name: str, tensor: Tensor, *, is_persistent: bool) -> None:
    *path, last = name.split(".")
    owner = stage
    for each in path:
        if each not in dict(owner.named_children()):
            owner.add_module(each, nn.ModuleList())  # which is never called
        owner = owner.get_submodule(each)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(last, tensor)
    else:
        owner.register_buffer(last, tensor, persistent=is_persistent)
