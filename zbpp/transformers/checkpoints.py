"""Checkpoints of a Trainer in a pipeline: the files that the Trainer writes in one process.

So a checkpoint goes on in one process, or under another schedule and number of ranks. Rank 0 gets the tensors
of all ranks on the CPU, and the Trainer writes them. Each rank reads the files whole, and takes its own part.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.transformers.cut_model import CutModel
from zbpp.transformers.replicas import Replicas

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # a mixin: the Trainer's class comes behind it


class Checkpoints(_Trainer):
    """Saving and loading of a Trainer whose model is cut."""

    _replicas: Replicas
    _groups: list[list[str]] | None = None
    """The names of the parameters in each group of the optimizer over the whole model."""

    _whole: dict[str, Tensor] | None = None
    """What `save_model` writes, on rank 0 while it runs."""

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Write an ordinary folder, or peft's adapter. Collective: all ranks call it."""
        cut = self._made_cut()
        self._whole = cut.merged(cut.state_dict())
        super().save_model(*args, **kwargs)
        self._whole = None
        if dist.is_initialized():
            dist.barrier()  # the others look for the folder

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        raw, places = raw_optimizer(self.optimizer), self._places()
        states = {self._name(each): _on_cpu(state) for each, state in raw.state.items()}
        states = self._made_cut().merged(states)
        whole = {
            "state": {places[name]: states[name] for name in sorted(states, key=places.__getitem__)},
            "param_groups": [
                {**group, "params": [places[name] for name in names]}
                for group, names in zip(raw.param_groups, self._groups or [], strict=True)
            ],
        }
        with _replaced(self, "optimizer", SimpleNamespace(state_dict=lambda: whole)):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        raw = raw_optimizer(self.optimizer)

        def load(whole: dict[str, Any]) -> None:
            raw.load_state_dict(self._own_states(raw, whole))

        with _replaced(self, "optimizer", SimpleNamespace(load_state_dict=load)):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _own_states(self, raw: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a state dict of the optimizer over the whole model."""
        places = self._places()
        mine = [[places[self._name(each)] for each in group["params"]] for group in raw.param_groups]
        saved = whole["param_groups"]
        sizes, own_sizes = [len(each["params"]) for each in saved], [len(each) for each in self._groups or []]
        if sizes != own_sizes:
            raise ValueError(
                f"the checkpoint's optimizer has groups of {sizes} parameters, and this Trainer's "
                f"{own_sizes}: write the arguments of the run that saved it"
            )
        states = whole["state"]
        return {
            "state": {place: states[place] for place in chain(*mine) if place in states},
            "param_groups": [{**group, "params": own} for group, own in zip(saved, mine, strict=True)],
        }

    def _places(self) -> dict[str, int]:
        """{name of a parameter: its number in the optimizer over the whole model}."""
        return {name: place for place, name in enumerate(chain(*(self._groups or [])))}

    def _name(self, parameter: Tensor) -> str:
        return self._made_cut().names[id(parameter)]

    def _made_cut(self) -> CutModel:
        """The model, cut when this is called first. Collective."""
        raise NotImplementedError

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks have the same
            with self._replicas.as_one_process():
                super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._replicas.as_one_process():
            super()._load_rng_state(checkpoint)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with _quiet_about_meta():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with _quiet_about_meta():
            super()._load_best_model()


def raw_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper, or itself."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each.detach().cpu() if isinstance(each, Tensor) else each for name, each in state.items()}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _quiet_about_meta() -> Iterator[None]:
    """Without torch's warnings that values of parameters on the meta device, other ranks', are not copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is a no-op.*")
        yield
