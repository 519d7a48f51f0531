"""A frozen base whose linear layers hold 4 or 8 bits per weight, by bitsandbytes, as the library makes it.

The library's quantizer replaces the linear layers of the model, which is on the meta device, and quantizes
each weight as it is read from the folder. So a stage has the weights that
from_pretrained(quantization_config=) has, bit for bit. The cut is tried on a small copy that is not
quantized: it depends on names and on calls of layers, which quantization leaves as they are.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zbpp.error_text import did_you_mean, kind_of
from zbpp.models.hf.ties import aliases_of
from zbpp.models.hf.values import no_fake_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OF_4_BITS = ("bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "llm_int8_skip_modules")
KINDS = {"nf4": _OF_4_BITS, "fp4": _OF_4_BITS, "int8": ("llm_int8_threshold", "llm_int8_skip_modules")}
"""The values of `quantize`, and the keys of the library's BitsAndBytesConfig that go with each."""

_AT_ONCE = 1 << 19  # numbers that are quantized at once


class Quantization:
    """How the linear layers of a model are quantized.

    kind: see KINDS. options: values for keys of BitsAndBytesConfig; the layers compute in the dtype of their
    inputs unless bnb_4bit_compute_dtype names one. dtype: in which weights are read. is_of_folder: whether
    the folder holds quantized weights already. Raises ValueError for other keys, and without bitsandbytes.
    """

    def __init__(
        self, kind: str, options: Mapping[str, Any], dtype: torch.dtype, *, is_of_folder: bool = False
    ) -> None:
        _check(kind, options)
        self.kind, self.dtype, self.is_of_folder = kind, dtype, is_of_folder
        library = importlib.import_module("transformers")
        quantizers = importlib.import_module("transformers.quantizers")

        bits: dict[str, Any] = {"load_in_8bit": True}
        if kind != "int8":
            bits = {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
        self.config = library.BitsAndBytesConfig(**bits, **options)
        self.quantizer: Any = quantizers.AutoHfQuantizer.from_config(self.config, pre_quantized=is_of_folder)
        self._has_compute_dtype = options.get("bnb_4bit_compute_dtype") is not None

    @property
    def name(self) -> str:
        """What an error calls it."""
        return f"a base in {self.kind}" if self.is_of_folder else f"quantize={self.kind}"

    @classmethod
    def of_folder(cls, given: Mapping[str, Any], dtype: torch.dtype) -> Quantization:
        """That of a folder's weights. given: the quantization_config of its config.json."""
        kind = "int8" if given.get("load_in_8bit") else given.get("bnb_4bit_quant_type", "fp4")
        options = {name: given[name] for name in KINDS[kind] if given.get(name) is not None}
        return cls(kind, options, dtype, is_of_folder=True)

    def prepare(self, model: PreTrainedModel) -> None:
        """Replace linear layers of a model on the meta device by layers that will be quantized.

        Raises ValueError for a tied layer that would be quantized.
        """
        tied = aliases_of(model)
        with no_fake_mode():  # the model's tensors are on the meta device, and of no such mode
            self.quantizer.preprocess_model(model, device_map={"": "cpu"})
        if lost := sorted(tied.keys() - aliases_of(model).keys()):
            raise ValueError(
                f"quantize_options.llm_int8_skip_modules leaves {lost[0]} to be quantized, which is tied to "
                f"{tied[lost[0]]}: add {lost[0].rpartition('.')[0]} to it"
            )
        keep_weights(model)
        for layer in quantized_layers(model):
            if not self._has_compute_dtype and not isinstance(layer, _bitsandbytes().Linear8bitLt):
                layer.compute_dtype, layer.compute_type_is_set = None, True

    def finish(self, model: PreTrainedModel) -> None:
        """Let the library and peft see a model as from_pretrained makes it; its layers are quantized."""
        self.quantizer.postprocess_model(model)
        model.hf_quantizer = self.quantizer
        for layer in quantized_layers(model):
            layer.weight.module = layer

    def leave_empty(self, model: PreTrainedModel) -> None:
        """Give layers whose tensors have no values, as in a prediction of memory, what they would hold."""
        for layer in quantized_layers(model):
            if not layer.weight.is_meta:
                _leave_empty(layer, self.config)

    def freeze(self, stage: nn.Module) -> None:
        """Let a stage train, and save, nothing of the base. peft asks the stage which adapters it takes."""
        stage.requires_grad_(False)
        name = "is_loaded_in_8bit" if self.config.load_in_8bit else "is_loaded_in_4bit"
        setattr(stage, name, True)
        stage.register_state_dict_post_hook(_save_trained)
        stage.register_load_state_dict_post_hook(_need_trained)


_STATISTICS = re.compile(
    r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)$"
    r"|\.(SCB|weight_format)$"
)


