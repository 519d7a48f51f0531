"""The split backward of matrix products with weights, however they are written."""

import pytest
import torch

from helpers.cases import products as cases
from helpers.cases.products import COMPLEX, OTHERS, PRODUCTS
from helpers.split import leaf

# ---------------------------------------------------------------- nn.Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 5, 4), (2, 3, 5, 4), (1, 4), (0, 4)])
def test_a_linear_layer_is_deferred_whatever_the_shape_of_its_input(shape, bias):
    facts = cases.linear_layer(shape, bias).compare()
    assert facts.deferred == ({"weight", "bias"} if bias else {"weight"})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make_input",
    [
        pytest.param(lambda: leaf(4, 5).t(), id="transposed"),
        pytest.param(lambda: leaf(4, 2, 5).permute(1, 2, 0), id="permuted"),
        pytest.param(lambda: leaf(10, 8)[::2, ::2], id="strided"),
        pytest.param(lambda: leaf(1, 4).expand(5, 4), id="broadcast rows"),
        pytest.param(lambda: leaf(5, 1).expand(5, 4), id="broadcast columns"),
        pytest.param(lambda: leaf(1, 5, 4).expand(3, 5, 4), id="broadcast batch"),
        pytest.param(lambda: leaf(2, 5, 4)[:, 1:], id="sliced"),
    ],
)
def test_a_linear_layer_is_deferred_however_its_input_lies_in_memory(make_input, bias):
    facts = cases.linear_layer_of_strided_input(make_input, bias).compare()
    assert "weight" in facts.deferred  # torch adds some biases apart: those are computed in B


def test_a_stack_of_layers_is_deferred_as_a_whole():
    facts = cases.stack_of_layers().compare()
    assert len(facts.deferred) == 6


# ---------------------------------------------------------------- products written out


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_weight_is_deferred(name):
    *_, weight_shapes = PRODUCTS[name]
    facts = cases.product_with_weight(name).compare()
    if name == "w + v":  # a tree behind the operand
        assert facts.computed == {"weights.0", "weights.1"}
    else:
        assert facts.deferred == {f"weights.{i}" for i in range(len(weight_shapes))}


@pytest.mark.parametrize("name", OTHERS)
def test_other_uses_of_a_weight_are_computed_in_b(name):
    facts = cases.other_use_of_weight(name).compare()
    assert facts.deferred == set()


def test_a_product_of_two_weights_is_right():
    """Both operands qualify: either may wait, neither may be lost."""
    facts = cases.product_of_two_weights().compare()
    assert facts.deferred | facts.computed == {"weights.0", "weights.1"}


def test_a_product_of_a_weight_with_itself_is_right():
    cases.product_of_weight_with_itself().compare()


def test_low_rank_weights_multiplied_first_are_right():
    """x @ (a @ b): the product leads to two leaves, so it is no chain."""
    facts = cases.low_rank_weights().compare()
    assert facts.deferred | facts.computed == {"weights.0", "weights.1"}


# ---------------------------------------------------------------- operands that are not dense and real


@pytest.mark.parametrize("name", COMPLEX)
def test_a_real_weight_of_a_complex_product_is_right(name):
    """Its gradient is that of the conjugate, as the layers of a Fourier neural operator need it."""
    facts = cases.real_weight_of_complex_product(name).compare()
    assert facts.deferred == {"weights.0"} or name == "F.linear"


def test_a_parameter_that_is_viewed_as_complex_is_right():
    facts = cases.parameter_viewed_as_complex().compare()
    assert facts.deferred == {"weights.0"}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_linear_layer_of_a_sparse_input_is_computed_in_b(layout):
    facts = cases.linear_layer_of_sparse_input(layout).compare()
    assert not facts.deferred


@pytest.mark.parametrize("num_rows", [1, 30])
def test_experts_that_get_as_many_rows_as_choose_them_are_deferred(num_rows):
    """With one row, two of the three get none, and no gradient."""
    facts = cases.grouped_experts(num_rows).compare()
    assert facts.computed == set()
    assert len(facts.deferred) == (4 if num_rows == 1 else 8)


def test_conv1d_of_gpt2_is_deferred():
    """Its weight is addmm's mat2 without a transpose."""
    facts = cases.conv1d_of_gpt2().compare()
    assert facts.deferred == {"0.weight", "0.bias", "2.weight", "2.bias"}
