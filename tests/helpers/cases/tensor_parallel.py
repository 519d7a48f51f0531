"""Tensor-parallel modules on the ranks of the default process group, and the same modules on one."""

from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from helpers.split import deferred_and_computed, double, float64
from zbpp import backward_input
from zbpp.autograd import explain
from zbpp.autograd.weight_grads import ChangedInPlace


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


class Sequence(Mlp):
    """Has a place where the norm's input can be sharded."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Identity()

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(self.norm(self.enter(x))))))


class Twice(Mlp):
    """Each sharded weight has two uses; the norm has none."""

    def forward(self, x):
        return self.head(self.down(self.up(x + self.down(self.up(x)))))


class Frozen(Mlp):
    def __init__(self):
        super().__init__()
        self.up.weight.requires_grad_(False)
        self.down.bias.requires_grad_(False)


class Tokens(nn.Module):
    """Embeddings, to be sharded along columns and along rows."""

    def __init__(self):
        super().__init__()
        self.columns, self.rows = nn.Embedding(6, 8, padding_idx=1), nn.Embedding(6, 8)

    def forward(self, x):
        tokens = torch.tensor([[1, 2, 3, 2, 5]])
        return x + self.columns(tokens) + self.rows(tokens)


class NotTransposed(nn.Module):
    """Weights that are used without a transpose, as GPT-2's are."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        return torch.tanh(x @ self.up) @ self.down


class Left(nn.Module):
    """A weight that is the left operand; behind it a replicated one whose gradient is a partial sum."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(6, 10)), nn.Parameter(torch.randn(8, 3))

    def forward(self, x):
        return torch.tanh(self.left @ x.flatten(0, 1)) @ self.right


def add_main_grads(module):
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float64)


def add_hooks(module):
    module.up.weight.register_hook(lambda gradient: gradient * 3)
    module.up.weight.register_post_accumulate_grad_hook(double_gradient)
    module.down.bias.register_hook(lambda gradient: gradient * 5)


def double_gradient(parameter):
    parameter.grad.mul_(2)


def whole_in_and_out(output_layouts):
    """The module gets DTensors; its output is made a whole tensor again."""
    style = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Replicate(),
        output_layouts=output_layouts,
        desired_output_layouts=Replicate(),
    )
    return {"": style}


class Case(NamedTuple):
    """A module, how it is parallelized, and the names of the parameters whose gradients B computes.

    placements: of parameters of the module itself. prepare(module): called on both modules at last.
    """

    make: Any
    plan: dict[str, Any]
    in_b: set[str]
    placements: Any = MappingProxyType({})
    prepare: Any = lambda module: None
    x_shape: tuple[int, ...] = (2, 5, 8)


NORM = {"norm.weight", "norm.bias"}
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
CASES = {
    "mlp": Case(Mlp, PLAN, NORM),
    "matrices": Case(Mlp, PLAN, NORM, x_shape=(5, 8)),
    "columns gathered": Case(
        Mlp, {"up": ColwiseParallel(output_layouts=Replicate()),
              "down": RowwiseParallel(input_layouts=Replicate())}, NORM),
    "head, too": Case(Mlp, {**PLAN, "head": ColwiseParallel(output_layouts=Replicate())}, NORM),
    "sequence parallel": Case(
        Sequence, {"enter": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
                   "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
                   "down": RowwiseParallel()}, NORM, x_shape=(2, 6, 8)),
    "two uses": Case(Twice, PLAN, set()),
    "frozen": Case(Frozen, PLAN, {"up.bias", *NORM}),  # a bias waits with its weight only
    "embeddings": Case(
        Tokens, {"columns": ColwiseParallel(output_layouts=Replicate()),
                 "rows": RowwiseParallel(input_layouts=Replicate())}, {"rows.weight"}),
    "not transposed": Case(
        NotTransposed, whole_in_and_out(Partial()), set(), {"up": Shard(1), "down": Shard(0)}),
    "left operand": Case(
        Left, whole_in_and_out(Shard(0)), {"right"}, {"left": Shard(0), "right": Replicate()}),
    "main_grad": Case(Mlp, PLAN, NORM, prepare=add_main_grads),
    "hooks": Case(Mlp, PLAN, NORM, prepare=add_hooks),
}  # fmt: skip


class Outcome(NamedTuple):
    """Whole gradients by name, those of inputs as x0 and x1; what W computed; bytes held."""

    gradients: dict[str, Any]
    deferred: set[str]
    held_bytes: int


def alone(case):
    """Plain autograd in this process."""
    module, found = made(case), {}
    case.prepare(module)
    for microbatch in range(2):
        x = double(*case.x_shape, seed=microbatch).requires_grad_()
        output = module(x)
        output.backward(double(*output.shape, seed=10 + microbatch))
        found[f"x{microbatch}"] = x.grad
    return found | gradients(module)


def split(case, mesh):
    """The split on all ranks of the mesh, W of both microbatches late."""
    module, found, later = parallel(case, mesh), {}, []
    case.prepare(module)
    for microbatch in range(2):
        x = double(*case.x_shape, seed=microbatch).requires_grad_()
        output = module(x)
        dy = double(*output.shape, seed=10 + microbatch)
        (found[f"x{microbatch}"],), weight_grads = backward_input(output, dy, x)
        later.append(weight_grads)
    assert all(parameter.grad is None for parameter in module.parameters())
    deferred, _ = deferred_and_computed(module, later[0])
    held_bytes = later[0].held_bytes
    for weight_grads in later:
        weight_grads.accumulate()
        assert weight_grads.held_bytes == 0
    return Outcome(found | gradients(module), deferred, held_bytes)


def made(case):
    with float64():
        torch.manual_seed(0)
        return case.make()


def parallel(case, mesh):
    module = made(case)
    for name, placement in case.placements.items():
        placed = distribute_tensor(getattr(module, name).data, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(placed))
    return parallelize_module(module, mesh, case.plan, src_data_rank=None)


def gradients(module):
    """Whole gradients; asserts that a DTensor's has the placements of its parameter."""
    found = {}
    for name, parameter in module.named_parameters():
        gradient = getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad
        if gradient is not None and isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor), name
            assert gradient.placements == parameter.placements, name
            gradient = gradient.full_tensor()
        if gradient is not None:
            found[name] = gradient
    return found


