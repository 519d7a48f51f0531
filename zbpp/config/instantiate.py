"""The objects that config nodes name by `_target_`: a user's mistake in a node becomes one line."""

from __future__ import annotations

import difflib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate

from zbpp.ranges import ConfigError


def instantiate_node(part: str, node: dict[str, Any], **extra: Any) -> Any:
    """Call what the node's `_target_` names, with the node's other keys.

    part: how errors call the node, "model" or "data". extra: further arguments; those that the target does
    not take are left out. Raises ConfigError.
    """
    if "_target_" not in node:
        raise ConfigError(f"{part} names no _target_: write the class, such as _target_: my_package.MyModel")
    try:
        return instantiate(node, **_accepted(node, extra), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if not isinstance(cause, ValueError | OSError | TypeError | ImportError | HydraException):
            raise  # a bug in the class's own code: its traceback says where
        message = _missing_name(str(node["_target_"])) or " ".join(str(cause).split())
        raise ConfigError(f"{part} ({node['_target_']}): {message}") from cause


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


def _accepted(node: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The arguments in `extra` that the node's target takes: a torch Dataset takes no batch_size."""
    try:
        parameters = inspect.signature(pkgutil.resolve_name(node["_target_"])).parameters
    except Exception:  # there is no such target, or its file can't be imported: instantiate says so
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
