"""Bounds on a YAML file: a few lines with aliases can stand for a billion values."""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from zbpp.ranges import ConfigError

_BYTES = 2**18
_VALUES = 100_000
_DEPTH = 50


def check_yaml(path: Path) -> None:
    """Raise ConfigError for a file that is too large, nested too deep, or too large with its aliases."""
    advice = "no config is like that: write another file"
    try:
        if path.stat().st_size > _BYTES:
            raise ConfigError(f"{path} has more than {_BYTES:,} bytes, and {advice}")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text, at byte {error.start}: write another file") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror})") from None
    if max(_depths(text)) > _DEPTH:
        raise ConfigError(f"{path} is nested too deep, and {advice}")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        size = 0 if root is None else _size(root, {})
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} can't be read ({' '.join(str(error).split())[:300]})") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep, and {advice}") from None
    if size > _VALUES:
        raise ConfigError(f"{path} has aliases (*name) that stand for too many values, and {advice}")


def _depths(text: str) -> list[int]:
    """How deep brackets are nested, and how far lines are indented: yaml takes a stack frame for each."""
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth = max(0, depth - 1)
    dashes = max((len(line) - len(line.lstrip("- ?")) for line in text.splitlines()), default=0)
    return [deepest, dashes // 2]


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for, with each alias counted as what it repeats."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = _VALUES + 1  # until it is known: a node inside itself has no end
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = list(node.value)
    elif isinstance(node, yaml.MappingNode):
        children = [each for pair in node.value for each in pair]
    known[id(node)] = 1 + sum(_size(each, known) for each in children)
    return known[id(node)]
