"""The classes and functions that any config may name by `_target_`, whoever wrote the config.

Making one of them runs no code but its own constructor, which reads files at most. A name is judged by what
it leads to: `torch.os.system` begins with torch, and is a function of os.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_PRIVATE = re.compile(r"(^|\.)_")
_KNOWN = ("zbpp", "torch", "optimi")
# Where names of known code begin. Importing one of these modules changes nothing.
_PREFIXES = ("zbpp.models.", "zbpp.data.", "torch.nn.", "torch.optim.", "torch.utils.data.", "optimi.")
_DATA = (
    "zbpp.data.text.text_data", "zbpp.data.tokens.token_data", "zbpp.data.regression.regression_data",
    "zbpp.data.chat.chat_data",
)  # fmt: skip
# Of a class: (where it is defined, the class that it derives from). zbpp's models derive from no class.
_KINDS = (
    ("torch.nn.modules.", "torch.nn:Module"),
    ("torch.optim.", "torch.optim:Optimizer"),
    ("torch.optim.", "torch.optim.lr_scheduler:LRScheduler"),
    ("torch.utils.data.dataset", "torch.utils.data:Dataset"),
    ("optimi.", "torch.optim:Optimizer"),
)


def is_known_name(target: object) -> bool:
    """Whether a name may lead to known code; `resolved` judges what it leads to. Imports nothing."""
    return (
        isinstance(target, str)
        and _NAME.fullmatch(target) is not None
        and not _PRIVATE.search(target)
        and target.startswith(_PREFIXES)
    )


def resolved(target: str) -> Any:
    """The class or function that a name leads to; its module is imported.

    Raises ImportError if there is none, and ValueError for code within torch, zbpp and optimi that is no
    model, layer, optimizer, scheduler or data: much of it writes files or runs code.
    """
    if not _NAME.fullmatch(target):
        raise ImportError(f"{target[:80]!r} is no name of a class, such as my_file.MyModel")
    first, *rest = target.split(".")
    found: Any = import_module(first)
    path = first
    for name in rest:
        path = f"{path}.{name}"
        if not hasattr(found, name) and inspect.ismodule(found):
            import_module(path)
        found = getattr(found, name)
    if first in _KNOWN and not _is_known(found):
        raise ValueError(
            "it is no model, layer, optimizer, scheduler or data, and no config may name other code of "
            f"{first}: name a function of yours that calls it, such as my_file.my_data"
        )
    return found


def _is_known(found: Any) -> bool:
    home, name = str(getattr(found, "__module__", "")), str(getattr(found, "__qualname__", ""))
    if f"{home}.{name}" in _DATA:
        return inspect.isfunction(found)
    if not inspect.isclass(found):
        return False
    if home.startswith("zbpp.models."):
        return hasattr(found, "build_stage") and hasattr(found, "loss")
    return any(f"{home}.".startswith(prefix) and issubclass(found, _named(base)) for prefix, base in _KINDS)


def _named(base: str) -> type:
    module, _, name = base.partition(":")
    kind: type = getattr(import_module(module), name)
    return kind
