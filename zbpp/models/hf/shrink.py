"""A small copy of a Hugging Face config, on which a cut can be tried: the same layers, but narrow.

All widths are divided by one factor, so that a width that divides another one still does. The numbers of
layers, heads and groups stay. So the copy has the same modules under the same names, which is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from zbpp.models.hf.cut import CutError
from zbpp.models.hf.values import no_fake_mode

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SMALL = 4_000_000  # parameters: a model of this size is its own small copy
_LARGEST = 60_000_000  # parameters that a copy may have
_VOCABULARY, _EXPERTS = 64, 16

_NUMBER_OF_EXPERTS = re.compile(r"(num|n)_.*experts?$")
# Names of counts and of positions in the sequence. A layer_size or a head_dim is a width.
_NO_WIDTH = re.compile(
    r"(layer|head)(?!.*(size|dim))(?<!d_head)|position|window|kernel|group|per_tok|top_?k|interval|period|offset|length"
)


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The library's model on the meta device; the trainer changes the dtype later.

    Its tensors are those of no FakeTensorMode, inside of which a constructor may fail on the meta device.
    """
    from transformers import AutoModelForCausalLM

    with no_fake_mode(), torch.device("meta"), torch.random.fork_rng([]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # the library's
            config, dtype=dtype, trust_remote_code=False
        )
    return model


Tried = TypeVar("Tried")


def with_small_copy(config: PretrainedConfig, run: Callable[[PretrainedConfig], Tried]) -> Tried:
    """Call `run` with a config of the same family whose model is small, and return its result.

    `run` compares values: no FakeTensorMode is active in it. A config whose model is small already is used
    itself. Else narrow copies are tried until one has the same modules and `run` raises nothing, or CutError,
    which is passed on.
    Raises ValueError with the first copy's reason if no copy will do.
    """
    with no_fake_mode():
        return _with_small_copy(config, run)


def _with_small_copy(config: PretrainedConfig, run: Callable[[PretrainedConfig], Tried]) -> Tried:
    whole = build_on_meta(config)
    if size_of(whole) <= SMALL:
        return run(_exact(type(config)(**config.to_dict())))
    reasons = []
    for narrow in _candidates(config):
        try:
            copy = _exact(type(config)(**narrow))
            model = build_on_meta(copy)
            if _kinds(model) != _kinds(whole):
                reasons.append("a narrow copy has other modules")
            elif size_of(model) > _LARGEST:
                reasons.append(f"a narrow copy still has {size_of(model)} parameters")
            else:
                return run(copy)
        except CutError:
            raise
        except Exception as error:  # the library may raise anything for sizes that don't fit each other
            reasons.append(f"{type(error).__name__}: {error}".replace("\n", " "))
    raise ValueError(
        f"{type(whole).__name__} can't be checked, since no small copy of it can be made: {reasons[0]}"
    )


def _exact(config: PretrainedConfig) -> PretrainedConfig:
    """The config with plain products for experts: the library's grouped ones don't take float64."""
    config._experts_implementation = "eager"
    return config


def size_of(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _candidates(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    given = config.to_dict()
    for factor in (64, 32, 16, 8, 4, 2, 1):
        for most_experts in (_EXPERTS, None):
            yield {name: _narrow(name, value, factor, most_experts) for name, value in given.items()}


def _narrow(name: str, value: Any, factor: int, most_experts: int | None) -> Any:
    if isinstance(value, dict):
        return {key: _narrow(key, each, factor, most_experts) for key, each in value.items()}
    if isinstance(value, list) and "token" in name:
        return [_narrow(name, each, factor, most_experts) for each in value]
    if type(value) is not int:
        return value
    if "vocab" in name:
        return min(value, _VOCABULARY)
    if "token" in name and "per_tok" not in name:
        return value if value < _VOCABULARY else value % _VOCABULARY
    if _NUMBER_OF_EXPERTS.match(name):
        return value if most_experts is None else min(value, most_experts)
    if _NO_WIDTH.search(name) or value < 2 * factor:
        return value
    return value // factor


def _kinds(model: nn.Module) -> list[tuple[str, type[nn.Module]]]:
    return [(name, type(module)) for name, module in model.named_modules()]
