"""Batches to train on: text, prepared tokens, a user's own data.

    source       `Data`, what a trainer reads
    batch        what a batch may be, and its parts
    corpus       text or tokens from files
    windows      a sequence of tokens in windows, in an order that is computed
    permutation  that order
    text         batches of windows; `text_data`
    prepared     tokens in a folder, mapped
    prepare      text to such a folder: documents, encoding
    tokens       batches of them; mixture: of several such folders
    regression   random regression
    read_ahead   the next batches, by a thread
    special_tokens  BOS and EOS of a tokenizer, for sampling
    loader       a user's own Dataset, DataLoader or list of batches

The names are loaded when they are first used: preparing tokens imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbpp.data.batch import Source
    from zbpp.data.loader import loaded_data
    from zbpp.data.regression import RandomRegression, regression_data
    from zbpp.data.source import Data
    from zbpp.data.text import Batches, text_data
    from zbpp.data.tokens import token_data

_HOME = {
    "Batches": "text",
    "Data": "source",
    "RandomRegression": "regression",
    "Source": "batch",
    "loaded_data": "loader",
    "regression_data": "regression",
    "text_data": "text",
    "token_data": "tokens",
}

__all__ = [
    "Batches",
    "Data",
    "RandomRegression",
    "Source",
    "loaded_data",
    "regression_data",
    "text_data",
    "token_data",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zbpp.data' has no attribute {name!r}")
    value = getattr(import_module(f"zbpp.data.{_HOME[name]}"), name)
    globals()[name] = value  # the next look-up is a plain one
    return value