def weight_of(name: str) -> str | None:
    """The weight that a tensor of a folder is a statistic of; None for all other tensors."""
    found = _STATISTICS.search(name)
    return None if found is None else f"{name[: found.start()]}.weight"


def shape_of_packed(state: Tensor) -> tuple[int, ...]:
    """The shape of a weight of 4 bits, by its quant_state in a folder, which is JSON."""
    return tuple(json.loads(bytes(state.tolist()))["shape"])


def keep_weights(model: nn.Module) -> None:
    """Let the quantized layers of a model keep their weights in evaluations and moves."""
    for layer in quantized_layers(model):
        if isinstance(layer, _bitsandbytes().Linear8bitLt):
            layer._apply = MethodType(_apply_to_8_bits, layer)
        else:
            # On a CPU with bfloat16 the library packs the weight anew in the first forward of an evaluation,
            # and rounds its statistics: training would go on with other weights.
            layer.support_avx512bf16_for_cpu = False


def drop_statistics(module: Any) -> None:
    """Let a layer of the library, whose weight has left this rank, hold nothing beside the weight either."""
    if getattr(module, "quant_state", None) is not None:
        module.quant_state = None
    if hasattr(module, "state") and hasattr(module.state, "SCB"):
        module.state.CB = module.state.SCB = None


def kind_and_options(config: Any) -> tuple[str, dict[str, Any]]:
    """The values of `quantize` and `quantize_options` that stand for a BitsAndBytesConfig.

    Raises ValueError for a config of another library, and for one with values for other keys.
    """
    library = importlib.import_module("transformers")
    if isinstance(config, Mapping):
        config = library.BitsAndBytesConfig(**config)
    if not isinstance(config, library.BitsAndBytesConfig):
        raise ValueError(
            f"quantization_config is {kind_of(config)}: each rank quantizes its own tensors by bitsandbytes "
            "alone, write a BitsAndBytesConfig"
        )
    kind = "int8" if config.load_in_8bit else config.bnb_4bit_quant_type
    plain = library.BitsAndBytesConfig(load_in_8bit=config.load_in_8bit, load_in_4bit=config.load_in_4bit)
    changed = {name for name, value in config.to_dict().items() if value != plain.to_dict().get(name)}
    if not config.load_in_8bit and not config.load_in_4bit:
        raise ValueError("quantization_config has neither load_in_4bit nor load_in_8bit: write one of them")
    if others := changed - {*KINDS[kind], "bnb_4bit_quant_type"}:
        raise ValueError(
            f"quantization_config.{min(others)}: a rank that quantizes its own tensors takes "
            f"{', '.join(KINDS[kind])}: leave it out"
        )
    return kind, {name: getattr(config, name) for name in KINDS[kind] if getattr(config, name) is not None}


def _check(kind: str, options: Mapping[str, Any]) -> None:
    if kind not in KINDS:
        raise ValueError(f"quantize={kind}: write one of {', '.join(KINDS)}")
    for name in options:
        if name not in KINDS[kind]:
            raise ValueError(
                f"quantize_options.{name} does not go with quantize={kind}, which takes "
                f"{', '.join(KINDS[kind])}{did_you_mean(name, KINDS[kind])}"
            )
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"quantize={kind}, but the package is not installed: pip install 'zbpp[quantize]'")


def _bitsandbytes() -> Any:
    return importlib.import_module("bitsandbytes.nn")


def quantized_layers(model: nn.Module) -> Iterator[Any]:
    """The layers of bitsandbytes in a model."""
    kinds = _bitsandbytes().Linear4bit, _bitsandbytes().Linear8bitLt
    return (each for each in model.modules() if isinstance(each, kinds))


def statistics(model: nn.Module) -> Iterator[Tensor]:
    """What quantized layers hold on this rank beside their weights; a tensor may come twice."""
    if "bitsandbytes" not in sys.modules:  # then there are no such layers
        return
    for layer in quantized_layers(model):
        state = getattr(layer.weight, "quant_state", None)
        for owner in (layer.weight, getattr(layer, "state", None), state, getattr(state, "state2", None)):
            if owner is not None:
                yield from (each for each in vars(owner).values() if isinstance(each, Tensor))


