"""What random models are made of: layers, wrappers around layers, and boundaries between stages.

A layer maps (rows, TIME, WIDTH) to the same shape; an embedding maps (rows, TIME) of integers to it. With
`is_plain` a layer has the same parameters under the same names, and nothing of zbpp runs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import zbpp
from zbpp.autograd import defer

TIME, WIDTH, VOCAB = 3, 4, 7


class Use(nn.Module):
    """A square weight, and how it is used."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) if weight is None else weight
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


class Product(torch.autograd.Function):
    """x @ weight.T"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return dy @ weight, weight_gradient(dy, x)


class DeferredProduct(Product):
    """The same, whose weight gradient can wait."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return dy @ weight, defer(ctx, weight, weight_gradient, dy, x)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, 1).t() @ x.flatten(0, 1)


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


class Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class ChannelsLast(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(2, 2, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(2, (2, 2)).transpose(1, 2)).transpose(1, 2).flatten(2)


def routed(x: Tensor, weight: Tensor) -> Tensor:
    """Rows whose first number is positive go through the weight: none, in some microbatches."""
    chosen = x[:, 0, 0] > 0.5
    return x.index_put((chosen,), x[chosen] @ weight)


def with_auxiliary_loss(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    if torch.is_grad_enabled():
        zbpp.auxiliary_loss("squares", 1e-2 * y.square().mean())
    return x + y


def partly_without_gradient(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        y = x @ weight
    return x.tanh() + y + x.detach() @ weight


def frozen(module: nn.Module, name: str = "") -> nn.Module:
    """The module, without gradients for the parameters whose names end with `name`."""
    for each, parameter in module.named_parameters():
        parameter.requires_grad_(not each.endswith(name))
    return module


class Hooked(nn.Linear):
    """A layer whose hooks change the gradients of its weight and of its output."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.register_hook(lambda grad: 2 * grad)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 0.5 * grad)
        return y


def with_unused(module: nn.Module) -> nn.Module:
    module.unused = nn.Parameter(torch.randn(WIDTH))
    return module


Linear, TwiceWide = partial(nn.Linear, WIDTH, WIDTH), (WIDTH, 2 * WIDTH)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": Linear,
    "without bias": partial(Linear, bias=False),
    "mlp": lambda: nn.Sequential(nn.Linear(*TwiceWide), nn.GELU(), nn.Linear(*reversed(TwiceWide))),
    "twice": lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH)] * 2),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(TIME),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(1, TIME), nn.SiLU()),
    "dropout": lambda: nn.Sequential(Linear(), nn.Dropout(0.3)),
    "convolution": lambda: nn.Conv1d(TIME, TIME, 3, padding=1),
    "depthwise": lambda: nn.Conv1d(TIME, TIME, 3, padding=1, groups=TIME),
    "channels last": ChannelsLast,
    "attention": lambda: Attention(WIDTH, 2, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(
        WIDTH, 2, 8, dropout=0.0, activation="gelu", batch_first=True
    ),
    "gru": lambda: Recurrent(WIDTH, WIDTH, batch_first=True),
    "weight norm": lambda: weight_norm(Linear()),
    "frozen": lambda: frozen(Linear()),
    "frozen weight": lambda: frozen(Linear(), "weight"),
    "unused weight": lambda: with_unused(Linear()),
    "hooks": Hooked,
    "in place": lambda: Use(lambda x, weight: (x @ weight).mul_(0.5).add_(x).tanh_()),
    "transposed": lambda: Use(lambda x, weight: F.linear(x, weight.view(-1).view(WIDTH, WIDTH).t())),
    "computed weight": lambda: Use(lambda x, weight: F.linear(x, weight.tanh())),
    "einsum": lambda: Use(lambda x, weight: torch.einsum("rtv,wv->rtw", x, weight)),
    "scale": lambda: Use(lambda x, weight: x * weight.sum(0) + weight[0]),
    "without gradient": lambda: Use(partly_without_gradient),
    "routed": lambda: Use(routed),
    "auxiliary loss": lambda: Use(with_auxiliary_loss),
    "function": lambda: Use(Product.apply),
    "defer": lambda: Use(DeferredProduct.apply),
}
EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(VOCAB, WIDTH, padding_idx=0),
    "frozen embedding": lambda: frozen(nn.Embedding(VOCAB, WIDTH)),
}


def reentrant(layer: nn.Module, x: Tensor) -> Any:
    """Torch's reentrant checkpoint, which gives weights no gradient where its inputs need none."""
    return checkpoint(layer, x, use_reentrant=True) if x.requires_grad else layer(x)


def on_cpu(layer: nn.Module, x: Tensor) -> Any:
    with save_on_cpu():
        return layer(x)


def packed(layer: nn.Module, x: Tensor) -> Any:
    with saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda held: held):
        return layer(x)


_products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
_selective = partial(create_selective_checkpoint_contexts, _products)
TORCH_CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "torch checkpoint": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=_selective),
    "reentrant": reentrant,
}
ZBPP_CHECKPOINTS = {"zbpp checkpoint": zbpp.checkpoint, "recompute": nn.Module.__call__}
WRAPPERS = {**TORCH_CHECKPOINTS, "save_on_cpu": on_cpu, "packed": packed, **ZBPP_CHECKPOINTS}
# Torch's checkpoints run a layer twice, with all its effects.
WITH_EFFECTS = {"batch norm", "auxiliary loss"}


class Wrapped(nn.Module):
    """A layer that is called by a wrapper."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.call, self.is_recomputed = layer, call, False

    def forward(self, x: Tensor) -> Any:
        return self.call(self.layer, x)


class Boundary(NamedTuple):
    """What a stage returns, and how the next one takes it."""

    split: Callable[[Tensor], Any]
    merge: Callable[..., Tensor]


BOUNDARIES = {
    "one": Boundary(lambda x: x, lambda x: x),
    "detached second": Boundary(lambda x: (x, x.detach()), lambda x, y: x + y.sin()),
    "detached first": Boundary(lambda x: (x.detach(), x, x.detach()), lambda x, y, z: x.sin() + y * z),
    "all detached": Boundary(lambda x: x.detach(), lambda x: x),
    "views": Boundary(lambda x: (x[..., 2:], x[..., :2]), lambda x, y: torch.cat((x, y), -1)),
    "transposed": Boundary(lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "same twice": Boundary(lambda x: (x, x), lambda x, y: x + y.sin()),
    "unused": Boundary(lambda x: (x, x.exp()), lambda x, _: x),
    "mask": Boundary(lambda x: (x, None, x > 0), lambda x, _, mask: x * mask + x),
    "in place": Boundary(lambda x: 2 * x, lambda x: x.mul_(0.5)),
}
