"""The parameters of one rank's stages, under the names that they have in the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zbpp.runtime.mesh import is_sharded, part_for
from zbpp.runtime.ties import declared_by

_LOSS = "loss."


class StageParameters:
    """Parameters and state of this rank's stages.

    A stage uses the names of the whole model (see zbpp/stage_api.py), and they are kept here. If two stages
    of the pipeline use one name for different tensors, every name gets `stages.{index}.` in front. The names
    of a loss that is a module get `loss.` in front.

    stages: this rank's. all_names: per rank, `names_of` its stages. loss: the loss function, on the rank that
    computes the loss.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        all_names: Sequence[Mapping[int, Iterable[str]]],
        loss: object = None,
    ) -> None:
        self._stages = dict(sorted(stages.items()))
        self._loss = loss if isinstance(loss, nn.Module) else nn.Module()
        everyone = [(index, name) for names in all_names for index in names for name in names[index]]
        counts = Counter(name for _, name in everyone)
        self._is_prefixed = any(count > 1 for count in counts.values())
        self._known = {f"{self._prefix(index)}{name}" for index, name in everyone}

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, in stage order; a parameter that stages share comes under its first name."""
        seen: set[int] = set()
        for index, stage in self._stages.items():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{self._prefix(index)}{name}", parameter
        for name, parameter in self._loss.named_parameters():
            if id(parameter) not in seen:
                yield f"{_LOSS}{name}", parameter

    def of_loss(self) -> list[nn.Parameter]:
        """The parameters that the loss doesn't share with a stage."""
        own = {id(each) for stage in self._stages.values() for each in stage.parameters()}
        return [each for each in self._loss.parameters() if id(each) not in own]

    def state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers, as `nn.Module.state_dict` gives them."""
        state: dict[str, Any] = {}
        for index, stage in self._stages.items():
            state |= stage.state_dict(prefix=self._prefix(index))
        return state | self._loss.state_dict(prefix=_LOSS)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of `state`, which may be the whole model's, of whole tensors or of shards.

        Raises RuntimeError, before anything is loaded, if a name of this rank is missing, or is one that
        no stage of the pipeline has; strict=False loads what is there.
        """
        mine = {index: stage.state_dict(prefix=self._prefix(index)) for index, stage in self._stages.items()}
        of_loss = self._loss.state_dict(prefix=_LOSS)
        missing = [name for names in (*mine.values(), of_loss) for name in names if name not in state]
        unknown = [name for name in state if name not in self._known and not name.startswith(_LOSS)]
        if strict and (missing or unknown):
            raise RuntimeError(
                f"the state dict does not fit this pipeline: missing here: {missing or 'nothing'}; belonging "
                f"to no stage: {unknown or 'nothing'}. strict=False loads the rest"
            )
        for index, names in mine.items():
            length = len(self._prefix(index))
            part = {name[length:]: part_for(own, state[name]) for name, own in names.items() if name in state}
            self._stages[index].load_state_dict(part, strict=strict)
        part = {name.removeprefix(_LOSS): state[name] for name in of_loss if name in state}
        self._loss.load_state_dict(part, strict=strict)

    def _prefix(self, index: int) -> str:
        return f"stages.{index}." if self._is_prefixed else ""


def names_of(stages: Mapping[int, nn.Module]) -> dict[int, list[str]]:
    """{stage: the names in its state_dict}; a tensor that two stages share under one name is listed once."""
    seen: set[tuple[str, int]] = set()
    names: dict[int, list[str]] = {}
    for index, stage in sorted(stages.items()):
        entries = {(name, id(value)) for name, value in _state(stage).items()}
        names[index] = sorted(name for name, _ in entries - seen)
        seen |= entries
    return names


def check_declared_ties(stages: Mapping[int, nn.Module]) -> None:
    """Raise ValueError if this rank's stages contradict what they declare in `tied_parameters`."""
    ids = {
        index: {name: id(value) for name, value in _state(stage).items()} for index, stage in stages.items()
    }
    for index, stage in stages.items():
        for name, other in declared_by(stage).items():
            if name not in ids[index]:
                raise ValueError(
                    f"stage {index} declares {name} in tied_parameters, but has no such parameter"
                )
            owners, other_name = (ids, other) if isinstance(other, str) else ([other[0]], other[1])
            here = {ids[owner][other_name] for owner in owners if other_name in ids.get(owner, {})}
            is_copy = is_sharded(stage.get_parameter(name))  # sharded stages can't share an object
            if here and ids[index][name] not in here and not is_copy:
                raise ValueError(
                    f"stage {index} declares {name} to be tied to {other_name}, but they are two tensors: "
                    "assign one Parameter to both modules"
                )


def _state(stage: nn.Module) -> dict[str, Tensor]:
    return stage.state_dict(keep_vars=True)
