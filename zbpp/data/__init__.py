"""Batches to train on: text, prepared tokens, conversations, a user's own data.

source       `Data`: batches by number, and facts about them; the forms that a batch may have

windows      cuts a sequence of tokens into samples, in an order that is computed
permutation  computes that order
text         batches of such samples; `text_data` from text files
prepare      makes a folder of tokens from text, by Hugging Face's `datasets`
prepared     reads such a folder, mapped
tokens       batches from one such folder, or from several in fixed shares; `token_data`
tokenizer    a tokenizer.json

sequences      sequences of different lengths by number; several as one microbatch, filled up or packed
token_batches  batches of about so many tokens, cut into microbatches that are as equal as they can be

chat           conversations with a loss mask
chat_template  a conversation as tokens, and which of them are learned
protocols      epoch, state and length of a source of batches, as each library asks for them
loader         a user's own Dataset, or anything that yields batches; `loaded_data`
regression     random regression
"""

from zbpp.data.loader import loaded_data
from zbpp.data.regression import RandomRegression, regression_data
from zbpp.data.source import Data, Source
from zbpp.data.text import Batches, text_data
from zbpp.data.tokens import token_data

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
