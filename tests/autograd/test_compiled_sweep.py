"""Every case of the split's tests, compiled: right gradients, or a line that says why it stays eager."""

import inspect
import logging
import random
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel

from helpers.cases import (
    checkpoint,
    compile,
    convolutions,
    embeddings,
    functions,
    graphs,
    hooks,
    models,
    norms,
    precision,
    products,
    saved_hooks,
    sharing,
    tensor_parallel,
)
from helpers.compiler import needs_inductor
from helpers.split import Case, assert_close, assert_equals_plain, leaf, tensors_of
from zbpp.autograd import backward_input, explain
from zbpp.autograd.compiled import compile_stage
from zbpp.autograd.compiled.compiled_forward import CompiledForward
from zbpp.autograd.explain import NOT_COMPILED

# Dynamo looks at `.grad` of every input.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook"),
]

FILES = [
    *(products, convolutions, embeddings, norms, precision, sharing, functions, checkpoint),
    *(saved_hooks, models, graphs, hooks, compile),
]


# ---------------------------------------------------------------- the comparison


@contextmanager
def lines():
    """What the log says of what stays eager, gathered."""
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger(compile_stage.__module__)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def with_gradients(module):
    """Every second parameter has a gradient already."""
    for parameter in [*module.parameters()][1::2]:
        if parameter.requires_grad:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            parameter.grad = torch.randn_like(parameter, dtype=dtype)
    return module


def compare(case, **how):
    """Compiled against plain autograd. Returns the compiled module, and the lines."""
    modules, outputs = [], []

    def make():
        modules.append(with_gradients(case.make_module()))
        if len(modules) == 2:
            compile_stage(modules[1], **how)
        return modules[-1]

    def call(module, *inputs):
        output = case.call(module, *inputs)
        found = [each.detach().clone() for each in tensors_of(output) if isinstance(each, Tensor)]
        outputs.append({place: each.double() for place, each in enumerate(found) if not each.is_complex()})
        return output

    tolerance = max(case.tolerance, 1e-5 if case.dtype is torch.float32 else 1e-10)
    options = case._asdict() | {"tolerance": tolerance, "buffer_tolerance": tolerance, "call": call}
    options["count_products"] = False
    with lines() as said:
        assert_equals_plain(make, **{key: options[key] for key in options if key != "make_module"})
    half = len(outputs) // 2
    assert half == case.num_microbatches
    for expected, found in zip(outputs[:half], outputs[half:], strict=True):
        assert_close(found, expected, tolerance)
    assert_said(modules[1], said)
    return modules[1], said


def assert_said(stage, said):
    """What is eager is named by a line, with a reason; and only that."""
    forwards = [
        each for module in stage.modules() if isinstance(each := vars(module).get("forward"), CompiledForward)
    ]
    eager = {each.name for each in forwards if None in each.bound.values()}
    told = {line.partition(" is not compiled, ")[0]: line.partition(": ")[2] for line in said}
    assert all(told.values())
    assert eager == told.keys() & {each.name for each in forwards}
    assert told or any(bound for each in forwards for bound in each.bound.values())


# ---------------------------------------------------------------- the sweep

CASES = {
    f"{file.__name__.rpartition('.')[2]}.{name}": make_case
    for file in FILES
    for name, make_case in vars(file).items()
    if inspect.isfunction(make_case) and inspect.signature(make_case).return_annotation is Case
}
CASES |= {f"graphs.forward, {name}": partial(graphs.forward, name) for name in graphs.FORWARDS}
# A part of each of these cases stays eager. All other cases are compiled whole.
EAGER = {
    "products.linear_layer_of_sparse_input",
    "products.grouped_experts",
    "embeddings.embedding_with_sparse_gradient",
    "embeddings.embedding_with_max_norm",
    "norms.chain_used_twice",
    "precision.gradients_wider_than_parameters",
    "functions.function_that_saves_history",
    "checkpoint.checkpointed_blocks",
    "checkpoint.checkpoint_on_stage_0",
    "checkpoint.nested_checkpoints",
    "checkpoint.keywords_constants_and_none",
    "checkpoint.tuple_of_outputs",
    "checkpoint.complex_outputs",
    "checkpoint.unused_output",
    "checkpoint.parameter_used_inside_and_outside",
    "checkpoint.parameter_as_argument",
    "checkpoint.frozen_block",
    "checkpoint.frozen_layer_above_an_embedding",
    "checkpoint.input_that_is_a_view",
    "checkpoint.in_place_operations_inside",
    "checkpoint.torchs_checkpoint",
    "checkpoint.reentrant_checkpoint",
    "saved_hooks.hooks_around_one_layer",
    "models.recurrent_network",
    "models.hf_gpt2",
    "models.hf_mixtral",
    "graphs.embedding_below_frozen_layer",  # a tensor that is no buffer
    "graphs.forward, a gradient",
    "hooks.hooks_on_activations",
    "hooks.hooks_on_activations_of_stage_0",
    "hooks.full_backward_hooks",
    "hooks.full_backward_hook_that_changes_gradient",
    "hooks.hooks_on_nodes",
    "hooks.hook_on_node_of_layer",
    "hooks.non_full_backward_hook",
    "compile.block_with_graph_break",
}
TOLERANCES = {
    "models.hf_llama": 1e-6,  # its norms are float32's
    "saved_hooks.hooks_that_change_what_is_saved": 0.02,  # bfloat16: of other tensors than eager ones
}


