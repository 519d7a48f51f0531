"""The parameters of one rank's stages, under the names that they have in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zbpp.job.agreement import gather, refuse_together
from zbpp.runtime.processes.dtensors import part_for
from zbpp.runtime.processes.ties import Tie

_LOSS = "loss."

Names = dict[int, dict[str, int]]
"""{stage: {name in its state_dict: the first stage of the rank that has this tensor under this name}}."""


class StageParameters:
    """Parameters and state of this rank's stages.

    A stage uses the names of the whole model (see zbpp/stage_api.py), and they are kept here. If two stages
    of the pipeline use one name for different parameters or buffers, every name gets `stages.{index}.` in
    front. The names of a loss that is a module get `loss.` in front.

    stages: this rank's. all_names: per rank, `names_of` its stages. ties: of all ranks. group: the
    pipeline's. loss: the loss function, on the rank that computes the loss.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        all_names: Sequence[Names],
        ties: Sequence[Tie],
        group: dist.ProcessGroup | None,
        loss: object = None,
    ) -> None:
        self._stages = dict(sorted(stages.items()))
        self._ties, self._group = ties, group
        self._loss = loss if isinstance(loss, nn.Module) else nn.Module()
        rank_of = {index: rank for rank, names in enumerate(all_names) for index in names}
        self._has_copies = any(len({rank_of[index] for index, _ in tie}) > 1 for tie in ties)
        self.is_prefixed = _has_homonyms(all_names, ties)
        self._known = {
            f"{self._prefix(index)}{name}" for names in all_names for index in names for name in names[index]
        }

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

    def all_names(self) -> Iterator[tuple[tuple[str, ...], nn.Parameter]]:
        """As `named`, with every name that the parameter has in the whole model, its own first.

        The names of a tied parameter's copies are the same set on all ranks.
        """
        names: dict[int, list[str]] = {}
        for index, stage in self._stages.items():
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                found = names.setdefault(id(parameter), [])
                found.append(f"{self._prefix(index)}{name}")
                for tie in self._ties:
                    if (index, name) in tie:
                        found += [f"{self._prefix(other)}{theirs}" for other, theirs in tie]
        for name, parameter in self.named():
            yield tuple(dict.fromkeys([name, *names.get(id(parameter), [])])), parameter

    def state_dict(self, stage: int | None = None, *, keep_vars: bool = False) -> dict[str, Any]:
        """Parameters and persistent buffers, as `nn.Module.state_dict` gives them.

        stage: of this stage alone; None: of all this rank's, and of the loss.
        """
        if stage is not None:
            return self._stages[stage].state_dict(prefix=self._prefix(stage), keep_vars=keep_vars)
        state: dict[str, Any] = {}
        for index in self._stages:
            state |= self.state_dict(index, keep_vars=keep_vars)
        return state | self._loss.state_dict(prefix=_LOSS, keep_vars=keep_vars)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of `state`, which may be the whole model's, of whole tensors or of shards.

        Raises RuntimeError, before anything is loaded, if a name of this rank is missing, or is one that
        no stage of the pipeline has; strict=False loads what is there. Collective if ranks have copies of a
        parameter: then all ranks raise.
        """
        mine = {index: self.state_dict(index) for index in self._stages}
        of_loss = self._loss.state_dict(prefix=_LOSS)
        missing = [name for names in (*mine.values(), of_loss) for name in names if name not in state]
        unknown = [name for name in state if name not in self._known and not name.startswith(_LOSS)]
        refusal = ""
        if strict and (missing or unknown):
            refusal = (
                f"the state dict does not fit this pipeline: missing here: {missing or 'nothing'}; belonging "
                f"to no stage: {unknown or 'nothing'}. strict=False loads the rest"
            )
        everyone = partial(gather, group=self._group) if self._has_copies else lambda mine: [mine]
        refuse_together(refusal, everyone, RuntimeError)
        for index, names in mine.items():
            length = len(self._prefix(index))
            part = {name[length:]: part_for(own, state[name]) for name, own in names.items() if name in state}
            self._stages[index].load_state_dict(part, strict=strict)
        part = {name.removeprefix(_LOSS): state[name] for name in of_loss if name in state}
        self._loss.load_state_dict(part, strict=strict)

    def _prefix(self, index: int) -> str:
        return f"stages.{index}." if self.is_prefixed else ""


def names_of(stages: Mapping[int, nn.Module]) -> Names:
    """The names in the state_dicts of these stages."""
    first: dict[tuple[str, int], int] = {}
    return {
        index: {name: first.setdefault((name, id(value)), index) for name, value in _state(stage).items()}
        for index, stage in sorted(stages.items())
    }


def persistent_buffers(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of each buffer that the stage's state_dict has, each once."""
    seen = set[int]()
    for prefix, module in stage.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{name}".lstrip("."), buffer


def _state(stage: nn.Module) -> dict[str, Tensor]:
    return stage.state_dict(keep_vars=True)


def _has_homonyms(all_names: Sequence[Names], ties: Sequence[Tie]) -> bool:
    """Whether two stages use one name for different tensors."""
    owner = {place: tie[0] for tie in ties for place in tie}
    found: dict[str, object] = {}
    for index, names in chain.from_iterable(each.items() for each in all_names):
        for name, first in names.items():
            tensor = owner.get((index, name), (first, name))
            if found.setdefault(name, tensor) != tensor:
                return True
    return False
