"""The weights and buffers of a pipeline by their names in the whole model, with float32 master weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.checkpoints.nest import decoded, encoded
from zbpp.checkpoints.optimizer_states import Masters, Saved
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.dtensors import like, local_of

Facts = dict[str, Any]

_MOST_SHOWN = 5


def collect(pipeline: Pipeline, masters: Masters | None, tensors: dict[str, Tensor]) -> Facts:
    """This process's part as JSON; tensors are added to `tensors`. A master replaces its parameter.

    Raises ValueError for an extra state of a module that a checkpoint can't hold. Collective if an update
    waits at the gate.
    """
    extra: Facts = {}
    for name, value in pipeline.state_dict(keep_vars=True).items():
        if not is_extra(name):
            tensors[f"model.{name}"] = _trained(value, masters).detach()
        else:
            extra[name] = encoded(value, f"extra.{name}", tensors)
    return {"extra": extra, "num_steps": pipeline.num_steps, "loss_scale": pipeline.loss_scale}


def is_extra(name: str) -> bool:
    """Whether a state of a module's `get_extra_state` has this name. It may be of any kind and size."""
    return name.rpartition(".")[2] == "_extra_state"


def _trained(value: Tensor, masters: Masters | None) -> Tensor:
    return masters.of(value) if masters is not None and isinstance(value, nn.Parameter) else value


class RestoredModel:
    """The values that this process's stages get from a checkpoint.

    targets: empty tensors by their keys in the checkpoint. The caller fills them, then calls `apply`.
    """

    def __init__(self, pipeline: Pipeline, masters: Masters | None, facts: Facts, saved: Saved) -> None:
        self._pipeline, self._masters, self._facts = pipeline, masters, facts
        self._own = pipeline.state_dict(keep_vars=True)
        self._tensors = {name: each for name, each in self._own.items() if not is_extra(name)}
        self.targets = {f"model.{name}": self._empty(each) for name, each in self._tensors.items()}
        for name in self._own.keys() - self._tensors.keys():
            decoded(facts["extra"][name], lambda key: self._add(key, saved))

    def _empty(self, value: Tensor) -> Tensor:
        trained = _trained(value, self._masters).detach()
        return like(trained, torch.empty_like(local_of(trained)))

    def _add(self, key: str, saved: Saved) -> None:
        self.targets[key] = torch.empty(saved.size_of(key), dtype=saved.dtype_of(key))

    @torch.no_grad()
    def apply(self) -> None:
        """Give the stages their values. Collective if ranks have copies of a parameter."""
        state: dict[str, Any] = {name: self.targets[f"model.{name}"] for name in self._tensors}
        for name in self._own.keys() - self._tensors.keys():
            state[name] = decoded(self._facts["extra"][name], self.targets.__getitem__)
        with_masters = {}
        if self._masters is not None:
            masters = {name: _trained(each, self._masters) for name, each in self._tensors.items()}
            with_masters = {name: each for name, each in masters.items() if each is not self._tensors[name]}
        for name, master in with_masters.items():
            local_of(master).copy_(local_of(state.pop(name)))
        # Names are known to fit; those that are missing have masters.
        self._pipeline.load_state_dict(state, strict=False)
        if self._masters is not None:
            self._masters.update()
        self._pipeline.num_steps = self._facts["num_steps"]
        self._pipeline.loss_scale = self._facts["loss_scale"]


def differences(
    own: Mapping[str, tuple[int, ...]], everyones: Iterable[str], saved: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """How a checkpoint differs from a pipeline: a sentence per name, in model order; [] if it doesn't.

    own, saved: {name: shape} of this process's tensors and of the checkpoint's. everyones: the names on all
    processes.
    """
    found = [f"{name} is not in the checkpoint" for name in own if name not in saved]
    found += [
        f"{name} is {list(saved[name])} in the checkpoint and {list(shape)} here"
        for name, shape in own.items()
        if name in saved and saved[name] != shape
    ]
    known = set(everyones)
    return found + [f"{name} is in the checkpoint only" for name in saved if name not in known]


def refusal(found: list[str], facts: Facts, num_stages: int) -> str:
    """The error message for these differences."""
    text = "; ".join(found[:_MOST_SHOWN]) + (
        f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    )
    if facts["is_prefixed"] and facts["num_stages"] != num_stages:
        return (
            "two stages of this model use one name for different tensors, so names depend on the cut, and "
            f"the checkpoint was written by {facts['num_stages']} stages, not {num_stages} ({text}): load it "
            "with as many stages, or name parameters as in the whole model (see zbpp/stage_api.py)"
        )
    return f"the checkpoint is of another model: {text}"
