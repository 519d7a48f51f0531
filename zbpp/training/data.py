"""Old import paths of what is now in zbpp/data/: the configs of older runs name them."""

from zbpp.data import Batches, Data, RandomRegression, regression_data, text_data

__all__ = ["Batches", "Data", "RandomRegression", "regression_data", "text_data"]
