"""A folder of safetensors as `save_pretrained` writes it, and a stage's own tensors read from it.

A folder may use other names than the library's model, or another layout: one tensor per expert, where the
library has all experts in one tensor. The library converts and loads them. It is first tried on the meta
device, so that a tensor that is missing, left over or of another shape is found before any value is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zbpp.models.hf.quantize import QuantizedInParts, shape_of_packed, weight_of
from zbpp.models.hf.ties import aliases_of, assign

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHOWN = 5  # names in an error


class FolderWeights:
    """The weights that a folder holds for `model`, which is on the meta device and whose weights are tied.

    is_strict: whether missing and left-over tensors are refused. Raises ValueError for them, for shapes that
    differ from the model's, and for files that can't be read.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, *, is_strict: bool = True) -> None:
        self._folder, self._aliases = folder, aliases_of(model)
        expected: dict[str, Tensor] = model.state_dict()
        shapes, self._statistics = _shapes(_opened(folder))
        self._targets = _targets(shapes, model, expected)
        on_meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        found = _loaded(model, on_meta, torch.float32, "meta")
        for name, error in found.conversion_errors.items():
            raise ValueError(f"path={folder}: {name} can't be made of the files: {error.splitlines()[-1]}")
        if found.mismatched_keys:
            name, in_files, by_config = min(found.mismatched_keys)
            raise ValueError(
                f"path={folder}: {name} is {list(in_files)} in the files, and {list(by_config)} by "
                "config.json: write the config.json of these weights"
            )
        self._provided = expected.keys() - found.missing_keys
        found.missing_keys = {name for name in expected if not self.holds(name)}
        model._adjust_missing_and_unexpected_keys(found)  # names that the family lets be absent or extra
        self.missing, self.surplus = sorted(found.missing_keys), sorted(found.unexpected_keys)
        if is_strict and (self.missing or self.surplus):
            _refuse(folder, model, self.missing, self.surplus)

    def holds(self, name: str) -> bool:
        """Whether the folder has values for this tensor, under this name or one that is tied to it."""
        return bool(self._givers(name))

    def load(
        self, model: PreTrainedModel, names: Collection[str], dtype: torch.dtype, quantizer: Any = None
    ) -> None:
        """Read the tensors of these names into an untied model; nothing else is read.

        Names that a tie joins get one Parameter. quantizer: the library's; it quantizes each tensor once it
        is read, or reads a quantized one with its statistics. Raises ValueError if the files hold different
        values for the names of a tie.
        """
        files = _opened(self._folder)
        givers = {name: self._givers(name) for name in names}
        for each in givers.values():
            self._check_equal(each, files)
        read = {each[0] for each in givers.values()}
        before = dict(model.named_parameters(remove_duplicate=False))
        own = [name for name, target in self._targets.items() if target in read]
        tensors = {each: files[each] for name in own for each in (name, *self._statistics.get(name, ()))}
        _loaded(model, tensors, dtype, "cpu", quantizer)
        for name, parameter in before.items():
            loaded = model.get_parameter(name)
            if not parameter.requires_grad:
                loaded.requires_grad_(False)
            if type(loaded) is nn.Parameter:  # beside quantized tensors the library leaves the file's dtype
                loaded.data = loaded.data.to(parameter.dtype)
        for name, (giver, *_) in givers.items():
            if name != giver:
                assign(model, name, model.get_parameter(giver))
        for giver in read.difference(names):
            assign(model, giver, before[giver])

    def _givers(self, name: str) -> list[str]:
        """The names of this tensor in the folder: one, or several if it is tied; the first is read."""
        source = self._aliases.get(name, name)
        tie = [source, *(alias for alias, other in self._aliases.items() if other == source)]
        return [each for each in tie if each in self._provided]

    def _check_equal(self, givers: list[str], files: Mapping[str, Any]) -> None:
        names = {target: name for name, target in self._targets.items()}
        for other in givers[1:]:
            if not torch.equal(files[names[givers[0]]][...], files[names[other]][...]):
                raise ValueError(
                    f"path={self._folder}: config.json ties {other} to {givers[0]}, but the files hold "
                    "different values for them: write tie_word_embeddings=false in config.json"
                )


