"""Compare the split backward with plain autograd, on any module.

    facts = assert_equals_plain(lambda: nn.Linear(4, 3), lambda: leaf(5, 4))
    assert facts.deferred == {"weight", "bias"}

In float64, over two microbatches whose W's come late: F0 F1 B0 B1 W0 W1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zbpp.autograd import WeightGrads, backward_input, defer
from zbpp.autograd.arguments import roots_and_grads
from zbpp.autograd.hooked_leaves import HookedTask
from zbpp.autograd.hooks import num_hooks_made
from zbpp.autograd.split import split
from zbpp.autograd.weight_grads import ComputedTask

Call = Callable[..., Any]


def call_module(module: nn.Module, *inputs: Any) -> Any:
    return module(*inputs)


class Case(NamedTuple):
    """A module, and inputs of microbatches.

    call(module, *inputs) -> outputs, by default module(*inputs). The makers are called once for each side,
    from the same seed. grads_in_b: `.grad` may change before W (a reentrant checkpoint).
    """

    make_module: Call
    make_inputs: Call
    call: Call = call_module
    tolerance: float = 1e-12
    dtype: torch.dtype = torch.float64
    grads_in_b: bool = False
    count_products: bool = True
    num_microbatches: int = 2
    buffer_tolerance: float = 0.0

    def compare(self) -> Facts:
        """Gradients of inputs and parameters, and buffers, are those of plain autograd.

        Also asserts that nothing is in `.grad` before W, that nothing is held after it, that B and W leave
        buffers alone, and that they run no more matrix products than a plain backward.
        """
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            expected = _plain(self)
            found, facts = _split(self)
        finally:
            torch.set_default_dtype(before)
        assert_close(found.input_grads, expected.input_grads, self.tolerance)
        assert_close(found.grads, expected.grads, self.tolerance)
        assert_close(found.buffers, expected.buffers, self.buffer_tolerance)
        assert found.num_products <= expected.num_products
        return facts

    def compare_whole(self) -> None:
        """BW gives the gradients that B and W give, to the last bit."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            found, expected = _whole(self), _split(self)[0].grads
        finally:
            torch.set_default_dtype(before)
        assert_close(found, expected, 0.0)


def assert_equals_plain(*args: Any, **options: Any) -> Facts:
    """`Case(...).compare()`."""
    return Case(*args, **options).compare()


class Facts(NamedTuple):
    """What one comparison saw. Names of parameters that had a gradient in any microbatch."""

    deferred: set[str]  # W computes the gradient
    computed: set[str]  # B did; W only adds it
    held_bytes: int  # between B and W, of one microbatch
    grads: dict[str, Tensor]


@contextmanager
def float64() -> Iterator[None]:
    """New tensors and modules are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def leaf(*shape: int) -> Tensor:
    """A drawn input whose gradient is wanted."""
    return torch.randn(*shape, requires_grad=True)


def double(*shape: int, seed: int = 0) -> Tensor:
    """Drawn numbers in float64, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Relative to max(the tensor's largest, 1e-6 of all tensors' largest): some are zero in theory."""
    assert found.keys() == expected.keys()
    found, expected = ({name: each.to_dense() for name, each in side.items()} for side in (found, expected))
    largest = max((each.abs().max().item() for each in expected.values() if each.numel()), default=0.0)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        if tensor.numel():
            scale = max(tensor.abs().max().item(), 1e-6 * largest)
            difference = (found[name] - tensor).abs().max().item()
            assert difference <= tolerance * scale, f"{name}: off by {difference:.2e} of {scale:.2e}"


class _Side(NamedTuple):
    grads: dict[str, Tensor]
    input_grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    num_products: int


class Waits(torch.autograd.Function):
    """x * weight; the gradient of the weight waits for W."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy * weight, defer(ctx, weight, lambda dy, x: (dy * x).sum(0), dy, x)


def _plain(case: Case) -> _Side:
    module = _made(case)
    batches, outputs = _forward(case, module)
    with CountProducts() if case.count_products else nullcontext(None) as counted:
        for microbatch, (inputs, output) in enumerate(zip(batches, outputs, strict=True)):
            for each in inputs:
                if isinstance(each, Tensor) and each.requires_grad:
                    each.retain_grad()
            tensors = tensors_of(output)
            pairs = zip(tensors, draw_grads(tensors, microbatch), strict=True)
            flowing = [(tensor, grad) for tensor, grad in pairs if grad is not None]
            torch.autograd.backward(*zip(*flowing, strict=True))
    input_grads = {
        f"microbatch {microbatch}, input {position}": each.grad
        for microbatch, inputs in enumerate(batches)
        for position, each in enumerate(inputs)
        if isinstance(each, Tensor) and each.requires_grad and each.grad is not None
    }
    return _Side(grads_of(module), input_grads, buffers_of(module), counted.number if counted else 0)


