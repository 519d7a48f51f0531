"""The split backward of matrix products with weights, however they are written."""

import pytest
import torch
from torch import nn

from helpers.split import assert_equals_plain, leaf

# ---------------------------------------------------------------- nn.Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 5, 4), (2, 3, 5, 4), (1, 4), (0, 4)])
def test_a_linear_layer_is_deferred_whatever_the_shape_of_its_input(shape, bias):
    facts = assert_equals_plain(lambda: nn.Linear(4, 3, bias=bias), lambda: leaf(*shape))
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
    facts = assert_equals_plain(lambda: nn.Linear(4, 3, bias=bias), make_input)
    assert "weight" in facts.deferred  # torch adds some biases apart: those are computed in B


def test_a_stack_of_layers_is_deferred_as_a_whole():
    facts = assert_equals_plain(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)),
        lambda: leaf(2, 5, 4),
    )
    assert len(facts.deferred) == 6


# ---------------------------------------------------------------- products written out


class Product(nn.Module):
    """Parameters of the given shapes, and a function of x and them."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(*shape)) for shape in shapes])
        self.function = function

    def forward(self, x):
        return self.function(
            x, *tuple(self.weights)
        )  # *self.weights is more than Dynamo of torch 2.11 can read


PRODUCTS = {
    "x @ w": (lambda x, w: x @ w, (5, 4), [(4, 3)]),
    "x @ w.t()": (lambda x, w: x @ w.t(), (5, 4), [(3, 4)]),
    "w @ x": (lambda x, w: w @ x, (5, 4), [(3, 5)]),
    "w.t() @ x": (lambda x, w: w.t() @ x, (5, 4), [(5, 3)]),
    "w @ x, many x": (lambda x, w: w @ x, (2, 5, 4), [(3, 5)]),
    "x @ w, many x": (lambda x, w: x @ w, (2, 5, 4), [(4, 3)]),
    "x @ w[0]": (lambda x, w: x @ w[0], (5, 4), [(2, 4, 3)]),
    "x @ w[-1].t()": (lambda x, w: x @ w[-1].t(), (5, 4), [(2, 3, 4)]),
    "both of w": (lambda x, w: x @ w[0] @ w[1], (5, 4), [(2, 4, 4)]),
    "mm": (lambda x, w: torch.mm(x, w), (5, 4), [(4, 3)]),
    "w of a matrix norm": (lambda x, w: x @ (w * 0.5), (5, 4), [(4, 3)]),
    "w + v": (lambda x, w, v: x @ (w + v), (5, 4), [(4, 3), (4, 3)]),
    "reshaped w": (lambda x, w: x @ w.view(4, 3), (5, 4), [(2, 2, 3)]),
    "chunked w": (
        lambda x, w: torch.cat([x @ each.t() for each in w.chunk(3)[::-1]], -1).tanh(),
        (5, 4),
        [(9, 4)],
    ),
    "unbound w": (lambda x, w: sum(x @ each for each in w.unbind()), (5, 4), [(3, 4, 2)]),
    "bmm": (lambda x, w: torch.bmm(x, w), (2, 5, 4), [(2, 4, 3)]),
    "bmm, w on the left": (lambda x, w: torch.bmm(w, x), (2, 5, 4), [(2, 3, 5)]),
    "bmm, w transposed": (lambda x, w: torch.bmm(x, w.transpose(1, 2)), (2, 5, 4), [(2, 3, 4)]),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), (2, 5, 4), [(2, 4, 3), (2, 1, 3)]),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (5, 4), [(4, 3), (3,)]),
    "addmm, w on the left": (lambda x, w, b: torch.addmm(b, w, x), (5, 4), [(3, 5), (3, 1)]),
    "addmm with a scalar bias": (lambda x, w, b: torch.addmm(b, x, w), (5, 4), [(4, 3), (1,)]),
    "einsum bi,oi": (lambda x, w: torch.einsum("bi,oi->bo", x, w), (5, 4), [(3, 4)]),
    "einsum bti,io": (lambda x, w: torch.einsum("bti,io->bto", x, w), (2, 5, 4), [(4, 3)]),
    "einsum with heads": (lambda x, w: torch.einsum("btd,hdk->bhtk", x, w), (2, 5, 4), [(2, 4, 3)]),
    "einsum of experts": (lambda x, w: torch.einsum("ebi,eio->ebo", x, w), (2, 5, 4), [(2, 4, 3)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_weight_is_deferred(name):
    function, x_shape, weight_shapes = PRODUCTS[name]
    facts = assert_equals_plain(lambda: Product(function, *weight_shapes), lambda: leaf(*x_shape))
    if name == "w + v":  # a tree behind the operand
        assert facts.computed == {"weights.0", "weights.1"}
    else:
        assert facts.deferred == {f"weights.{i}" for i in range(len(weight_shapes))}


OTHERS = {
    "x * w": (lambda x, w: x * w, (5, 4), [(4,)]),
    "a vector": (lambda x, w: x @ w, (5, 4), [(4,)]),
    "bilinear": (lambda x, w: nn.functional.bilinear(x, x, w), (5, 4), [(3, 4, 4)]),
    "addmm with alpha": (lambda x, w, b: torch.addmm(b, x, w, alpha=0.5), (5, 4), [(4, 3), (3,)]),
    "addmm with beta": (lambda x, w, b: torch.addmm(b, x, w, beta=2), (5, 4), [(4, 3), (3,)]),
    "baddbmm with alpha": (
        lambda x, w, b: torch.baddbmm(b, x, w, alpha=3, beta=0.5),
        (2, 5, 4),
        [(2, 4, 3), (2, 1, 3)],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_uses_of_a_weight_are_computed_in_b(name):
    function, x_shape, weight_shapes = OTHERS[name]
    facts = assert_equals_plain(lambda: Product(function, *weight_shapes), lambda: leaf(*x_shape))
    assert facts.deferred == set()


def test_a_product_of_two_weights_is_right():
    """Both operands qualify: either may wait, neither may be lost."""
    facts = assert_equals_plain(
        lambda: Product(lambda x, a, b: x + a @ b, (5, 3), (3, 4)),
        lambda: leaf(5, 4),
    )
    assert facts.deferred | facts.computed == {"weights.0", "weights.1"}


def test_a_product_of_a_weight_with_itself_is_right():
    assert_equals_plain(lambda: Product(lambda x, w: x @ w @ w.t() @ (w @ w), (4, 4)), lambda: leaf(5, 4))


def test_low_rank_weights_multiplied_first_are_right():
    """x @ (a @ b): the product leads to two leaves, so it is no chain."""
    facts = assert_equals_plain(
        lambda: Product(lambda x, a, b: x @ (a @ b), (4, 2), (2, 3)), lambda: leaf(5, 4)
    )
    assert facts.deferred | facts.computed == {"weights.0", "weights.1"}


# ---------------------------------------------------------------- operands that are not dense and real


def to_complex(x):
    return x.to(torch.complex128) * (1 + 2j)


COMPLEX = {
    "x @ w": (lambda x, w: x @ w, (4, 4)),
    "x @ w.t()": (lambda x, w: x @ w.t(), (4, 4)),
    "w @ x.t()": (lambda x, w: w @ x.t(), (4, 4)),
    "x.conj() @ w": (lambda x, w: x.conj() @ w, (4, 4)),
    "in a batch": (lambda x, w: torch.bmm(x.expand(3, 5, 4), w), (3, 4, 4)),
    "from the left, in a batch": (lambda x, w: torch.bmm(w, x.t().expand(3, 4, 5)), (3, 4, 4)),
    "F.linear": (lambda x, w: nn.functional.linear(x, w, w[0]), (4, 4)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_a_real_parameter_as_the_weight_of_a_complex_product(name):
    """Its gradient is that of the conjugate, as the layers of a Fourier neural operator need it."""
    function, shape = COMPLEX[name]
    facts = assert_equals_plain(
        lambda: Product(lambda x, w: torch.view_as_real(function(to_complex(x), w * (1 - 3j))), shape),
        lambda: leaf(5, 4),
    )
    assert facts.deferred == {"weights.0"} or name == "F.linear"


def test_a_parameter_that_is_viewed_as_complex():
    facts = assert_equals_plain(
        lambda: Product(lambda x, w: (to_complex(x) @ torch.view_as_complex(w)).imag, (4, 4, 2)),
        lambda: leaf(5, 4),
    )
    assert facts.deferred == {"weights.0"}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_linear_layer_of_a_sparse_input_is_computed_in_b(layout):
    facts = assert_equals_plain(lambda: nn.Linear(4, 3), lambda: torch.randn(5, 4).to_sparse(layout=layout))
    assert not facts.deferred


class Experts(nn.Module):
    """Top-1 routing: each expert gets the rows that chose it, as many as there are."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * scores[rows, None])
        return y


@pytest.mark.parametrize("num_rows", [1, 30])
def test_experts_that_get_as_many_rows_as_choose_them_are_deferred(num_rows):
    """With one row, two of the three get none, and no gradient."""
    facts = assert_equals_plain(Experts, lambda: leaf(num_rows, 4), num_microbatches=1)
    assert facts.computed == set()
    assert len(facts.deferred) == (4 if num_rows == 1 else 8)


def test_conv1d_of_gpt2_is_deferred():
    """Its weight is addmm's mat2 without a transpose."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    facts = assert_equals_plain(
        lambda: nn.Sequential(pytorch_utils.Conv1D(6, 4), nn.GELU(), pytorch_utils.Conv1D(4, 6)),
        lambda: leaf(2, 5, 4),
    )
    assert facts.deferred == {"0.weight", "0.bias", "2.weight", "2.bias"}
