"""A model of which only a part is trained: parameters frozen by name, or LoRA adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from zbpp.runtime import Pipeline
from zbpp.stage_api import check_pipeline
from zbpp.training.lora import check_no_tied_target, check_quantized, check_targets, inject, lora_config
from zbpp.training.optim.parameter_groups import check_all_match

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FineTuned:
    """A model of which only a part is trained; see zbpp/stage_api.py for what a model is.

    freeze, train: patterns of parameters' names, see below. lora: the arguments of peft's LoraConfig;
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
            check_quantized(lora, model)
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

    def check_pipeline(self, pipeline: Pipeline) -> None:
        """Raise ValueError on all ranks for a pattern or target that matches nothing on any. Collective."""
        check_pipeline(self.model, pipeline)
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


# ----------------------------------------------------------------
# Freezing parameters of a model by patterns of their names in the whole model.
#
#     freeze   parameters that match are not trained
#     train    only parameters that match are trained
#
# A frozen parameter has no gradient, no optimizer state, no W, and F keeps no input for it.


def freeze(
    stage: nn.Module, freeze: Sequence[str], train: Sequence[str], tied: Mapping[str, str] | None = None
) -> None:
    """Freeze parameters of a stage. tied: the model's `tied()`; a tied parameter matches by all its names."""
    aliases = _aliases(tied or {})
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).update(aliases.get(name, {name}))
    for parameter, own in names.items():
        if _match(own, freeze) or (train and not _match(own, train)):
            parameter.requires_grad_(False)


def check_frozen(pipeline: Pipeline, freeze: Sequence[str], train: Sequence[str]) -> None:
    """Raise ValueError on all ranks for a pattern without match, and if nothing is trained. Collective."""
    check_all_match(pipeline, freeze, "freeze")
    check_all_match(pipeline, train, "train")
    if (freeze or train) and not any(
        pipeline.place.gather(any(each.requires_grad for each in pipeline.parameters()))
    ):
        raise ValueError("freeze and train leave no parameter to train: write fewer patterns in freeze")


def _match(names: Collection[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _aliases(tied: Mapping[str, str]) -> dict[str, set[str]]:
    """{name of a tied parameter: all names of that parameter}."""
    groups: dict[str, set[str]] = {}
    for name, other in tied.items():
        joined = {name, other} | groups.get(name, set()) | groups.get(other, set())
        groups |= dict.fromkeys(joined, joined)
    return groups
