"""The split backward of every case in helpers/cases, against plain autograd; and which weights wait for W."""

from functools import partial

import pytest
import torch
from torch import nn

from helpers.cases import (
    checkpoint,
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
)
from helpers.cases.embeddings import VOCABULARY
from helpers.cases.models import LLAMA_LIKE, hugging_face, tokens, with_loss
from helpers.split import Case, assert_close, leaf, linear_weights
from zbpp.autograd import node_roles

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract"),
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook"),
]

ALL, NONE, RIGHT = "all wait", "none waits", "it is right"  # RIGHT: whatever waits


def in_b(*names):
    """B computes these gradients, W all others."""
    return frozenset(names)


INPUTS = {
    "transposed": lambda: leaf(4, 5).t(),
    "permuted": lambda: leaf(4, 2, 5).permute(1, 2, 0),
    "strided": lambda: leaf(10, 8)[::2, ::2],
    "broadcast rows": lambda: leaf(1, 4).expand(5, 4),
    "broadcast columns": lambda: leaf(5, 1).expand(5, 4),
    "broadcast batch": lambda: leaf(1, 5, 4).expand(3, 5, 4),
    "sliced": lambda: leaf(2, 5, 4)[:, 1:],
}
SETTINGS = ({}, {"bias": False}, {"stride": 2, "padding": 1}, {"dilation": 2}, {"groups": 2}, {"groups": 4})
TRANSPOSED = ({}, {"bias": False}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2})


