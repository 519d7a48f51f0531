"""A traced stage: two graphs, for training mode and for eval mode, over parameters of the whole model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zbpp.cutting.graph import Layout, Part


class Arguments(NamedTuple):
    """How the example was passed to forward."""

    keywords: tuple[str, ...]
    structure: TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        return cls(tuple(kwargs), tree_flatten((args, dict(kwargs)))[1])

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The leaves, in the example's order. Raises TypeError for other arguments."""
        if kwargs.keys() == set(self.keywords):
            kwargs = {name: kwargs[name] for name in self.keywords}
        values, structure = tree_flatten((args, dict(kwargs)))
        if structure != self.structure:
            raise TypeError(
                f"stage 0 got {len(args)} positional arguments and the keywords {list(kwargs)}, not the structure of "
                f"the example, which has {self.structure.child(0).num_children} and {list(self.keywords)}: "
                "pass the same arguments in the same way"
            )
        return tuple(values)


class TracedStage(nn.Module):
    """Takes what the stage before returned, a tensor or a tuple; the first takes the module's arguments.

    parts: for training mode (True) and eval mode. state: parameters and buffers by their names in the whole
    model; persistent: those that a state_dict has. arguments: of the first stage; outputs: of the last stage,
    the structure of what the module returns, per mode.
    """

    def __init__(
        self,
        index: int,
        parts: Mapping[bool, Part],
        state: Mapping[str, Tensor],
        persistent: Collection[str],
        *,
        arguments: Arguments | None = None,
        outputs: Mapping[bool, TreeSpec] | None = None,
    ) -> None:
        super().__init__()
        self._index, self._parts, self._arguments, self._outputs = index, parts, arguments, outputs
        for name, tensor in state.items():
            _hold(self, name, tensor, is_persistent=name in persistent)
        for part in parts.values():
            for name, extra in part.extras.items():
                if isinstance(extra, nn.Module):
                    self.add_module(name, extra)
                else:
                    self.register_buffer(name, extra, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part = self._parts[self.training]
        values = args if self._arguments is None else self._arguments.flat(args, kwargs)
        if len(values) != len(part.takes) or not all(map(_fits, values, part.takes)):
            raise ValueError(
                f"stage {self._index} was traced for ({', '.join(map(_text, part.takes))}), got "
                f"({', '.join(map(_text, values))}): a traced stage takes the shapes and dtypes of the example only; "
                "trace with an example of one microbatch"
            )
        results = part.run(self, *values)
        if self._outputs is not None:
            return tree_unflatten(results, self._outputs[self.training])
        return results[0] if len(results) == 1 else results

    def train(self, mode: bool = True) -> Self:
        """Choose the trace, of the stage as a whole."""
        for module in self.modules():
            module.training = mode
        return self


class _Place(nn.Module):
    """What is left of a submodule: a place for its parameters."""

    def train(self, mode: bool = True) -> Self:
        raise RuntimeError(
            "a submodule of a traced stage has no mode of its own: set it before zbpp.trace_stages, or call train() "
            "or eval() of the stage"
        )


def _hold(stage: nn.Module, name: str, tensor: Tensor, *, is_persistent: bool) -> None:
    *path, last = name.split(".")
    owner = stage
    for each in path:
        if each not in dict(owner.named_children()):
            owner.add_module(each, _Place())
        owner = owner.get_submodule(each)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(last, tensor)
    else:
        owner.register_buffer(last, tensor, persistent=is_persistent)


def _fits(value: Any, taken: Any) -> bool:
    if isinstance(taken, Layout):
        return isinstance(value, Tensor) and (value.dtype, value.shape) == taken
    return type(value) is type(taken) and bool(value == taken)


def _text(value: Any) -> str:
    return str(Layout(value.dtype, tuple(value.shape))) if isinstance(value, Tensor) else str(value)
