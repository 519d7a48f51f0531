"""The split backward of embeddings: rows added where they belong, no table-sized temporary."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.cases import embeddings as cases
from helpers.cases.embeddings import VOCABULARY
from helpers.split import double, output_grads
from zbpp import backward_input


@pytest.mark.parametrize("shape", [(), (5,), (2, 5), (2, 3, 5), (0,)])
def test_an_embedding_is_deferred(shape):
    facts = cases.embedding(shape).compare()
    assert facts.deferred == {"weight"}


@pytest.mark.parametrize("padding", [0, 3, VOCABULARY - 1, -1, -VOCABULARY])
def test_the_row_of_the_padding_gets_nothing(padding):
    facts = cases.embedding_with_padding(padding).compare()
    assert facts.deferred == {"weight"}
    assert facts.grads["weight"][padding].abs().max() == 0
    assert (facts.grads["weight"] != 0).any(1).sum() == VOCABULARY - 1


def test_tokens_that_repeat_add_up():
    facts = cases.embedding_of_repeated_tokens().compare()
    assert (facts.grads["weight"] != 0).any(1).sum() == 2


def test_two_tables_may_share_their_indices():
    assert cases.two_tables_with_the_same_indices().compare().deferred == {"first.weight", "second.weight"}


def test_one_table_may_be_looked_up_twice():
    assert cases.table_used_twice().compare().deferred == {"weight"}


def test_counts_of_tokens_are_left_to_b():
    facts = cases.embedding_scaled_by_frequency().compare()
    assert facts.computed == {"weight"}


def test_a_sparse_gradient_is_left_to_b_and_stays_sparse():
    facts = cases.embedding_with_sparse_gradient().compare()
    assert facts.computed == {"weight"}
    assert facts.grads["weight"].is_sparse


def test_max_norm_renormalises_in_the_forward_only():
    facts = cases.embedding_with_max_norm().compare()
    assert facts.deferred == {"weight"}


def test_a_bag_of_embeddings_is_right():
    cases.embedding_bag().compare()


def test_indices_of_a_leaf_are_right():
    """w[i] is no embedding for autograd."""
    cases.indexed_leaf().compare()


def test_the_second_microbatch_allocates_nothing_the_size_of_the_table():
    """W adds rows to the gradient that is there; plain autograd makes a table per microbatch."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.data_ptr() != weight.grad.data_ptr():
                self.largest = max(self.largest, result.numel())
            return result

    embedding = nn.Embedding(1000, 4, padding_idx=0, dtype=torch.float64)
    weight = embedding.weight
    weight.grad = double(1000, 4)
    output = embedding(torch.arange(6))
    with Sizes() as sizes:
        _, weight_grads = backward_input(output, output_grads(output), ())
        weight_grads.accumulate()
    assert 0 < sizes.largest <= 24
