"""The objects that config nodes name by `_target_`: a user's mistake in a node becomes one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from zbpp.error_text import did_you_mean
from zbpp.ranges import ConfigError
from zbpp.signatures import check_arguments, names_of

_OF_HYDRA = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
_MISTAKES = (ValueError, OSError, TypeError, ImportError, InstantiationException)


def instantiate_node(part: str, node: Mapping[str, Any], **extra: Any) -> Any:
    """Call what the node's `_target_` names, with the node's other keys; nodes inside it are made first.

    part: how errors call the node, "model" or "data". extra: further arguments; those that the target does
    not take are left out. Raises ConfigError; what the target's own code raises beside ValueError, OSError,
    TypeError and ImportError is a bug, and stays as it is.
    """
    found = check_node(part, node)
    target = node["_target_"]
    try:
        further = _accepted(found, extra)
        return instantiate(dict(node), **further, _convert_="all")
    except ConfigError:
        raise
    except InstantiationException as error:
        cause = error.__cause__ or error
        if not isinstance(cause, _MISTAKES):
            raise cause from None
        raise ConfigError(f"{part} ({target}): {' '.join(str(cause).split())}") from cause
    except _MISTAKES as error:
        raise ConfigError(f"{part} ({target}): {' '.join(str(error).split())}") from error


def check_node(part: str, node: Mapping[str, Any]) -> Any:
    """What the node's `_target_` names, which is not called. Raises ConfigError if it takes not all keys.

    Nodes inside the node are checked, too.
    """
    target = node.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(f"{part} names no _target_: write the class, such as _target_: my_package.MyModel")
    try:
        found = resolve_name(target)
    except AttributeError as error:
        near = did_you_mean(str(error.name), dir(error.obj))
        raise ConfigError(f"{part} ({target}): {error}{near}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"{part} ({target}): {no_module(str(error.name))}") from error
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{part} ({target}): {error}") from error
    keys = [key for key in map(str, node) if key not in _OF_HYDRA]
    check_arguments(part, found, keys)
    if node.get("_recursive_", True):
        for key in keys:
            _check_inside(f"{part}.{key}", node[key])
    return found


def no_module(name: str) -> str:
    """A message for a module that Python does not find, with the nearest file of the current folder."""
    near = did_you_mean(name, [each.stem for each in Path().glob("*.py")])
    return f"there is no module {name}{near or ', neither installed nor in the current folder'}"


def _check_inside(part: str, value: Any) -> None:
    if isinstance(value, Mapping):
        if "_target_" in value:
            check_node(part, value)
        else:
            for key, each in value.items():
                _check_inside(f"{part}.{key}", each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, each in enumerate(value):
            _check_inside(f"{part}[{number}]", each)


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


def _accepted(found: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """The arguments in `extra` that a class or function takes: a torch Dataset takes no batch_size."""
    known = names_of(found)
    return {name: value for name, value in extra.items() if known is None or name in known}


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Turn a ValueError or OSError raised inside into a ConfigError that names the part of the config."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"{part}: {error}") from error
