"""Every kind of module that the split's tests have, compiled: right gradients, or a line that says why not.

The cases are taken from those tests: whatever one of them would hand to `assert_equals_plain` is compared
with its split side compiled. Of a test with many parameters the first are taken, and those in INDUCTOR.
"""

import inspect
import itertools
import logging
import random
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import parallel

from helpers.split import _call, assert_close, assert_equals_plain, leaf, tensors_of
from tests.autograd import (
    test_split_checkpoint,
    test_split_compile,
    test_split_convolutions,
    test_split_dtensor,
    test_split_embeddings,
    test_split_functions,
    test_split_graphs,
    test_split_hooks,
    test_split_models,
    test_split_norms,
    test_split_precision,
    test_split_products,
    test_split_saved_hooks,
    test_split_sharing,
)
from zbpp.autograd import explain
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
    test_split_products,
    test_split_convolutions,
    test_split_embeddings,
    test_split_norms,
    test_split_precision,
    test_split_sharing,
    test_split_functions,
    test_split_checkpoint,
    test_split_saved_hooks,
    test_split_models,
    test_split_graphs,
    test_split_hooks,
    test_split_compile,
]


# ---------------------------------------------------------------- cases, out of the other tests


class Case(NamedTuple):
    """What a test gives to `assert_equals_plain`."""

    make_module: object
    make_inputs: object
    call: object = None
    tolerance: float = 1e-10
    dtype: torch.dtype = torch.float64
    grads_in_b: bool = False
    count_products: bool = False
    num_microbatches: int = 2
    buffer_tolerance: float = 0.0


class Taken(BaseException):
    """Instead of the comparison. No `except Exception` of the test's is meant."""


def case_of(file, name, arguments, monkeypatch):
    """The first comparison of a test."""
    found = []

    def take(*args, **options):
        found.append(Case(*args, **options))
        raise Taken

    monkeypatch.setattr(file, "assert_equals_plain", take)
    with pytest.raises(Taken):
        getattr(file, name)(**arguments)
    return found[0]


def comparisons(file):
    """(name, a list of all its arguments) of each test that compares a module."""
    for name, test in vars(file).items():
        if name.startswith("test_") and "assert_equals_" in inspect.getsource(test):
            marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
            every = [_values(*mark.args[:2]) for mark in marks]
            yield name, [dict(itertools.chain(*each)) for each in itertools.product(*every)]


def _values(names, values):
    """Of one parametrize mark: for each of its values the (name, value) pairs."""
    names = [each.strip() for each in names.split(",")]
    plain = [getattr(each, "values", each) if hasattr(each, "id") else (each,) for each in values]
    return [[*zip(names, each, strict=True)] for each in plain]


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
        output = (case.call or _call)(module, *inputs)
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

SAME_IN_KIND = {
    "test_a_deep_graph_is_no_matter_of_recursion",
    "test_llama_of_hugging_face_as_it_returns",
    "test_llama_of_hugging_face_from_embeddings",
    "test_qwen3_of_hugging_face",
    "test_a_new_node_is_one_rule",
    "test_a_rule_may_decline",
}
FIRST = [
    (file, name, every[0]) for file in FILES for name, every in comparisons(file) if name not in SAME_IN_KIND
]
# Of these some or all stays eager, of all others nothing: no retreat without a reason.
EAGER_FILES = [
    test_split_functions,
    test_split_checkpoint,
]  # Functions, and checkpoints that count their calls
EAGER = {
    "test_experts_that_get_as_many_rows_as_choose_them_are_deferred",
    "test_a_sparse_gradient_is_left_to_b_and_stays_sparse",
    "test_max_norm_renormalises_in_the_forward_only",
    "test_a_chain_runs_once_per_microbatch_however_often_the_weight_is_used",
    "test_hooks_around_one_layer_leave_the_others_deferred",
    "test_a_recurrent_network_waits_for_every_time_step",
    "test_gpt2_of_hugging_face",
    "test_mixtral_of_hugging_face",
    "test_an_embedding_below_a_frozen_layer_keeps_its_own_dy",  # and a tensor that is no buffer
    "test_a_backward_inside_the_forward_is_undisturbed",
    "test_a_hook_on_an_activation_changes_dy_as_in_plain_autograd",
    "test_a_hook_on_the_output_of_stage_0s_lowest_site",
    "test_full_backward_hooks_of_modules_fire_once",
    "test_a_modules_backward_hook_may_change_the_input_gradient",
    "test_hooks_on_nodes_that_run_are_called_once",
    "test_a_graph_break_inside_a_block",
    "test_a_hook_on_a_layers_node_changes_its_weights_gradient",
    "test_a_linear_layer_of_a_sparse_input_is_computed_in_b",
    "test_a_modules_old_backward_hook_changes_its_weights_gradient",
    "test_gradients_wider_than_their_parameters",
}
TOLERANCES = {
    "test_llama_of_hugging_face": 1e-6,  # its norms are float32's
    "test_hooks_that_change_what_is_saved_are_obeyed": 0.02,  # bfloat16: of other tensors than eager ones
}


