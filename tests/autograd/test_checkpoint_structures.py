"""zbpp.checkpoint of functions that take and return nested values, against torch's and plain autograd."""

import copy
import random
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from helpers.split import assert_close, double, float64, grads_of
from zbpp import Pipeline, backward_input, checkpoint
from zbpp.autograd import recompute
from zbpp.autograd.models.structures import flatten

Pair = namedtuple("Pair", "first second")


@dataclass
class State:
    hidden: Any
    note: str = "kept"
    rest: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Any
    size: int = field(default=3, init=False)


CONTAINERS = {
    "tensor": lambda a, b: a + b,
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, None, b],
    "dict": lambda a, b: {"b": b, "a": a, 3: "text"},
    "OrderedDict": lambda a, b: OrderedDict(b=b, a=a),
    "defaultdict": lambda a, b: defaultdict(list, a=[a], b=[b]),
    "deque": lambda a, b: deque([a, b]),
    "namedtuple": Pair,
    "dataclass": lambda a, b: State(a, rest=b),
    "frozen dataclass": lambda a, b: Frozen((a, b)),
    "PackedSequence": lambda a, b: PackedSequence(a + b, torch.tensor([a.shape[0]])),
}


def drawn_structure(generator, depth):
    """A function of a list of tensors: containers in containers, drawn."""
    name = generator.choice([*CONTAINERS][1:-1])
    inner = [drawn_structure(generator, depth - 1) if depth else (lambda a, b: a * b) for _ in range(2)]

    def made(a, b):
        return CONTAINERS[name](inner[0](a, b), inner[1](b, a + b))

    return made


STRUCTURES = CONTAINERS | {
    f"drawn {seed}": drawn_structure(random.Random(seed), 1 + seed % 3) for seed in range(20)
}


class Block(nn.Module):
    """Reads all tensors of a nested value, and returns another one."""

    def __init__(self, structure):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.structure, self.number, self.inside = structure, 0, None

    def forward(self, given, factor=1):
        self.number += 1
        hidden = self.first(sum(tensors_of(given))) * factor
        activation = torch.tanh(hidden)
        self.inside = weakref.ref(activation)
        return self.structure(self.second(activation), activation.sin())


def tensors_of(value):
    return [each for each in flatten(value)[0] if isinstance(each, torch.Tensor) and each.is_floating_point()]


def shape_of(value):
    """Types, keys and constants of a nested value."""
    match value:
        case torch.Tensor():
            return "tensor"
        case dict():
            return type(value), {key: shape_of(each) for key, each in value.items()}, list(value)
        case list() | tuple() | deque():
            return type(value), [shape_of(each) for each in value]
        case State():
            return State, shape_of(vars(value))
        case Frozen():
            return Frozen, shape_of(value.hidden), value.size
    return value


def plainly(block, *args, **kwargs):
    return block(*args, **kwargs)


def torchs(block, *args, **kwargs):
    return torchs_checkpoint(block, *args, use_reentrant=False, **kwargs)


def result(how, structure, is_split):
    """Outputs and gradients of one block under `how`, and how often it ran; its graph is dead before B."""
    with float64():
        torch.manual_seed(0)
        block = Block(structure)
    x, y = (double(5, 4, seed=seed).requires_grad_() for seed in range(2))
    output = how(block, structure(x * 2, y), factor=3)
    is_dead = block.inside() is None
    outputs = tensors_of(output)
    grads = [double(*each.shape, seed=seed) for seed, each in enumerate(outputs)]
    shape, values = shape_of(output), [each.detach() for each in outputs]
    del output
    if is_split:
        (dx, dy), weight_grads = backward_input(outputs, grads, (x, y))
        weight_grads.accumulate()
    else:
        torch.autograd.backward(outputs, grads)
        dx, dy = x.grad, y.grad
    found = grads_of(block) | {"x": dx, "y": dy}
    found |= {f"output {position}": each for position, each in enumerate(values)}
    return shape, found, block.number, is_dead


