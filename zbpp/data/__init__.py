"""Batches to train on: text, prepared tokens, a user's own data.

source       `Data`, what a trainer reads
batch        what a batch may be, and its parts
corpus       text or tokens from files
text         windows of a corpus
regression   random regression
loader       a user's own Dataset, DataLoader or list of batches
"""

from zbpp.data.batch import Source
from zbpp.data.loader import loaded_data
from zbpp.data.regression import RandomRegression, regression_data
from zbpp.data.source import Data
from zbpp.data.text import Batches, text_data

__all__ = ["Batches", "Data", "RandomRegression", "Source", "loaded_data", "regression_data", "text_data"]