LARGE = {"models.hf_gpt2", "models.hf_llama", "models.transformer", "compile.compiled_blocks_on_stage_0"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in LARGE else name for name in CASES]
)
def test_compiled_graphs_run_as_they_are_get_the_gradients_of_plain_autograd(name):
    case = CASES[name]()
    case = case._replace(tolerance=max(case.tolerance, TOLERANCES.get(name, 0)))
    module, said = compare(case, backend="eager")
    assert bool(said) == (name in EAGER), said
    if said:
        assert_explained(module, case)


def assert_explained(module, case):
    """`explain` gives the reason at each weight that stayed eager."""
    torch.set_default_dtype(case.dtype)
    try:
        inputs = case.make_inputs()
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        outputs = [each for each in tensors_of(case.call(module, *inputs)) if isinstance(each, Tensor)]
    finally:
        torch.set_default_dtype(torch.float32)
    told = {row.name: row.why for row in explain(outputs, inputs, module.named_parameters()).rows}
    for name, parameter in module.named_parameters():
        if hasattr(parameter, NOT_COMPILED):
            assert told[name].endswith(f"not compiled: {getattr(parameter, NOT_COMPILED)}")
    assert all(hasattr(parameter, NOT_COMPILED) for parameter in module.parameters()) or len(
        [*module.children()]
    )


INDUCTOR = {
    "a tied weight": sharing.tied_embedding_and_head,
    "a slice in place": partial(graphs.forward, "in place: a slice"),
    "an einsum": partial(products.product_with_weight, "einsum with heads"),
    "channels last": partial(convolutions.channels_last, weights_too=True),
    "a cast": precision.weight_cast_once_for_two_uses,
}
BY_DAY = "a slice in place"  # Inductor compiles each case for seconds
AT_NIGHT = [pytest.param(name, marks=pytest.mark.nightly) for name in INDUCTOR if name != BY_DAY]


@needs_inductor
@pytest.mark.parametrize("name", [BY_DAY, *AT_NIGHT])
def test_inductors_code_gets_the_gradients_of_plain_autograd(name):
    _, said = compare(INDUCTOR[name]())
    assert said == []


def test_a_tensor_parallel_module_stays_eager_by_its_hooks():
    """On a mesh of one process."""

    def gradients(is_compiled):
        torch.manual_seed(0)
        module = tensor_parallel.Mlp()
        styles = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
        parallel.parallelize_module(module, init_device_mesh("cpu", (1,)), styles)
        if is_compiled:
            compile_stage(module, backend="eager")
        x = torch.randn(5, 8, requires_grad=True)
        y = module(x)
        backward_input(y, torch.ones_like(y), [x])[1].accumulate()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = gradients(is_compiled=False)
        with lines() as said:
            found = gradients(is_compiled=True)
        for name in expected:
            one, other = (getattr(each[name], "_local_tensor", each[name]) for each in (found, expected))
            assert torch.equal(one, other), name
    finally:
        dist.destroy_process_group()
    (line,) = said
    assert "hooks on up" in line


# ---------------------------------------------------------------- what a graph can't know


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.calls, self.factor, self.loss, self.seen = 0, 1.0, None, []
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.drop(self.second(torch.tanh(self.first(x)))) * self.factor


class Counting(Two):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Losing(Two):
    """An auxiliary loss left in an attribute, as mixtures of experts do."""

    def forward(self, x):
        y = super().forward(x)
        self.loss = y.square().mean()
        return y, self.loss


class Listing(Two):
    def forward(self, x):
        self.seen.append(1)
        return super().forward(x) * len(self.seen)


class Rebinding(Two):
    """A buffer replaced, not changed."""

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return super().forward(x) + self.mean


@pytest.mark.parametrize("kind", [Counting, Losing, Listing, Rebinding])
def test_a_forward_that_does_more_than_compute_stays_eager(kind):
    def make():
        random.seed(0)
        return kind()

    module, said = compare(Case(make, lambda: leaf(5, 4)), backend="eager")
    (line,) = said
    assert "forward sets attributes or changes objects" in line
    assert (module.calls, len(module.seen)) == (2 * (kind is Counting), 2 * (kind is Listing))


def test_a_forward_may_change_buffers_in_place():
    class Averaging(Two):
        def forward(self, x):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0))
            return super().forward(x) + self.mean

    _, said = compare(Case(Averaging, lambda: leaf(5, 4)), backend="eager")
    assert said == []


@pytest.mark.parametrize("whole", [True, False])
def test_what_torch_compiles_is_left_to_it(whole):
    """In a stage compiled as a whole it is a part like any other."""

    def make():
        torch._dynamo.reset()
        module = nn.Sequential(Two(), Two())
        module[0].compile(backend="aot_eager", fullgraph=True)
        return module

    _, said = compare(Case(make, lambda: leaf(5, 4)), backend="eager", whole=whole)
    assert said == (
        [] if whole else ["stage 0 is not compiled, it stays eager: torch.compile has it already"]
    )