@pytest.mark.parametrize("is_split", [True, False], ids=["B and W", "one backward"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_any_structure_is_taken_returned_and_recomputed_once(name, is_split):
    structure = STRUCTURES[name]
    shape, found, number, is_dead = result(checkpoint, structure, is_split)
    for how, times in ((plainly, 1), (torchs, 2)):
        expected_shape, expected, expected_number, _ = result(how, structure, False)
        assert shape == expected_shape
        assert_close(found, expected)
        assert expected_number == times
    assert number == 2
    assert is_dead


def test_recomputed_blocks_of_a_pipeline_may_pass_dataclasses_on():
    def run(is_recomputed):
        with float64():
            torch.manual_seed(0)
            blocks = [Block(CONTAINERS["dataclass"]), Block(CONTAINERS["dict"]), Block(CONTAINERS["tensor"])]
        if is_recomputed:
            for block in blocks:
                recompute(block)
        stage = nn.Sequential(*blocks)
        with Pipeline({0: stage}, "zb_h1", num_microbatches=2, loss_fn=nn.functional.mse_loss) as pipeline:
            pipeline.step(double(6, 4), target=double(6, 4, seed=1))
        return grads_of(stage), [block.number for block in blocks]

    (found, twice), (expected, once) = run(True), run(False)
    assert_close(found, expected, 0.0)
    assert (twice, once) == ([4, 4, 4], [2, 2, 2])


@pytest.mark.parametrize("value", [None, {}, (), [], {"a": 1, "b": None}], ids=str)
def test_a_function_may_return_no_tensor(value):
    assert checkpoint(lambda x: copy.copy(value), double(2).requires_grad_()) == value


def test_a_config_among_the_arguments_stays_the_same_object():
    config = State("no tensor")
    assert checkpoint(lambda x, config: (x * 2, config), double(2).requires_grad_(), config)[1] is config


def test_a_dict_with_the_same_tensor_twice_gets_the_sum_of_both_gradients():
    x = double(3).requires_grad_()

    def function(x):
        y = x.exp()
        return {"a": y, "b": y}

    output = checkpoint(function, x)
    (output["a"] * 2 + output["b"] * 3).sum().backward()
    torch.testing.assert_close(x.grad, 5 * x.detach().exp())


# ---------------------------------------------------------------- what is refused


class Plain:
    def __init__(self, tensor):
        self.tensor = tensor


class Named(dict):
    pass


@pytest.mark.parametrize("make", [Plain, lambda y: Named(y=y), lambda y: {y}], ids=["object", "dict", "set"])
def test_an_object_that_hides_tensors_is_refused(make):
    """Nothing was recomputed: the whole graph stayed."""
    with pytest.raises(TypeError, match=r"returns a \w+, inside which no tensors are found: make it a data"):
        checkpoint(lambda x: make(x.exp()), double(3).requires_grad_())


CHANGES = {
    "dict": ({"x": 0}, lambda given, y: given.update(y=y)),
    "list": ([0], lambda given, y: given.append(y)),
    "nested list": ({"x": [0, 0]}, lambda given, y: given["x"].pop()),
    "dataclass": (State(0), lambda given, y: setattr(given, "hidden", y)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_function_that_changes_a_container_is_refused(name):
    """The caller's container stayed as it was: an auxiliary loss that it was to collect was missing."""
    given, change = CHANGES[name]
    x = double(3).requires_grad_()

    def function(x, given):
        change(given, x.exp())
        return x * 2

    with pytest.raises(RuntimeError, match="changes a list, dict or dataclass among its arguments"):
        checkpoint(function, x, replace(given, rest=x) if isinstance(given, State) else given)


def test_another_structure_in_the_recompute_is_refused():
    numbers = iter([1, 2])
    x = double(3).requires_grad_()
    output = checkpoint(lambda x: [x.exp() for _ in range(next(numbers))], x)
    with pytest.raises(RuntimeError, match="returned 1 values in its forward and 2 in its recompute"):
        output[0].sum().backward()


def test_attributes_and_pythons_random_numbers_are_as_in_torchs_checkpoint():
    """The recompute finds what they are then; docs/memory.md says so."""
    found = []
    for how in (partial(torchs_checkpoint, use_reentrant=True), checkpoint):
        holder, x = State(2), double(3).requires_grad_()
        random.seed(0)
        output = how(lambda x, holder=holder: x * holder.hidden * random.random(), x)
        holder.hidden = 5
        output.sum().backward()
        found.append({"output": output.detach(), "x": x.grad})
    assert_close(*found)
    random.seed(0)
    random.random()
    torch.testing.assert_close(x.grad, torch.full((3,), 5 * random.random()).double())


# ---------------------------------------------------------------- forward-mode AD

of_torch = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


@of_torch
def test_a_function_may_use_forward_mode_inside():
    """The forward had no tangents, since a Function turns forward-mode AD off; the recompute had them."""
    layer = nn.Linear(3, 3).double()

    def with_tangent(x):
        with forward_ad.dual_level():
            primal, tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x))).sin())
        return primal + tangent

    found = []
    for how in (plainly, torchs, checkpoint):
        x = double(2, 3).requires_grad_()
        output = how(with_tangent, x)
        output.sum().backward()
        found.append({"output": output.detach(), "x": x.grad, "weight": layer.weight.grad})
        layer.zero_grad()
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@of_torch
def test_a_tangent_from_outside_is_refused():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(double(3).requires_grad_(), torch.ones(3).double())
        with pytest.raises(NotImplementedError, match="jvp"):
            checkpoint(torch.exp, x)
