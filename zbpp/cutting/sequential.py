"""A chain of modules, cut into stages that hold the modules themselves, under their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from zbpp.partition import checked_counts, partition
from zbpp.tracebacks import hiding_own_frames

Children = list[tuple[str, nn.Module]]


class SequentialStage(nn.Module):
    """Some children of an nn.Sequential, called in turn. They keep the names that they have in it."""

    def __init__(self, children: Children, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        # {name of a parameter: the stage, and the name in it, that has the same one}
        self.tied_parameters: dict[str, tuple[int, str]] = {}
        self._is_first, self._is_last = is_first, is_last
        for name, child in children:
            self.add_module(name, child)

    def forward(self, *values: Any) -> Any:
        # Inside an nn.Sequential a tuple is one value; between stages its elements are separate arguments.
        if len(values) != 1 and self._is_first:
            raise TypeError(
                f"the first stage got {len(values)} inputs: a chain takes one value, as nn.Sequential does"
            )
        value = values[0] if len(values) == 1 else values
        for child in self._modules.values():
            value = child(value)  # type: ignore[misc]  # none is None
        if not self._is_last:
            self._check_output(value)
        return value

    def _check_output(self, value: Any) -> None:
        """Raise TypeError for a value that the next stage would not get as it is."""
        if isinstance(value, tuple) and (type(value) is not tuple or len(value) < 2):
            name = list(self._modules)[-1]
            raise TypeError(
                f"child {name!r} returned a {type(value).__name__} of {len(value)} to the next stage, which "
                "would not get it as such: return a tensor or a plain tuple of several, or cut elsewhere by "
                "layers_per_stage"
            )


@hiding_own_frames
def split_sequential(
    layers: nn.Sequential | nn.ModuleList,
    num_stages: int,
    *,
    layers_per_stage: Sequence[int] | None = None,
) -> dict[int, nn.Module]:
    """{stage index: module}, each with a contiguous part of the children. A ModuleList is called as a chain.

    The stages hold the given children, not copies, under the same names: an optimizer made from `layers`
    updates them, and the stages' state_dicts together are that of `layers`. A child that gets a tuple gets it
    as one value, as inside an nn.Sequential, also where the tuple comes from another stage. A rank keeps
    `stages[i]` of its own stages; the others are freed with the dict and `layers`.

    layers_per_stage: how many children each stage gets. None: the cut whose heaviest stage has the fewest
    parameters.
    Stages on different ranks that share a parameter have a copy each, which is trained as one (see
    zbpp/stage_api.py).
    Raises TypeError for a class of its own, ValueError for a cut that does not fit, and for a buffer that two
    stages would share. Hooks of `layers` itself are not called.
    """
    children = _children(layers)
    counts = _counts(children, num_stages, layers_per_stage)
    bounds = list(pairwise(accumulate(counts, initial=0)))
    stages = {
        index: SequentialStage(children[start:stop], is_first=index == 0, is_last=index == num_stages - 1)
        for index, (start, stop) in enumerate(bounds)
    }
    _tie(stages)
    return {**stages}


def _children(layers: nn.Module) -> Children:
    """The container's children; one that occurs twice is listed twice. TypeError unless a plain chain."""
    if type(layers) not in (nn.Sequential, nn.ModuleList):
        raise TypeError(
            "split_sequential takes a plain nn.Sequential or nn.ModuleList, with children called in turn, "
            f"not {type(layers).__name__}: zbpp.trace_stages cuts any module that torch.export can trace"
        )
    # named_children() would list each child once
    return [(name, child) for name, child in layers._modules.items() if child is not None]


def _counts(children: Children, num_stages: int, layers_per_stage: Sequence[int] | None) -> list[int]:
    if len(children) < num_stages:
        raise ValueError(
            f"{len(children)} children are too few for {num_stages} stages, each needs one: use fewer "
            "stages, or make one chain of all layers where a child is a chain itself"
        )
    if layers_per_stage is not None:
        return checked_counts(layers_per_stage, len(children), num_stages)
    sizes = [sum(each.numel() for each in child.parameters()) for _, child in children]
    # If no child has parameters, all children weigh the same.
    return partition(sizes if any(sizes) else [1] * len(sizes), num_stages)


def _tie(stages: Mapping[int, SequentialStage]) -> None:
    """Declare the parameters that an earlier stage has, too. Raises ValueError for such a buffer."""
    places: dict[Tensor, tuple[int, str]] = {}
    for index, own in stages.items():
        for name, tensor in (*own.named_parameters(), *own.named_buffers()):
            stage, first = places.setdefault(tensor, (index, name))
            if stage == index:
                continue
            if not isinstance(tensor, nn.Parameter):
                raise ValueError(
                    f"stage {stage} ({first}) and stage {index} ({name}) would share one buffer, whose "
                    "copies on two ranks would drift apart: cut so that one stage holds both"
                )
            own.tied_parameters[name] = stage, first