@pytest.mark.parametrize(
    ("file", "name", "arguments"),
    FIRST,
    ids=[name.removeprefix("test_") for _, name, _ in FIRST],
)
def test_one_case_of_each_test_with_the_graphs_run_as_they_are(file, name, arguments, monkeypatch):
    case = case_of(file, name, arguments, monkeypatch)
    case = case._replace(tolerance=max(case.tolerance, TOLERANCES.get(name, 0)))
    module, said = compare(case, backend="eager")
    assert bool(said) == (file in EAGER_FILES or name in EAGER), said
    if said:
        assert_explained(module, case)


def assert_explained(module, case):
    """`explain` gives the reason at each weight that stayed eager."""
    torch.set_default_dtype(case.dtype)
    try:
        inputs = case.make_inputs()
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        outputs = [
            each for each in tensors_of((case.call or _call)(module, *inputs)) if isinstance(each, Tensor)
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    told = {row.name: row.why for row in explain(outputs, inputs, module.named_parameters()).rows}
    for name, parameter in module.named_parameters():
        if hasattr(parameter, NOT_COMPILED):
            assert told[name].endswith(f"not compiled: {getattr(parameter, NOT_COMPILED)}")
    assert all(hasattr(parameter, NOT_COMPILED) for parameter in module.parameters()) or len(
        [*module.children()]
    )


INDUCTOR = [
    (
        test_split_products,
        "test_a_linear_layer_is_deferred_whatever_the_shape_of_its_input",
        {"shape": (2, 5, 4)},
    ),
    (test_split_products, "test_a_product_with_a_weight_is_deferred", {"name": "baddbmm"}),
    (test_split_products, "test_a_product_with_a_weight_is_deferred", {"name": "einsum with heads"}),
    (test_split_products, "test_a_product_of_a_weight_with_itself_is_right", {}),
    (test_split_convolutions, "test_a_convolution_is_deferred", {"dimensions": 2, "settings": {"groups": 2}}),
    (test_split_convolutions, "test_a_transposed_convolution_is_deferred", {"dimensions": 1, "settings": {}}),
    (
        test_split_convolutions,
        "test_channels_last_is_deferred_and_its_gradient_keeps_the_weights_layout",
        {"weights_too": True},
    ),
    (test_split_embeddings, "test_the_row_of_the_padding_gets_nothing", {"padding": 3}),
    (test_split_norms, "test_layers_around_a_norm_are_deferred", {"name": "BatchNorm2d"}),
    (test_split_norms, "test_layers_around_a_norm_are_deferred", {"name": "RMSNorm"}),
    (test_split_norms, "test_a_weight_with_a_tree_behind_it_is_computed_in_b", {"name": "weight_norm"}),
    (test_split_precision, "test_a_weight_that_autocast_casts_once_for_two_uses_is_right", {}),
    (test_split_precision, "test_parameters_in_bfloat16_have_gradients_in_bfloat16", {}),
    (test_split_sharing, "test_a_tied_embedding_and_head_are_deferred_together", {}),
    (
        test_split_sharing,
        "test_a_weight_with_one_eager_use_is_computed_in_b_as_a_whole",
        {"name": "a shared view"},
    ),
    (test_split_sharing, "test_the_first_gradient_takes_the_parameters_layout", {}),
    (test_split_saved_hooks, "test_save_on_cpu_of_every_kind_of_site", {}),
    (test_split_models, "test_an_encoder_layer_is_deferred_but_for_its_norms", {"norm_first": True}),
    (test_split_graphs, "test_what_is_frozen_gets_no_gradient", {"frozen": "first"}),
    (test_split_graphs, "test_unused_parameters_are_left_alone", {}),
    (test_split_graphs, "test_outputs_of_every_form", {"name": "a chunk"}),
    (test_split_graphs, "test_in_place_operations", {"forward": test_split_graphs.write_a_slice}),
    (test_split_graphs, "test_dropout_has_one_mask_for_f_b_and_w", {"p": 0.5}),
    (test_split_graphs, "test_complex_weights", {"name": "x @ w.t()"}),
    (test_split_hooks, "test_a_leafs_hooks_may_replace_its_gradient_one_after_another", {}),
]


@pytest.mark.parametrize(("file", "name", "arguments"), INDUCTOR)
def test_the_kinds_by_inductor(file, name, arguments, monkeypatch):
    missing = inspect.signature(getattr(file, name)).parameters.keys() - arguments.keys()
    arguments = arguments | dict.fromkeys(missing, True)
    _, said = compare(case_of(file, name, arguments, monkeypatch))
    if any("'complex' object has no attribute" in line for line in said):
        pytest.skip(f"this torch's Inductor knows no complex numbers, and the stage says so: {said}")
    assert said == []


LAYERS = [
    (test_split_models, "test_a_resnet_is_deferred_but_for_its_norms", {"needs_grad": True}, False),
    (test_split_models, "test_a_vit_is_deferred_but_for_norms_and_tokens", {}, False),
    (test_split_models, "test_gpt2_of_hugging_face", {}, False),
    (test_split_compile, "test_compiled_blocks_equal_plain_autograd_and_their_backward_runs_once", {}, True),
    (test_split_compile, "test_a_graph_break_inside_a_block", {}, True),
]


@pytest.mark.parametrize(("file", "name", "arguments", "retreats"), LAYERS)
def test_layer_by_layer(file, name, arguments, retreats, monkeypatch):
    _, said = compare(case_of(file, name, arguments, monkeypatch), backend="eager", whole=False)
    assert bool(said) == retreats


def test_a_tensor_parallel_module_stays_eager_by_its_hooks(monkeypatch):
    """On a mesh of one process."""
    parallelize_module = parallel.parallelize_module

    def parallelize_and_compile(module, *args):
        parallelize_module(module, *args)
        compile_stage(module, backend="eager")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected, _ = test_split_dtensor.gradients(0, split=False)
        monkeypatch.setattr(parallel, "parallelize_module", parallelize_and_compile)
        with lines() as said:
            found, _ = test_split_dtensor.gradients(0, split=True)
    finally:
        dist.destroy_process_group()
    assert_close(found, expected, 1e-10)
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


class Drawing(Two):
    """Python's random numbers are nobody's business but Python's."""

    def forward(self, x):
        return super().forward(x) * random.random()


@pytest.mark.parametrize("kind", [Counting, Losing, Listing, Rebinding, Drawing])
def test_a_forward_that_does_more_than_compute_stays_eager(kind):
    def make():
        random.seed(0)
        return kind()

    module, said = compare(Case(make, lambda: leaf(5, 4)), backend="eager")
    (line,) = said
    assert "forward sets attributes or changes objects" in line or kind is Drawing
    assert (module.calls, len(module.seen)) == (2 * (kind is Counting), 2 * (kind is Listing))


def test_a_forward_may_change_buffers_in_place():
    class Averaging(Two):
        def forward(self, x):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0))
            return super().forward(x) + self.mean

    _, said = compare(Case(Averaging, lambda: leaf(5, 4)), backend="eager")
    assert said == []


@pytest.mark.parametrize("change", ["a dropout's p", "a factor"])
def test_numbers_in_attributes_may_change_between_steps(change):
    def call(module, x):
        if change == "a factor":
            module.factor += 1
        else:
            module.drop.p /= 2
        return module(x)

    _, said = compare(Case(Two, lambda: leaf(5, 4), call), backend="eager")
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
