"""A model of which only a part is trained: parameters frozen by name, or LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from zbpp.runtime import Pipeline
from zbpp.training.frozen import check_frozen, freeze
from zbpp.training.lora import check_no_tied_target, check_targets, inject, lora_config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FineTuned:
    """A model of which only a part is trained; see zbpp/stage_api.py for what a model is.

    freeze, train: patterns of parameters' names, see frozen.py. lora: the arguments of peft's LoraConfig;
    None: no LoRA. seed: of the adapters' initial values. Raises ValueError as lora_config does.
    """

    def __init__(
        self,
        model: Any,
        *,
        freeze: Sequence[str] = (),
        train: Sequence[str] = (),
        lora: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        if lora is not None:
            lora_config(lora)  # raises ValueError for options that a pipeline can't have
        self.model, self._freeze, self._train = model, freeze, train
        self._lora, self._seed = lora, seed

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """The model's stage, with frozen parameters or with adapters."""
        if self._lora is not None:
            check_no_tied_target(self._lora, self._tied())  # the same on all ranks
        stage: nn.Module = self.model.build_stage(index, num_stages)
        if self._lora is not None:
            inject(stage, self._lora, self._seed)
        elif self._freeze or self._train:
            freeze(stage, self._freeze, self._train, self._tied())
        return stage

    def check(self, pipeline: Pipeline) -> None:
        """Raise ValueError as `check_fine_tuned` does. Collective."""
        check_frozen(pipeline, self._freeze, self._train)
        if self._lora is not None:
            check_targets(pipeline, self._lora)

    def _tied(self) -> Mapping[str, str]:
        tied: Mapping[str, str] = self.model.tied() if hasattr(self.model, "tied") else {}
        return tied

    @property
    def loss(self) -> Any:
        """The model's loss."""
        return self.model.loss

    def __getattr__(self, name: str) -> Any:
        """The model's other attributes: tied, parallelize, metrics, ..."""
        if name == "model":  # not set yet, while copy or pickle makes this object
            raise AttributeError(name)
        if name == "parallelize" and self._lora is not None:
            return _refuse_to_split
        return getattr(self.model, name)


def _refuse_to_split(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The `parallelize` of a model with adapters. Raises ValueError."""
    raise ValueError(
        f"LoRA doesn't go with a mesh of tensor={mesh.size()}: the model's plan splits the modules that LoRA "
        "wraps; write tensor=1, with more pipeline ranks or shards"
    )


def check_fine_tuned(pipeline: Pipeline, model: Any) -> None:
    """Raise ValueError on all ranks for a pattern or target that matches nothing on any rank. Collective."""
    if isinstance(model, FineTuned):
        model.check(pipeline)
