"""Help on the keys of a choice, such as those of model=huggingface: from its YAML file and from its class.

The help on a key is the comment on the key's line in the file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from omegaconf import OmegaConf

from zbpp.config.folder import config_folder


def choice_help(group: str, given: Sequence[str]) -> list[str]:
    """Lines on the choice that the arguments make from a group; [] if they make none."""
    chosen = {argument.partition("=")[0]: argument.partition("=")[2] for argument in given}
    name, target = chosen.get(group), chosen.get(f"{group}._target_")
    file = next((each for each in _files(group, name, chosen, given) if each.is_file()), None)
    if file is None and target is None:
        return []
    text = "" if file is None else file.read_text()
    about = re.findall(r"^# (.*)$", text, flags=re.M)
    values: Any = {} if file is None else OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    target = target or values.get("_target_")
    comments = dict(re.findall(r"^ *(\w+):.*?\s# ?(.*)$", text, flags=re.M))
    shown = [
        (key, _as_typed(value), comments.get(key.rpartition(".")[2], "")) for key, value in _leaves(values)
    ]
    known = {key.partition(".")[0] for key, *_ in shown}
    further = [(f"{key}", default, "") for key, default in _arguments(target) if key not in known]
    lines = [_line(f"{group}.{key}={value}", comment) for key, value, comment in shown if key != "_target_"]
    lines += [_line(f"{'' if file is None else '+'}{group}.{key}={value}", "") for key, value, _ in further]
    return [f"Keys of {group}={name or target}:", "", *(f"  {each}" for each in about), *lines, ""]


def _files(group: str, name: str | None, chosen: dict[str, str], given: Sequence[str]) -> Iterator[Path]:
    """Where the file of a choice may be."""
    folders = [config_folder(), *(Path(chosen[each]) for each in _OPTIONS if each in chosen)]
    folders += [Path(after) for each, after in pairwise(given) if each in _OPTIONS]
    for folder in folders:
        if name:
            yield folder / group / f"{name}.yaml"


_OPTIONS = ("--config-dir", "-cd")
_FROM_THE_RUN = ("batch_size", "is_read", "seed")  # arguments that need no key


def _arguments(target: str | None) -> Iterator[tuple[str, str]]:
    """(name, default) of the arguments of a class or function; none if it can't be found."""
    parameters: list[inspect.Parameter] = []
    with suppress(Exception):  # a user's module may raise anything; the run says what is wrong
        parameters = [*inspect.signature(resolve_name(str(target))).parameters.values()]
    for each in parameters:
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and each.name not in _FROM_THE_RUN:
            yield each.name, "???" if each.default is each.empty else _as_typed(each.default)


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _as_typed(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _line(setting: str, comment: str) -> str:
    return f"  {setting:<34} {comment}".rstrip()
