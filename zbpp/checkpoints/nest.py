"""A nest of dicts, lists and tuples as JSON, with its tensors apart.

JSON, not pickle: nothing that is read back can run code.

    {"step": tensor(3.), "betas": (.9, .99)}
    {"dict": [["step", {"tensor": "adam.step"}], ["betas", {"tuple": [0.9, 0.99]}]]}   and   {"adam.step": tensor(3.)}
"""  # noqa: E501  # a nest and its JSON, each on one line

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NAMES = {kind: name for name, kind in _DICTS.items()}


def encoded(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """The nest as JSON; its tensors are added to `tensors`, under keys that begin with `key`.

    Raises ValueError for any other object.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, dict):
        pairs = [[encoded(k, key, tensors), encoded(v, f"{key}.{k}", tensors)] for k, v in value.items()]
        return {_NAMES.get(type(value), "dict"): pairs}
    if isinstance(value, list | tuple):
        entries = [encoded(each, f"{key}.{number}", tensors) for number, each in enumerate(value)]
        return entries if isinstance(value, list) else {"tuple": entries}
    raise ValueError(
        f"{key} is a {type(value).__name__}, and a checkpoint holds tensors, numbers, texts, and dicts, "
        "lists and tuples of them: let state_dict() return these"
    )


def decoded(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The nest that was encoded. tensor(key): returns what to put in a tensor's place."""
    if isinstance(value, list):
        return [decoded(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "tuple":
        return tuple(decoded(each, tensor) for each in content)
    return _DICTS[kind]({decoded(k, tensor): decoded(v, tensor) for k, v in content})


def tensor_keys(value: Any) -> list[str]:
    """The keys of all tensors in an encoded nest."""
    found: list[str] = []
    decoded(value, found.append)
    return found
