"""The tensors of a folder under the names of the library's model, and a stage's own tensors read from it.

A folder may use other names than the library's model, or another layout: one tensor per expert, where the
library has all experts in one tensor. The library's table of renamings and conversions
(`transformers.conversion_mapping`) is used here, one tensor of the model at a time. All conversions are first
tried on the meta device. So a tensor that is missing, left over or of another shape is found before any value
is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zbpp.models.hf.files import WeightFiles
from zbpp.models.hf.ties import aliases_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 5  # names in an error


@dataclass
class _Group:
    """Tensors of the files that together become one tensor of the model, or several.

    target: the tensor's name in the model. sources: (name in the files, the converter's pattern for it, or
    None). converter: the library's; None: the tensor is only renamed. results: the names after conversion.
    """

    target: str
    sources: list[tuple[str, str | None]] = field(default_factory=list)
    converter: Any = None
    results: set[str] = field(default_factory=set)


class FolderWeights:
    """The weights that a folder holds for `model`, which is on the meta device and whose weights are tied.

    is_strict: whether missing and left-over tensors are refused. Raises ValueError for them, and for shapes
    that differ from the model's.
    """

    def __init__(self, files: WeightFiles, model: PreTrainedModel, *, is_strict: bool = True) -> None:
        self._files, self._aliases = files, aliases_of(model)
        expected: dict[str, Tensor] = model.state_dict()
        self._groups, unknown = _groups(files, model, expected)
        shapes = self._tried(model)
        unknown |= shapes.keys() - expected.keys()
        self._provided = shapes.keys() & expected.keys()
        missing = {name for name in expected if not self._givers(name)}
        reported: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=unknown)
        model._adjust_missing_and_unexpected_keys(reported)  # names that the family lets be absent or extra
        self.missing, self.surplus = sorted(reported.missing_keys), sorted(reported.unexpected_keys)
        if is_strict and (self.missing or self.surplus):
            _refuse(files, model, self.missing, self.surplus)
        for name in sorted(self._provided):
            if shapes[name] != expected[name].shape:
                raise ValueError(
                    f"path={files.folder}: {name} is {list(shapes[name])} in the files, and "
                    f"{list(expected[name].shape)} by config.json: write the config.json of these weights"
                )

    def holds(self, name: str) -> bool:
        """Whether the folder has values for this tensor, under this name or one that is tied to it."""
        return bool(self._givers(name))

    def load(self, model: PreTrainedModel, names: Collection[str], dtype: torch.dtype) -> None:
        """Read the tensors of these names into an untied model; nothing else is read.

        Names that a tie joins get one Parameter. Raises ValueError if the files hold different values for
        the names of a tie.
        """
        wanted: dict[str, list[str]] = {}
        for name in names:
            givers = self._givers(name)
            self._check_equal(givers)
            wanted.setdefault(givers[0], []).append(name)
        for group in self._groups:
            if not group.results & wanted.keys():
                continue
            read = {name: partial(self._files.read, name, dtype) for name, _ in group.sources}
            for name, value in _converted(group, model, read).items():
                _assign(model, wanted.get(name, ()), value)

    def _givers(self, name: str) -> list[str]:
        """The names of this tensor in the folder: one, or several if it is tied; the first is read."""
        source = self._aliases.get(name, name)
        tie = [source, *(alias for alias, other in self._aliases.items() if other == source)]
        return [each for each in tie if each in self._provided]

    def _tried(self, model: PreTrainedModel) -> dict[str, torch.Size]:
        """{name: shape} of all tensors that the conversions give, computed on the meta device."""
        entries, shapes = self._files.entries, {}
        for group in self._groups:
            on_meta = {
                name: torch.empty(entries[name].shape, dtype=entries[name].dtype, device="meta")
                for name, _ in group.sources
            }
            values = _converted(group, model, on_meta)
            group.results = set(values)
            shapes.update({name: value.shape for name, value in values.items()})
        return shapes

    def _check_equal(self, givers: list[str]) -> None:
        plain = {group.target: group.sources[0][0] for group in self._groups if group.converter is None}
        for other in givers[1:]:
            both = [plain[name] for name in (givers[0], other) if name in plain]
            if len(both) == 2 and not torch.equal(*map(self._files.read, both)):
                raise ValueError(
                    f"path={self._files.folder}: config.json ties {other} to {givers[0]}, but the files hold "
                    "different values for them: write tie_word_embeddings=false in config.json"
                )


def _groups(
    files: WeightFiles, model: PreTrainedModel, expected: dict[str, Tensor]
) -> tuple[list[_Group], set[str]]:
    """(the groups, the names of tensors that the model does not have)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    table = get_model_conversion_mapping(model)
    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    converters = [each for each in table if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, found, unknown = model.base_model_prefix, dict[str, _Group](), set[str]()
    for name in sorted(files.entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:  # it has its final name already
            target, pattern = rename_source_key(name, [], [], prefix, expected)
        if target not in expected:
            unknown.add(target)
            continue
        group = found.setdefault(target, _Group(target))
        group.sources.append((name, pattern))
        if pattern is not None:
            group.converter = by_pattern[pattern]
    return list(found.values()), unknown


def _converted(
    group: _Group, model: PreTrainedModel, tensors: Mapping[str, Tensor | Callable[[], Tensor]]
) -> dict[str, Tensor]:
    """{name in the model: value}. tensors: {name in the files: value, or a function that reads it}."""
    if group.converter is None:
        given = tensors[group.sources[0][0]]
        return {group.target: given if isinstance(given, Tensor) else given()}
    converter = deepcopy(group.converter)
    for name, pattern in group.sources:
        converter.add_tensor(group.target, name, pattern or name, tensors[name])
    try:
        found = converter.convert(group.target, model=model, config=model.config)
    except Exception as error:  # whatever the library's conversion may raise
        raise ValueError(
            f"{group.target} can't be made of {_listed(name for name, _ in group.sources)}: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def _assign(model: nn.Module, names: Iterable[str], value: Tensor) -> None:
    """Set these parameters to one Parameter with this value; a buffer gets the value itself."""
    made: Tensor | None = None
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = value
            continue
        if made is None:
            trains = module.get_parameter(leaf).requires_grad and value.is_floating_point()
            made = nn.Parameter(value, requires_grad=trains)
        module._parameters[leaf] = made  # type: ignore[assignment]  # a Parameter


def _refuse(files: WeightFiles, model: nn.Module, missing: list[str], surplus: list[str]) -> None:
    what = [f"lacks {len(missing)} tensors of the model ({_listed(missing)})"] if missing else []
    what += [f"has {len(surplus)} that the model does not ({_listed(surplus)})"] if surplus else []
    raise ValueError(
        f"path={files.folder}: for {type(model).__name__}, the folder {' and '.join(what)}: write the "
        "config.json of these weights, or strict=false to start missing ones from random values and to leave "
        "out others"
    )


def _listed(names: Iterable[str]) -> str:
    first = list(names)
    more = f", and {len(first) - _SHOWN} more" if len(first) > _SHOWN else ""
    return ", ".join(first[:_SHOWN]) + more