def _opened(folder: Path) -> dict[str, Any]:
    """{name: a tensor of the files, of which nothing is read yet}."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Any] = {}
    for path in _files_of(folder):
        try:
            # backend="pread": a mapped file would count as memory of this process
            file: Any = safe_open(path, framework="pt", device="cpu", backend="pread")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is no whole safetensors file ({error}): copy or download it again"
            ) from error
        found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    return found


def _shapes(files: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """{name: shape} of a folder's tensors, and {quantized weight: the names of its statistics}."""
    statistics: dict[str, list[str]] = {}
    for name in files:
        weight = weight_of(name)
        if weight is not None and weight in files:
            statistics.setdefault(weight, []).append(name)
    left_out = {name for names in statistics.values() for name in names}
    shapes = {name: each.get_shape() for name, each in files.items() if name not in left_out}
    for weight, names in statistics.items():
        for name in names:
            if ".quant_state." in name:
                shapes[weight] = shape_of_packed(files[name][...])
    return shapes, statistics


def _files_of(folder: Path) -> list[Path]:
    """The files of a folder with weights; a single one goes before an index."""
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.exists():
        raise ValueError(
            f"path={folder} has neither {_SINGLE} nor {_INDEX}: write a folder with weights (others are "
            "converted by AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)), or "
            f"config={folder / 'config.json'} instead of path to start from random ones"
        )
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _targets(names: Iterable[str], model: PreTrainedModel, expected: dict[str, Tensor]) -> dict[str, str]:
    """{name in the files: the tensor of the model that the library makes of it; of several the first}."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    converters = [each for each in table if isinstance(each, WeightConverter)]
    found: dict[str, str] = {}
    for name in names:
        target = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)[0]
        if target not in expected and name in expected:  # it has its final name already
            target = rename_source_key(name, [], [], model.base_model_prefix, expected)[0]
        found[name] = target
    return found


def _loaded(
    model: PreTrainedModel,
    tensors: Mapping[str, Any],
    dtype: torch.dtype,
    device: str,
    quantizer: Any = None,
) -> Any:
    """Let the library convert tensors of files, and set them in a model; its account of them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    given = {"hf_quantizer": quantizer} if quantizer is not None and quantizer.pre_quantized else {}
    table: Any = get_model_conversion_mapping(model, **given)
    for each in table:
        if hasattr(each, "force_cpu"):  # it would take values out of meta tensors
            each.force_cpu = False
    options = LoadStateDictConfig(
        dtype=dtype, device_map={"": device}, weight_mapping=table, hf_quantizer=quantizer
    )
    in_parts: AbstractContextManager[Any] = QuantizedInParts() if quantizer else nullcontext()  # type: ignore[no-untyped-call]  # torch's
    with _one_after_the_other(), in_parts:
        return convert_and_load_state_dict_in_model(model, dict(tensors), options)[0]


@contextmanager
def _one_after_the_other() -> Iterator[None]:
    """Inside, the library reads one tensor at a time (threads would read ahead) and draws no progress bar."""
    from transformers.utils import logging

    library: Any = logging
    was_drawn, name = library.is_progress_bar_enabled(), "HF_DEACTIVATE_ASYNC_LOAD"
    given = os.environ.get(name)
    library.disable_progress_bar()
    os.environ[name] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]
        else:
            os.environ[name] = given
        if was_drawn:
            library.enable_progress_bar()


def _refuse(folder: Path, model: nn.Module, missing: list[str], surplus: list[str]) -> None:
    what = [f"lacks {len(missing)} tensors of the model ({_listed(missing)})"] if missing else []
    what += [f"has {len(surplus)} that the model does not ({_listed(surplus)})"] if surplus else []
    raise ValueError(
        f"path={folder}: for {type(model).__name__}, the folder {' and '.join(what)}: write the config.json "
        "of these weights, or strict=false to start missing ones from random values and to leave out others"
    )


def _listed(names: Iterable[str]) -> str:
    first = list(names)
    more = f", and {len(first) - _SHOWN} more" if len(first) > _SHOWN else ""
    return ", ".join(first[:_SHOWN]) + more
