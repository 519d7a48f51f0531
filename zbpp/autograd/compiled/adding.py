"""The operations of W's graph that add to a gradient as the eager W does: ../adding.py in a graph.

    zbpp::add_product_   total += left @ right, where total is wider than the factors
    zbpp::add_rows_      total[tokens[i]] += rows[i]; transposed: the columns of total

For Inductor they are calls that change their first argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zbpp.autograd import adding

_library = torch.library.Library("zbpp", "FRAGMENT")
_library.define("add_product_(Tensor(a!) total, Tensor left, Tensor right) -> ()")
_library.define("add_rows_(Tensor(a!) total, Tensor rows, Tensor tokens, int padding, bool transposed) -> ()")

ADD_PRODUCT = torch.ops.zbpp.add_product_.default
ADD_ROWS = torch.ops.zbpp.add_rows_.default


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    adding.add_product(total, left, right, False)


def _add_rows(total: Tensor, rows: Tensor, tokens: Tensor, padding: int, transposed: bool) -> None:
    adding.add_rows(total.mT if transposed else total, tokens, rows, padding)


def _nothing(*args: object) -> None:
    """For tensors without numbers."""


for _name, _function in (("add_product_", _add_product), ("add_rows_", _add_rows)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    _library.impl(_name, _nothing, "Meta")
