"""Any Hugging Face causal language model, from its config: cut into stages, weights drawn anew.

Each stage is the library's own model with as many layers as fall to it, embeddings and head left out
where other stages have them; nothing of its code is repeated here. Needs the extra `hf`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zbpp.models.layers import check_positive, initial_values, split_layers, token_loss

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class HuggingFace:
    """int64 tokens [batch, time] -> [batch, time, hidden] between stages -> logits [batch, time, vocab].

    config: as in a config.json, with its `model_type`, or the path of one. `vocab_size` and
    `sequence_length`, the data's, take the place of what it says; both by default are its own. Matrices
    depend on `seed` and their names only, vectors are as the library makes them.
    Raises ValueError for what is no causal language model, and for tied embeddings on several stages.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | str,
        vocab_size: int | None = None,
        sequence_length: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        changes = {"vocab_size": vocab_size, "max_position_embeddings": sequence_length, "use_cache": False}
        self._config = _read(config, {key: value for key, value in changes.items() if value is not None})
        self._layers_per_stage, self._seed = layers_per_stage, seed
        check_positive(num_hidden_layers=self._config.num_hidden_layers)

    def build_stage(self, index: int, num_stages: int) -> nn.Module:
        """Stage `index` of `num_stages`, on the CPU; embedding and head are made once more and dropped."""
        layers = self._split(num_stages)
        if not 0 <= index < num_stages:
            raise ValueError(
                f"stage {index} does not exist: with num_stages={num_stages} write 0 to {num_stages - 1}"
            )
        if getattr(self._config, "tie_word_embeddings", False) and num_stages > 1:
            raise ValueError(
                "its embedding and head share one weight, and they are on different stages: "
                "write config.tie_word_embeddings=false, or use one stage"
            )
        stage = Stage(_build(self._config, layers[index]), layers[index], index == 0, index == num_stages - 1)
        self._draw(stage)
        return stage

    def layer_counts(self, num_stages: int) -> list[int]:
        """How many layers each stage gets. Raises ValueError if they can't be split that way."""
        return list(map(len, self._split(num_stages)))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token; logits [batch, time, vocab], target [batch, time]."""
        return token_loss(output, target)

    def _split(self, num_stages: int) -> list[range]:
        return split_layers(self._config.num_hidden_layers, num_stages, self._layers_per_stage)

    def _draw(self, stage: nn.Module) -> None:
        std = getattr(self._config, "initializer_range", None) or 0.02
        for name, parameter in stage.named_parameters():
            if parameter.dim() > 1:
                parameter.data.copy_(initial_values(name, parameter.shape, self._seed, lambda *_: std))


class Stage(nn.Module):
    """Some layers of a model; the first stage takes tokens, the last gives logits.

    The layers keep their numbers in the whole model, and so all weights their names.
    """

    def __init__(self, model: PreTrainedModel, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model, self.is_first, self.is_last = model, is_first, is_last
        self._trunk = [_trunk(model, len(layers))]  # in a list: it is a part of `model` already
        _number(self._trunk[0], layers)
        embeddings, norms = _around_layers(self._trunk[0])
        if not is_first:
            _leave_out(self._trunk[0], embeddings)
        if not is_last:
            _leave_out(self._trunk[0], norms)
            model.set_output_embeddings(nn.Identity())  # type: ignore[no-untyped-call]  # the library's

    def forward(self, x: Tensor) -> Tensor:
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        if self.is_last:
            logits: Tensor = self.model(**inputs, use_cache=False).logits
            return logits
        hidden: Tensor = self._trunk[0](**inputs, use_cache=False).last_hidden_state
        return hidden


def _read(config: Mapping[str, Any] | str, changes: Mapping[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig, PretrainedConfig  # lazily: three seconds, and optional

    given = PretrainedConfig.get_config_dict(config)[0] if isinstance(config, str) else dict(config)
    if "model_type" not in given:
        raise ValueError("config has no model_type: write one of Hugging Face's, such as llama")
    return AutoConfig.for_model(**{**given, **changes})


def _build(config: PretrainedConfig, layers: range) -> PreTrainedModel:
    """The model with these layers only; what the config says layer by layer is cut alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    num_layers = config.num_hidden_layers
    own = {
        key: value[layers.start : layers.stop] if _is_per_layer(value, num_layers) else value
        for key, value in config.to_dict().items()
    }
    own[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    part = AutoConfig.for_model(**own)
    with torch.random.fork_rng([]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(part)  # type: ignore[no-untyped-call]  # the library's
    return model


def _is_per_layer(value: object, num_layers: int) -> bool:
    return isinstance(value, list) and len(value) == num_layers


def _trunk(model: PreTrainedModel, num_layers: int) -> nn.Module:
    """The part that holds the list of layers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return model.get_submodule(name.rpartition(".")[0])
    raise ValueError(f"{type(model).__name__} has no list of its {num_layers} layers: it can't be cut")


def _number(trunk: nn.Module, layers: range) -> None:
    """Name the layers by their numbers in the whole model."""
    name, held = next(_lists(trunk, len(layers)))
    numbered = nn.ModuleList()
    for number, layer in zip(layers, held, strict=True):
        numbered.add_module(str(number), layer)
    trunk.add_module(name, numbered)  # in the same place


def _lists(trunk: nn.Module, num_layers: int) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in trunk.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            yield name, child


def _around_layers(trunk: nn.Module) -> tuple[list[str], list[str]]:
    """The names of embeddings, with their norm and dropout, and of the norm behind the layers."""
    embeddings, norms = [], []
    for name, child in trunk.named_children():
        is_norm = type(child).__name__.endswith("Norm")
        if isinstance(child, nn.Embedding | nn.Dropout) or (is_norm and "embed" in name):
            embeddings.append(name)
        elif is_norm:
            norms.append(name)
    return embeddings, norms


class _Nothing(nn.Module):
    """A position embedding on a later stage: the first one has added it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def _leave_out(trunk: nn.Module, names: Iterable[str]) -> None:
    """Another stage does it."""
    for name in names:
        is_embedding = isinstance(trunk.get_submodule(name), nn.Embedding)
        trunk.add_module(name, _Nothing() if is_embedding else nn.Identity())
