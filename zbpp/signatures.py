"""The keys of a config node against the signature of the class or function that gets them as arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zbpp.error_text import did_you_mean
from zbpp.ranges import ConfigError


def names_of(found: Callable[..., Any]) -> list[str] | None:
    """The arguments that may be given by name; None if any may, or if Python does not know them."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (ValueError, TypeError):
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def check_arguments(
    part: str,
    found: Callable[..., Any],
    given: Iterable[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ConfigError for a name that `found` does not take; the message has the nearest name.

    part: the config node. elsewhere: names in other libraries -> the name here.
    """
    known = names_of(found)
    if known is None:
        return
    for name in given:
        if name not in known:
            raise ConfigError(not_taken(part, found, name, known, elsewhere))


def not_taken(
    part: str,
    found: Callable[..., Any],
    name: str,
    known: Sequence[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """That `found` does not take an argument, with the nearest one of those that it takes."""
    if name in elsewhere:
        hint = f"; did you mean {part}.{elsewhere[name]}?"
    else:
        hint = did_you_mean(name, known, f"{part}.") or f"; it takes {', '.join(known)}"
    return f"{part}.{name}: {found.__name__} has no argument {name}{hint}"