def outcomes_of_all_cases(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {name: split(case, mesh) for name, case in CASES.items()}
    return found, {claim.__name__: claim(mesh) for claim in CLAIMS}


# ---- Single layers, used as DTensors


def layer(mesh, *placements):
    """A linear layer, and the same one with weight and bias placed as given."""
    with float64():
        torch.manual_seed(0)
        whole, placed = nn.Linear(8, 6), nn.Linear(8, 6)
    for (name, value), placement in zip(whole.named_parameters(), placements, strict=True):
        placed.register_parameter(name, nn.Parameter(distribute_tensor(value.data, mesh, placement)))
    return whole, placed


def on_mesh(tensor, mesh, *placements):
    return distribute_tensor(tensor, mesh, placements)


def differences(whole, placed):
    """The largest relative difference of each gradient, by name."""
    found = {}
    for (name, one), other in zip(whole.named_parameters(), placed.parameters(), strict=True):
        assert other.grad.placements == other.placements, name
        found[name] = float((other.grad.full_tensor() - one.grad).abs().max() / one.grad.abs().max())
    return found


def dy_placed_otherwise(mesh):
    """Columns whose dy is replicated or a partial sum; rows whose dy is sharded."""
    found = {}
    for placements, x_placement, dy_placement in (
        (([Shard(0)], [Shard(0)]), Replicate(), Replicate()),
        (([Shard(0)], [Shard(0)]), Replicate(), Partial()),
        (([Shard(1)], [Replicate()]), Shard(1), Shard(1)),
        (([Shard(1)], [Replicate()]), Shard(1), Shard(0)),
    ):
        whole, placed = layer(mesh, *placements)
        x, dy = double(4, 8), double(4, 6, seed=1)
        whole(x).backward(dy)
        share = DTensor.from_local(dy / mesh.size(), mesh, [Partial()])
        placed_dy = share if dy_placement.is_partial() else share.redistribute(placements=[dy_placement])
        output = placed(on_mesh(x, mesh, x_placement))
        _, later = backward_input(output, placed_dy, ())
        deferred, _ = deferred_and_computed(placed, later)
        later.accumulate()
        found[str(placements), str(dy_placement)] = deferred, differences(whole, placed)
    return found


def several_passes(mesh):
    """Two backward passes through columns and rows, whose W's come in reverse order -> the differences."""
    found = {}
    for placements, x_placement, dy_placement in (
        (([Shard(0)], [Shard(0)]), Replicate(), Shard(1)),
        (([Shard(1)], [Replicate()]), Shard(1), Replicate()),
    ):
        whole, placed = layer(mesh, *placements)
        x, dys = double(4, 8), [double(4, 6, seed=seed) for seed in (1, 2)]
        whole(x).backward(sum(dys))
        output = placed(on_mesh(x, mesh, x_placement)).redistribute(placements=[dy_placement])
        later = [
            backward_input(output, on_mesh(dy, mesh, dy_placement), (), keep=keep)[1]
            for dy, keep in zip(dys, (True, False), strict=True)
        ]
        deferred, _ = deferred_and_computed(placed, later[0])
        for weight_grads in reversed(later):
            weight_grads.accumulate()
        found[str(placements)] = deferred, differences(whole, placed)
    return found


def mesh_of_two_dimensions(_):
    """Placements of x -> what waits, and the differences. The first dimension shards nothing, or x's rows."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "tensor"))
    found = {}
    for x_placements in ((Replicate(), Replicate()), (Shard(0), Replicate())):
        whole, placed = layer(mesh, (Replicate(), Shard(0)), (Replicate(), Shard(0)))
        x, dy = double(4, 8), double(4, 6, seed=1)
        whole(x).backward(dy)
        output = placed(on_mesh(x, mesh, *x_placements))
        _, later = backward_input(output, on_mesh(dy, mesh, *output.placements), ())
        deferred, _ = deferred_and_computed(placed, later)
        later.accumulate()
        found[str(x_placements)] = deferred, differences(whole, placed)
    return found


def what_is_changed_in_place(mesh):
    """The message of W, after a tensor that it needs was changed in each way."""
    return {name: message_of(change, mesh) for name, change in CHANGES.items()}


CHANGES = {
    "nothing": lambda x, dy: None,
    "x": lambda x, dy: x.add_(1),
    "shard of x": lambda x, dy: x.to_local().add_(1),
    "dy": lambda x, dy: dy.mul_(2),
    "shard of dy": lambda x, dy: dy.to_local().mul_(2),
}


def message_of(change, mesh):
    _, placed = layer(mesh, [Shard(0)], [Shard(0)])
    x = on_mesh(double(4, 8), mesh, Replicate())
    dy = on_mesh(double(4, 6), mesh, Shard(1))
    _, later = backward_input(placed(x), dy, ())
    change(x, dy)
    try:
        later.accumulate()
    except ChangedInPlace as error:
        return str(error)
    return ""


class ChangesGradient(torch.autograd.Function):
    """Its backward changes the gradient that it gets, or returns another one."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.change(dy), None


def double_shard(dy):
    dy.to_local().mul_(2)
    return dy


def what_is_changed_in_b(mesh):
    """What B says if a Function changes a gradient after another layer got it: the DTensor, or its shard."""
    changes = {"nothing": lambda dy: dy * 2, "dtensor": lambda dy: dy.mul_(2), "shard": double_shard}
    found = {}
    for name, change in changes.items():
        _, placed = layer(mesh, [Shard(0)], [Shard(0)])
        other = on_mesh(double(4, 6), mesh, Shard(1)).requires_grad_()
        first = ChangesGradient.apply(other, change)  # made first: its backward comes last
        output = placed(on_mesh(double(4, 8), mesh, Replicate())) + first
        try:
            _, later = backward_input(output, on_mesh(double(4, 6), mesh, Shard(1)), other)
            later.accumulate()
            found[name] = ""
        except ChangedInPlace as error:
            found[name] = str(error)
    return found


def gradient_with_other_placements(mesh):
    """A `.grad` that someone has left replicated."""
    _, placed = layer(mesh, [Shard(0)], [Shard(0)])
    placed.weight.grad = on_mesh(double(6, 8), mesh, Replicate())
    output = placed(on_mesh(double(4, 8), mesh, Replicate()))
    _, later = backward_input(output, torch.ones_like(output), ())
    try:
        later.accumulate()
    except ValueError as error:
        return str(error)
    return ""


def reasons_of_explain(mesh):
    """Of a weight: with an x that fits, with one that doesn't, and cast before its use."""
    _, placed = layer(mesh, [Shard(0)], [Shard(0)])
    fits = placed(on_mesh(double(4, 8), mesh, Replicate()))
    rows = placed(on_mesh(double(4, 8), mesh, Shard(0)))
    cast = on_mesh(double(4, 8), mesh, Replicate()).float() @ placed.weight.float().t()
    return [explain(each, (), {"weight": placed.weight}).rows[0] for each in (fits, rows, cast)]


CLAIMS = (
    dy_placed_otherwise,
    several_passes,
    mesh_of_two_dimensions,
    what_is_changed_in_place,
    what_is_changed_in_b,
    gradient_with_other_placements,
    reasons_of_explain,
)
