"""The user's model object as stages: cut as zbpp cuts its family, and run with the object's own modules.

What the user, peft, TRL or NEFTune did to the object (adapters, hooks, frozen parameters) is in the stages,
and an optimizer over the object's parameters is one over the stages'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zbpp.models.hf import HuggingFace
from zbpp.models.hf.config import without_cache
from zbpp.models.hf.cut import Cut, names_above_layers
from zbpp.models.hf.model import tried_cut
from zbpp.models.hf.quantize import drop_statistics, keep_weights
from zbpp.models.hf.stage import FirstStage, LastStage, OnlyStage, Stage
from zbpp.models.hf.ties import aliases_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


class OwnModules:
    """zbpp's contract with a model (zbpp/stage_api.py), for a causal language model that exists.

    loss: loss(logits, target); None: zbpp's mean over targets, which the last stage's head computes.
    layers_per_stage: as `HuggingFace` takes it. Raises ValueError for a model of another kind.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Callable[[Tensor, Any], Tensor] | None = None,
        layers_per_stage: Sequence[int] | None = None,
    ) -> None:
        self._model, self._layers_per_stage = model, layers_per_stage
        if getattr(model, "is_quantized", False):
            keep_weights(model)
        self._uses_head = loss is None
        self.loss: Any = HuggingFace(config=model.config.to_dict()).loss if loss is None else loss

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """A stage with the object's own parameters."""
        cut = _fitted(self._model, self._cut(num_stages))
        model: Any = _shell(self._model, "", cut.path)
        if index == num_stages - 1 and cut.head and self._uses_head:
            return (LastStage if index else OnlyStage)(model, cut, index, keeps_logits=True)
        return (Stage if index else FirstStage)(model, cut, index)

    def layer_counts(self, num_stages: int) -> list[int]:
        """How many layers each stage has."""
        return [len(each) for each in self._cut(num_stages).layers]

    def _cut(self, num_stages: int) -> Cut:
        return tried_cut(without_cache(self._model.config), num_stages, self._layers_per_stage, 0)

    def tied(self) -> dict[str, str]:
        """See zbpp/stage_api.py."""
        return aliases_of(self._model)


def _fitted(model: PreTrainedModel, cut: Cut) -> Cut:
    """The cut of the plain model, by the names that the object's parameters have: peft has wrapped some."""
    owners = {name: cut.owners[_plain_name(name, cut.owners)] for name in names_above_layers(model, cut.path)}
    head = cut.head if cut.head and type(model.get_submodule(cut.head)) is nn.Linear else ""
    return cut._replace(owners=owners, head=head)


def _plain_name(name: str, owners: Mapping[str, int]) -> str:
    """The plain model's parameter in whose module peft has put this one; the parameter itself if it is plain.

    Raises ValueError if the plain model has no such module.
    """
    module = name
    while module not in owners:
        module = module.rpartition(".")[0]
        inside = next((each for each in owners if each.rpartition(".")[0] == module), None)
        if inside is not None:
            return inside
        if not module:
            raise ValueError(f"{name} is in no module that the plain model has: no stage would run it")
    return module


def _shell(module: nn.Module, path: str, layers: str) -> nn.Module:
    """A copy of the modules above the layers, which shares all tensors: a stage leaves some of them out.

    A forward that was put on the object is left behind, since it is bound to the object.
    """
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update({key: value for key, value in module.__dict__.items() if key != "forward"})
    copy.__dict__["_parameters"] = dict(module._parameters)
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        below = f"{path}.{name}".removeprefix(".")
        children[name] = child if child is None or below == layers else _shell(child, below, layers)
    copy.__dict__["_modules"] = children
    return copy


def keep_only(model: nn.Module, kept: Iterable[Tensor]) -> None:
    """Put all parameters of a model but these on the meta device, where they have no memory."""
    mine, others = {id(each) for each in kept}, dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in mine:
                continue
            if id(parameter) not in others:
                others[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            module._parameters[name] = others[id(parameter)]
            drop_statistics(module)