def quantization_states(model: nn.Module) -> Iterator[Any]:
    """bitsandbytes's account of each weight of 4 bits."""
    states = (getattr(layer.weight, "quant_state", None) for layer in quantized_layers(model))
    return (each for each in states if each is not None)


def transposed_layers(model: nn.Module) -> list[str]:
    """The names of quantized layers whose weights are transposed: those that were Conv1D (gpt2)."""
    kind = importlib.import_module("transformers.pytorch_utils").Conv1D
    layers = set(quantized_layers(model))
    return [name for name, each in model.named_modules() if each in layers and each.source_cls is kind]


def _apply_to_8_bits(layer: Any, function: Any, recurse: bool = True) -> Any:
    """`nn.Module._apply`: the statistics, which are no buffers, follow the weight to its device."""
    nn.Module._apply(layer, function, recurse)
    for owner in (layer.weight, layer.state):
        if owner.CB is not None:
            owner.CB, owner.SCB = layer.weight.data, owner.SCB.to(layer.weight.device)
    return layer


def _trained(stage: nn.Module) -> set[str]:
    return {name for name, each in stage.named_parameters() if each.requires_grad}


def _save_trained(stage: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave the base out of a state_dict: it is in the folder."""
    trained = {f"{prefix}{name}" for name in _trained(stage)}
    for name in [each for each in state if each.startswith(prefix) and each not in trained]:
        del state[name]


def _need_trained(stage: nn.Module, keys: Any) -> None:
    """Miss nothing of the base in a state_dict that is loaded."""
    trained = _trained(stage)
    keys.missing_keys[:] = [name for name in keys.missing_keys if name in trained]


# ---- Layers without values: bitsandbytes can't make its weights of fake tensors.


def _leave_empty(layer: Any, config: Any) -> None:
    (rows, columns), is_int8 = layer.weight.shape, config.load_in_8bit
    blocks = -(-rows * columns // _BLOCK)
    packed = torch.empty(rows, columns, dtype=torch.int8)
    num_bytes = 4 * rows
    if not is_int8:
        packed = torch.empty(-(-rows * columns // 2), 1, dtype=torch.uint8)
        num_bytes = blocks + 4 * -(-blocks // 256) if config.bnb_4bit_use_double_quant else 4 * blocks
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.weight.quant_type = config.bnb_4bit_quant_type  # peft asks for it, and for the next
    layer.weight.compress_statistics = config.bnb_4bit_use_double_quant
    layer.register_buffer("statistics", torch.empty(num_bytes, dtype=torch.uint8), persistent=False)
    vars(layer).pop("_apply", None)
    # peft's DoRA dequantizes a weight: with these two names the layer does that itself.
    vars(layer)["W_q"], layer.dequantize = layer.weight, lambda: torch.empty(rows, columns)
    product: Any = _EmptyProduct
    layer.forward = lambda x: product.apply(x, (rows, columns), layer.bias, is_int8)


class _EmptyProduct(torch.autograd.Function):
    """The memory of bitsandbytes's products: a dequantized weight for a moment; of 8 bits also the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], bias: Tensor | None, keeps_x: bool) -> Tensor:
        ctx.shape, ctx.kept = shape, x if keeps_x else None
        return nn.functional.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad @ grad.new_empty(ctx.shape), None, None, None


class QuantizedInParts(TorchDispatchMode):
    """Within it a large weight is quantized some rows at a time, to the same values.

    At once the CPU's kernels would take three times the memory of a weight.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) not in _BY_ROWS:
            return function(*args, **(kwargs or {}))
        weight, *options = args
        if weight.numel() <= _AT_ONCE or weight[0].numel() % _BLOCK:
            return function(*args, **(kwargs or {}))
        parts = weight.split(max(1, _AT_ONCE // weight[0].numel()))
        found = [function(each, *options, **(kwargs or {})) for each in parts]
        values, statistics, *rest = zip(*found, strict=True)
        return (torch.cat(values), torch.cat(statistics), *(each[0] for each in rest))


_BY_ROWS = ("bitsandbytes.quantize_4bit.default", "bitsandbytes.int8_vectorwise_quant.default")
_BLOCK = 64  # numbers that share a statistic, in one of 4 bits
