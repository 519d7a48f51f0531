"""What zbpp/data/ offers, under the names that it had here: configs of older runs hold them."""

from zbpp.data import Batches, Data, RandomRegression, regression_data, text_data

__all__ = ["Batches", "Data", "RandomRegression", "regression_data", "text_data"]
