"""Batches to train on: text, prepared tokens, a user's own data.

    source       `Data`: batches by number, and facts about them
    batch        the forms that a batch may have, and its parts

    corpus       text or tokens from files
    windows      cuts a sequence of tokens into samples, in an order that is computed
    permutation  computes that order
    text         batches of such samples; `text_data`

    prepare      makes a folder of tokens from text (documents: the texts; encoding: their tokens)
    prepared     reads such a folder, mapped
    tokens       batches from one such folder, or from several (mixture: in fixed shares); `token_data`

    chat         conversations with a loss mask (chat_tokenizer: their tokenizer)
    loader       a user's own Dataset (dataset), DataLoader or list of batches; `loaded_data`
    regression   random regression
    read_ahead   reads the next batches in a thread
    special_tokens  BOS and EOS of a tokenizer, for sampling

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
