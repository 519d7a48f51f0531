"""The objects that config nodes name by `_target_`: a user's mistake in a node becomes one line."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from zbpp.ranges import ConfigError

_OWN_KEYS = (
    "_target_",
    "_args_",
    "_partial_",
    "_recursive_",
    "_convert_",
)  # as in Hydra; the last is ignored


def instantiate_node(part: str, node: Mapping[str, Any], **extra: Any) -> Any:
    """Call what the node's `_target_` names, with the node's other keys; nodes inside it are made first.

    part: how errors call the node, "model" or "data". extra: further arguments; those that the target does
    not take are left out. A text is never an interpolation here, unlike in Hydra's `instantiate`: a config
    that was checked stays as it was. Raises ConfigError.
    """
    if "_target_" not in node:
        raise ConfigError(f"{part} names no _target_: write the class, such as _target_: my_package.MyModel")
    target = node["_target_"]
    if not isinstance(target, str):
        raise ConfigError(f"{part}._target_={target!r}: write the name of a class, such as my_file.MyModel")
    given = {str(name): value for name, value in node.items() if name not in _OWN_KEYS}
    positional = list(node.get("_args_", ()))
    if node.get("_recursive_", True):
        given = {name: _made(f"{part}.{name}", value) for name, value in given.items()}
        positional = _made(f"{part}._args_", positional)
    try:
        found = resolve_name(target)
        arguments = {**given, **_accepted(found, extra)}
        if node.get("_partial_"):
            return partial(found, *positional, **arguments)
        return found(*positional, **arguments)
    except (ValueError, OSError, TypeError, ImportError, AttributeError) as error:
        message = _missing_name(target)
        if isinstance(error, AttributeError) and not message:
            raise  # a bug in the class's own code: its traceback says where
        message = message or " ".join(str(error).split()) + _passed_on(error, extra)
        raise ConfigError(f"{part} ({target}): {message}") from error


def _passed_on(error: Exception, extra: Mapping[str, Any]) -> str:
    """Where an argument came from that a class inside the target does not take."""
    refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if refused is None or refused[1] not in extra:
        return ""
    return f": zbpp passes {refused[1]} to a target that accepts it; accept it by name, and don't pass it on"


def _made(part: str, value: Any) -> Any:
    """The value with an object in place of each node that has a `_target_`."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return instantiate_node(part, value)
        return {name: _made(f"{part}.{name}", each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_made(f"{part}[{number}]", each) for number, each in enumerate(value)]
    return value


def partial_of_node(part: str, node: dict[str, Any]) -> Any:
    """What the node's `_target_` names, with the node's other keys, to be called with further arguments.

    The call raises ConfigError where the target raises a ValueError or TypeError, as for an unknown argument.
    """
    made = instantiate_node(part, {**node, "_partial_": True})

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return made(*args, **kwargs)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{part} ({node['_target_']}): {' '.join(str(error).split())}") from error

    return call


def _missing_name(target: str) -> str:
    """`my_file has no MyModle; it has MyModel`; nothing if the module was not imported or has the name."""
    module_name, _, name = target.rpartition(".")
    module = sys.modules.get(module_name)  # imported by now, if it can be
    if module is None or hasattr(module, name):
        return ""
    own = sorted(
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and callable(value) and _is_from(module, value)
    )
    near = difflib.get_close_matches(name, own, n=3)
    own = [*near, *(key for key in own if key not in near)]
    return f"{module_name} has no {name}" + (f"; it has {', '.join(own)}" if own else "")


def _is_from(module: ModuleType, value: Any) -> bool:
    """Whether a module defines the value, or, if it is a package, a class that a module below defines."""
    origin = str(getattr(value, "__module__", ""))
    if hasattr(module, "__path__") and inspect.isclass(value):
        return f"{origin}.".startswith(f"{module.__name__}.")
    return origin == module.__name__ and not hasattr(module, "__path__")


def _accepted(found: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """The arguments in `extra` that a class or function takes: a torch Dataset takes no batch_size."""
    try:
        parameters = inspect.signature(found).parameters
    except (ValueError, TypeError):  # no signature is known
        return extra
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in extra.items() if takes_any or name in parameters}


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Turn a ValueError or OSError raised inside into a ConfigError that names the part of the config."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"{part}: {error}") from error