def rows():
    """(case, its arguments, what waits: of all parameters that have a gradient)."""
    for bias in (True, False):
        for shape in [(5, 4), (4,), (2, 5, 4), (2, 3, 5, 4), (1, 4), (0, 4)]:
            yield products.linear_layer, (shape, bias), ALL
        for make_input in INPUTS.values():  # torch adds some biases apart: those are computed in B
            yield products.linear_layer_of_strided_input, (make_input, bias), {"weight"}
    for name in products.PRODUCTS:  # of w + v a tree is behind the operand
        yield products.product_with_weight, (name,), NONE if name == "w + v" else ALL
    for name in products.OTHERS:
        yield products.other_use_of_weight, (name,), NONE
    yield products.product_of_weight_with_itself, (), RIGHT
    for name in products.COMPLEX:  # its gradient is that of the conjugate
        yield products.real_weight_of_complex_product, (name,), RIGHT if name == "F.linear" else ALL
    yield products.parameter_viewed_as_complex, (), ALL
    for layout in (torch.sparse_coo, torch.sparse_csr):
        yield products.linear_layer_of_sparse_input, (layout,), NONE
    for num_rows in (1, 30):
        yield products.grouped_experts, (num_rows,), ALL

    for dimensions in (1, 2, 3):
        for settings in SETTINGS:
            yield convolutions.convolution, (dimensions, settings), ALL
        for settings in TRANSPOSED:
            yield convolutions.transposed_convolution, (dimensions, settings), ALL
    for mode in ("circular", "reflect", "replicate"):
        yield convolutions.convolution_with_padding_mode, (mode,), ALL
    yield convolutions.convolution_of_unbatched_input, (), ALL

    for shape in [(), (5,), (2, 5), (2, 3, 5), (0,)]:
        yield embeddings.embedding, (shape,), ALL
    for padding in (0, 3, VOCABULARY - 1, -1, -VOCABULARY):
        yield embeddings.embedding_with_padding, (padding,), ALL
    yield embeddings.embedding_scaled_by_frequency, (), NONE
    yield embeddings.embedding_with_sparse_gradient, (), NONE
    yield embeddings.embedding_with_max_norm, (), ALL
    yield embeddings.embedding_bag, (), RIGHT

    for name in norms.NORMS:
        yield norms.norm, (name,), NONE
        around = {"before.weight", "before.bias", "after.weight", "after.bias"}
        yield norms.layers_around_norm, (name,), around
    for name in norms.COMPUTED_WEIGHTS:
        yield norms.weight_with_tree, (name,), RIGHT
    yield norms.weight_with_chain, (), {"parametrizations.weight.original"}

    for needs_weights in (False, True):  # the packed bias goes through a view of its own
        yield models.self_attention, (needs_weights,), {"in_proj_weight", "out_proj.weight", "out_proj.bias"}
    yield models.cross_attention, (), {"in_proj_weight", "out_proj.weight"}
    yield models.attention_with_separate_weights, (), {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
    for norm_first in (False, True):
        yield models.encoder_layer, (norm_first,), {"linear1.weight", "self_attn.in_proj_weight"}
    yield models.transformer, (), RIGHT
    for name in models.RECURRENT:  # weights are used once per time step
        yield models.recurrent_network, (name,), {"weight_ih_l0", "weight_hh_l0"}
    resnet = {n for n, each in models.ResNet().named_modules() if isinstance(each, nn.Conv2d)}
    for needs_grad in (False, True):
        yield models.resnet, (needs_grad,), {*(f"{name}.weight" for name in resnet), "fc.weight", "fc.bias"}

    yield sharing.tied_layers, (), ALL
    yield sharing.layer_applied_many_times, (), ALL
    yield sharing.tied_embedding_and_head, (), ALL
    for name in sharing.USES_IN_B:  # a gradient captured at a leaf collects every path to it
        expected = RIGHT if name == "a bias of another layer" else in_b("weight")
        yield sharing.weight_with_one_use_in_b, (name,), expected
    yield sharing.gradient_that_is_dy, (), RIGHT
    for layout in sharing.LAYOUTS:
        yield sharing.existing_gradients, (layout,), {"linear.weight", "weight"}

    yield graphs.wholly_frozen, (), NONE
    yield graphs.input_without_grad, (), ALL
    yield graphs.embedding_then_layers, (), {"weight", "embedding.weight"}
    yield graphs.branch_of_parameters, (), {"first.weight"}  # torch's split loses it
    for name in graphs.FORWARDS:
        whatever = ("losses", "the input", "a parameter", "a loss on the detached input", "a gradient")
        yield graphs.forward, (name,), RIGHT if name in whatever else ALL
    yield graphs.integers_and_none_as_inputs, (), ALL
    yield graphs.input_that_is_no_leaf, (), ALL
    for p in (0.0, 0.5):
        yield graphs.dropout, (p,), ALL

    yield precision.convolution_under_autocast, (), {"weight"}
    yield precision.weight_cast_once_for_two_uses, (), {"weight"}  # both sites share the cast's node

    yield functions.deferring_function_on_stage_0, (), ALL
    yield functions.deferring_function_of_computed_weight, (), NONE
    yield functions.weight_of_function_and_layer, (), RIGHT
    yield functions.weight_of_function_used_twice, (), ALL
    yield functions.deferring_function_of_frozen_weight, (), RIGHT
    yield functions.function_with_two_outputs, (), NONE
    yield functions.function_that_saves_history, (), RIGHT

    yield hooks.hooks_that_replace_gradients, (), RIGHT
    yield hooks.hook_on_input, (), RIGHT
    yield hooks.hook_on_weight_with_use_in_b, (), RIGHT
    yield hooks.full_backward_hook_that_changes_gradient, (), RIGHT
    yield hooks.non_full_backward_hook, (), RIGHT
    for register in ("register_hook", "register_prehook"):
        for needs_grad in (True, False):  # that layer is computed in B, where the hook sees the gradient
            yield hooks.hook_on_node_of_layer, (register, needs_grad), {"second.weight", "second.bias"}

    yield saved_hooks.sites_under_save_on_cpu, (), RIGHT
    yield checkpoint.layers_beside_torchs_checkpoint, (), {"first.weight", "last.weight"}


def told(value):
    """An argument in a test's name."""
    return next(
        (name for name, each in INPUTS.items() if each is value), getattr(value, "__name__", str(value))
    )


@pytest.mark.parametrize(
    ("case", "arguments", "expected"),
    [
        pytest.param(*row, id="-".join([row[0].__name__, *map(told, row[1])]).replace(" ", "_"))
        for row in rows()
    ],
)
def test_gradients_are_those_of_plain_autograd(case, arguments, expected):
    facts = case(*arguments).compare()
    if expected is ALL:
        assert (facts.computed, bool(facts.deferred)) == (set(), True)
    elif expected is NONE:
        assert facts.deferred == set()
    elif isinstance(expected, frozenset):
        assert facts.computed == expected
    elif expected is not RIGHT:
        assert expected <= facts.deferred


WHOLE = {case.__name__: [row[1] for row in rows() if row[0] is case] for case, _, _ in rows()}


@pytest.mark.parametrize("name", WHOLE)
def test_bw_gives_the_bits_of_b_and_w(name):
    case = next(row[0] for row in rows() if row[0].__name__ == name)
    for arguments in WHOLE[name]:
        case(*arguments).compare_whole()


# ---------------------------------------------------------------- under zbpp.checkpoint as without any

CHECKPOINTED = [
    *(partial(checkpoint.checkpointed_blocks, p=p) for p in (0.0, 0.5)),  # the recompute draws F's masks
    checkpoint.checkpoint_on_stage_0,
    checkpoint.keywords_constants_and_none,
    checkpoint.tuple_of_outputs,
    checkpoint.complex_outputs,  # they passed for integers: what is before them got no gradient
    checkpoint.parameter_used_inside_and_outside,
    *(partial(checkpoint.frozen_block, frozen=part) for part in ("all of it", "its first half")),
    *(
        partial(checkpoint.frozen_layer_above_an_embedding, frozen=names)
        for names in (("layer",), ("layer", "embedding"), ("layer", "head"), ("embedding",))
    ),
    checkpoint.input_that_is_a_view,
    checkpoint.in_place_operations_inside,
]


@pytest.mark.parametrize("case", CHECKPOINTED, ids=lambda case: getattr(case, "func", case).__name__)
def test_gradients_are_those_without_checkpointing(case):
    from zbpp import checkpoint as zbpps

    found, expected = case(how=zbpps).compare(), case(how=checkpoint.plainly).compare()
    assert_close(found.grads, expected.grads)
    assert found.deferred
    case(how=zbpps).compare_whole()


# ---------------------------------------------------------------- more than gradients


@pytest.mark.parametrize("weights_too", [False, True])
def test_channels_last_keeps_the_weights_layout(weights_too):
    strides = []
    facts = convolutions.channels_last(weights_too, strides).compare()
    assert len(facts.deferred) == 4
    assert {name: grad.stride() for name, grad in facts.grads.items()} == strides[0]


def test_the_first_gradient_takes_the_parameters_layout():
    facts = sharing.transposed_parameters().compare()
    assert (facts.grads["weight"].stride(), facts.grads["scale"].stride()) == ((1, 6), (1, 5))


@pytest.mark.parametrize("use", [lambda p: p.sum(), lambda p: p.mean(0), lambda p: p.expand(3, 5, 4)])
def test_a_gradient_without_memory_of_its_own_is_copied(use):
    """`p.sum()` gives one of stride 0."""
    assert sharing.expanded_gradient(use).compare().grads["p"].stride() == (4, 1)


def test_a_sparse_gradient_stays_sparse():
    assert embeddings.embedding_with_sparse_gradient().compare().grads["weight"].is_sparse


def test_running_statistics_move_once_per_forward():
    """Equal to plain autograd's, and counted: B and W run no forward."""
    counted = []
    norms.running_statistics(counted=counted).compare()
    assert counted == [1, 2, 1, 2]


def test_a_chain_runs_once_per_microbatch_however_often_the_weight_is_used():
    """Two sites share the chain's head: their gradients are summed there first."""
    runs = []
    facts = norms.chain_used_twice(runs=runs).compare()
    assert facts.deferred == ({"weight"} if node_roles.FUNCTION_NODES_LIVE else set())
    assert len(runs) == 2 + 2  # two microbatches of plain autograd, two of ours


@pytest.mark.parametrize("frozen", ["first", "second", "first.weight", "second.weight", "first.bias"])
def test_what_is_frozen_gets_no_gradient(frozen):
    facts = graphs.partly_frozen(frozen).compare()
    trained = {name for name in linear_weights(graphs.Two()) if not name.startswith(frozen)}
    assert facts.grads.keys() == trained
    assert facts.computed <= {f"{frozen.removesuffix('.weight')}.bias"}  # a bias waits with its weight only


def test_an_embedding_below_a_frozen_layer_keeps_its_own_dy():
    """Small, where what the wide layer above it gets is not."""
    facts = graphs.embedding_below_frozen_layer().compare()
    assert (facts.deferred, facts.held_bytes) == ({"embedding.weight"}, 8 * (5 + 5 * 4))


def test_gradients_under_autocast_have_the_parameters_dtype():
    """Microbatches are rounded to bfloat16 one by one in either backward, then summed in float32."""
    facts = precision.linear_layers_under_autocast().compare()
    assert facts.deferred == linear_weights(precision.network())
    assert {grad.dtype for grad in facts.grads.values()} == {torch.float32}
    facts = precision.parameters_in_bfloat16().compare()
    assert {grad.dtype for grad in facts.grads.values()} == {torch.bfloat16}


# ---------------------------------------------------------------- Hugging Face, from configs, unmodified


def test_llama_of_hugging_face():
    case = models.hf_llama()
    linears = linear_weights(case.make_module())
    assert len(linears) == 3 * 7 + 1
    assert case.compare().deferred == linears | {"model.embed_tokens.weight"}
    make_model = hugging_face("Llama", **LLAMA_LIKE)  # a middle stage: its input needs a gradient
    middle = Case(make_model, lambda: leaf(2, 7, 16), lambda model, x: model(inputs_embeds=x).logits)
    assert middle.compare().deferred == linear_weights(make_model())


def test_gpt2_of_hugging_face():
    """Conv1D layers, and a head tied to the embedding: all uses wait, so both do."""
    case = models.hf_gpt2()
    facts, model = case.compare(), case.make_module()
    assert model.lm_head.weight is model.transformer.wte.weight
    conv1d = {n for n, each in model.named_modules() if type(each).__name__ == "Conv1D"}
    assert len(conv1d) == 2 * 4
    assert {f"{name}.weight" for name in conv1d} <= facts.deferred
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= facts.deferred
    assert {name.split(".")[-2] for name in facts.computed} == {"ln_1", "ln_2", "ln_f"}


def test_qwen3_of_hugging_face():
    """Norms on queries and keys, tied embeddings."""
    make_model = hugging_face("Qwen3", **(LLAMA_LIKE | {"head_dim": 4, "tie_word_embeddings": True}))
    linears = linear_weights(make_model())
    found = Case(make_model, tokens, with_loss).compare().deferred
    assert found == linears - {"lm_head.weight"} | {"model.embed_tokens.weight"}


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_mixtral_of_hugging_face(experts):
    """A router that data decides, one weight for all experts, an auxiliary loss over all routers."""
    case = models.hf_mixtral(experts)
    names = ("gate_up_proj", "down_proj")
    weights = {f"model.layers.{i}.mlp.experts.{name}" for i in range(3) for name in names}
    assert linear_weights(case.make_module()) | weights <= case.compare().deferred
