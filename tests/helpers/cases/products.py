"""Cases: products with weights, however they are written."""

import torch
from torch import nn

from helpers.split import Case, leaf


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


def linear_layer(shape=(5, 4), bias=True) -> Case:
    return Case(lambda: nn.Linear(4, 3, bias=bias), lambda: leaf(*shape))


def linear_layer_of_strided_input(make_input=lambda: leaf(4, 5).t(), bias=True) -> Case:
    return Case(lambda: nn.Linear(4, 3, bias=bias), make_input)


def product_with_weight(name="x @ w") -> Case:
    function, x_shape, weight_shapes = PRODUCTS[name]
    return Case(lambda: Product(function, *weight_shapes), lambda: leaf(*x_shape))


def other_use_of_weight(name="x * w") -> Case:
    function, x_shape, weight_shapes = OTHERS[name]
    return Case(lambda: Product(function, *weight_shapes), lambda: leaf(*x_shape))


def product_of_weight_with_itself() -> Case:
    return Case(lambda: Product(lambda x, w: x @ w @ w.t() @ (w @ w), (4, 4)), lambda: leaf(5, 4))


def real_weight_of_complex_product(name="x @ w") -> Case:
    function, shape = COMPLEX[name]
    return Case(
        lambda: Product(lambda x, w: torch.view_as_real(function(to_complex(x), w * (1 - 3j))), shape),
        lambda: leaf(5, 4),
    )


def parameter_viewed_as_complex() -> Case:
    return Case(
        lambda: Product(lambda x, w: (to_complex(x) @ torch.view_as_complex(w)).imag, (4, 4, 2)),
        lambda: leaf(5, 4),
    )


def linear_layer_of_sparse_input(layout=torch.sparse_coo) -> Case:
    return Case(lambda: nn.Linear(4, 3), lambda: torch.randn(5, 4).to_sparse(layout=layout))


def grouped_experts(num_rows=1) -> Case:
    return Case(Experts, lambda: leaf(num_rows, 4), num_microbatches=1)