def _split(case: Case) -> tuple[_Side, Facts]:
    module = _made(case)
    batches, outputs = _forward(case, module)
    before, buffers = grads_of(module), buffers_of(module)
    input_grads, later = {}, []
    with CountProducts() if case.count_products else nullcontext(None) as counted:
        for microbatch, inputs in enumerate(batches):
            output, outputs[microbatch] = outputs[microbatch], None
            grads, weight_grads = backward_input(
                output, output_grads(output, microbatch), inputs
            )  # as a user would: outputs and their gradients in one structure
            del output
            for position, grad in enumerate(grads):
                if grad is not None:
                    input_grads[f"microbatch {microbatch}, input {position}"] = grad.clone()
            later.append(weight_grads)
        if not case.grads_in_b:
            assert_unchanged(module, before)
        each = [deferred_and_computed(module, weight_grads) for weight_grads in later]
        deferred, computed = (set().union(*names) for names in zip(*each, strict=True))
        held_bytes = later[0].held_bytes
        for weight_grads in later:
            weight_grads.accumulate()
            assert weight_grads.held_bytes == 0
    assert all(torch.equal(found, buffers[name]) for name, found in buffers_of(module).items())
    side = _Side(grads_of(module), input_grads, buffers_of(module), counted.number if counted else 0)
    return side, Facts(deferred, computed, held_bytes, side.grads)


def _whole(case: Case) -> dict[str, Tensor]:
    """The gradients of parameters by BW of all microbatches."""
    module = _made(case)
    for microbatch, (inputs, output) in enumerate(zip(*_forward(case, module), strict=True)):
        roots, grads = roots_and_grads(output, output_grads(output, microbatch))
        is_hooked = num_hooks_made() > 0
        _, tasks, _ = split(roots, grads, tuple(inputs), None, is_hooked=is_hooked, at_once=True)
        WeightGrads(tasks).accumulate()
    return grads_of(module)


def _made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make_module()


def _forward(case: Case, module: nn.Module) -> tuple[list[tuple[Any, ...]], list[Any]]:
    batches, outputs = [], []
    for microbatch in range(case.num_microbatches):
        torch.manual_seed(100 + microbatch)
        inputs = case.make_inputs()
        batches.append(inputs if isinstance(inputs, tuple) else (inputs,))
        torch.manual_seed(200 + microbatch)  # equal dropout masks
        outputs.append(case.call(module, *batches[-1]))
    return batches, outputs


def tensors_of(output: Any) -> list[Any]:
    if isinstance(output, Tensor):
        return [output]
    return list(output.values() if isinstance(output, Mapping) else output)


def draw_grads(outputs: list[Any], seed: int = 0) -> list[Tensor | None]:
    """One gradient for each output that has one."""
    generator = torch.Generator().manual_seed(300 + seed)
    return [
        torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype)
        if isinstance(each, Tensor) and each.requires_grad
        else None
        for each in outputs
    ]


def output_grads(output: Any, seed: int = 0) -> Any:
    """`draw_grads`, in the structure of the output."""
    grads = draw_grads(tensors_of(output), seed)
    if isinstance(output, Tensor):
        return grads[0]
    return dict(zip(output, grads, strict=True)) if isinstance(output, Mapping) else grads


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies, by name. A tied parameter counts under its first name, main_grad as `name.main_grad`."""
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    main = {
        f"{name}.main_grad": p.main_grad.clone()
        for name, p in module.named_parameters()
        if hasattr(p, "main_grad")
    }
    return found | main


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    """B leaves every `.grad` as it was."""
    now = grads_of(module)
    assert now.keys() == before.keys(), "B changed a .grad"
    assert all(torch.equal(grad, before[name]) for name, grad in now.items()), "B changed a .grad"


def deferred_and_computed(module: nn.Module, weight_grads: WeightGrads) -> tuple[set[str], set[str]]:
    """Which parameters' gradients W computes, and which B has computed."""
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    deferred, computed = set(), set()
    for task in weight_grads._tasks or ():
        parts = task.tasks if isinstance(task, HookedTask) else [task]
        for part in parts:
            chosen = computed if isinstance(part, ComputedTask) else deferred
            chosen.add(name_of[id(part.leaf)])
    return deferred, computed


def linear_weights(module: nn.Module) -> set[str]:
    """Names of the weights and biases of all nn.Linear."""
    return {
        name
        for prefix, each in module.named_modules()
        if isinstance(each, nn.Linear)
        for name, _ in each.named_parameters(prefix)
    }


class CountProducts(TorchDispatchMode):
    """Counts matrix products and convolutions: the expensive kernels."""

    _NAMES = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution"})

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "convolution_backward":
            self.number += sum(args[-1][:2])  # of the input, of the weight
        elif name.rstrip("_") in self._NAMES:
            self.number += 1
        return func(*args, **(kwargs or {}))


class CountCalls:
    """How often something was called."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.number += 1


def refusal_to_parallelize(model: Any, mesh: Any) -> str:
    """The error of `model.parallelize`, which must leave the stage as it was; "accepted" without one."""
    stage = model.build_stage(0, 1)
    try:
        model.parallelize(stage, mesh)
    except ValueError as error:
        assert not any(hasattr(parameter, "device_mesh") for parameter in stage.parameters())
        return str(error)
    return "accepted"
