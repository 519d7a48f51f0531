"""The last stage's own loss (model.head), against plain autograd and torch's cross_entropy, in float64."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import float64
from zbpp import (
    ActivationOffload,
    Costs,
    GradientRelease,
    HeadAtOnce,
    MasterWeights,
    Pipeline,
    make_mesh,
    plan,
)
from zbpp.autograd import recompute
from zbpp.autograd.compiled import compile_stage
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.measure.live_tensors import LiveTensors
from zbpp.models.gpt import Gpt
from zbpp.models.hf import HuggingFace
from zbpp.models.layers import HEADS
from zbpp.models.llama import Llama
from zbpp.stage_api import IGNORED, blocks_of, mean_over_tokens

WORDS, TIME, M = 19, 8, 4
SIZES = {"vocab_size": WORDS, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "sequence_length": TIME}
MODELS = {
    "gpt": lambda **options: Gpt(**SIZES, **options),
    "gpt, tied": lambda **options: Gpt(**SIZES, tie_embeddings=True, **options),
    "llama": lambda **options: Llama(**SIZES, intermediate_size=24, **options),
    "llama, tied": lambda **options: Llama(**SIZES, intermediate_size=24, tie_embeddings=True, **options),
}
LIBRARY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LIBRARY["num_key_value_heads"] = 2
FAMILIES = {  # the config of a family -> why the last stage leaves the loss to the logits; "": it does not
    "llama, untied": ({}, ""),
    "qwen3": ({"head_dim": 8, "tie_word_embeddings": True}, ""),
    "granite": ({}, ""),
    "granite, scaled": ({"logits_scaling": 2.0}, "scaled, capped"),
    "gemma2": ({"head_dim": 8}, "scaled, capped"),
    "phi": ({}, "bias"),
}


def family(name, **options):
    config = {**LIBRARY, **FAMILIES[name][0], "model_type": name.partition(",")[0]}
    return HuggingFace(config=config, vocab_size=WORDS, sequence_length=TIME, **options)


OWN = [head for head in HEADS if head != "whole"]


def batch():
    tokens = torch.randint(WORDS, (2 * M, TIME + 1), generator=torch.Generator().manual_seed(0))
    target = tokens[:, 1:].clone()
    target[1::3, ::2] = -100
    return tokens[:, :-1], target


def model_of(name, **options):
    return MODELS[name](**options) if name in MODELS else family(name, **options)


def expected(name, change=lambda stage: None):
    """Each microbatch's part of the loss, and gradients, of plain autograd: one mean over all targets."""
    stage = model_of(name).build_stage(0, 1).double()
    change(stage)
    losses, num_targets = [], (batch()[1] != IGNORED).sum()
    for inputs, target in zip(*(each.chunk(M) for each in batch()), strict=True):
        total = F.cross_entropy(stage(inputs).flatten(0, 1), target.flatten(), reduction="sum")
        losses.append(total * M / num_targets)
        (losses[-1] / M).backward()
    return losses, gradients(stage.named_parameters())


def gradients(named):
    """Whole gradients by name, of those that are trained."""
    found = {}
    for name, parameter in named:
        if parameter.grad is not None:
            whole = getattr(parameter.grad, "full_tensor", lambda gradient=parameter.grad: gradient)
            found[name] = whole()
    return found


class Changed:
    """A model whose stages are in float64 and changed."""

    def __init__(self, model, change):
        self.model, self.change = model, change

    def build_stage(self, index, num_stages):
        stage = self.model.build_stage(index, num_stages).double()
        if torch.get_default_device().type != "meta":
            self.change(stage)
        return stage

    def loss(self, output, target):
        raise AssertionError("the pipeline has a loss_fn")

    def tied(self):
        return self.model.tied()

    def parallelize(self, stage, mesh):
        self.model.parallelize(stage, mesh)


def pipeline_of(model, schedule="zb_v", change=lambda stage: None, **options):
    """A pipeline of one rank; zb_v has two stages, the others one."""
    loss = options.pop("loss_fn", model.loss)
    return Pipeline(Changed(model, change), plan(schedule, 1, M), loss, **options)


def trained(pipeline):
    inputs, target = batch()
    losses = pipeline.step(inputs, target=target)
    return losses, gradients(pipeline.named_parameters())


def assert_equal(found, right, tolerance=1e-10):
    for mine, plain in zip(found[0], right[0], strict=True):
        torch.testing.assert_close(mine, plain.detach(), rtol=tolerance, atol=0)
    assert found[1].keys() == right[1].keys()
    for name, gradient in right[1].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "zb_v"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_plain_autograds(name, head, schedule):
    model = MODELS[name](head=head)
    assert_equal(trained(pipeline_of(model, schedule)), expected(name))


# ---------------------------------------------------------------- with other switches


def compiled(whole):
    return lambda stage: compile_stage(stage, whole=whole, backend="eager")


def recomputed(stage):
    for block in blocks_of(stage):
        recompute(block)


def frozen_head(stage):
    if "head" in stage._modules:
        stage.head.weight.requires_grad_(False)


def only_the_head(stage):
    stage.requires_grad_(False)
    if "head" in stage._modules:
        stage.head.weight.requires_grad_(True)


def biased(stage):
    """A hook that changes the logits: they are no product with the weight any more."""
    if "head" in stage._modules:
        stage.head.register_forward_hook(lambda module, args, logits: 3 * torch.tanh(logits / 3))


def masked(stage):
    if "head" in stage._modules:
        stage.head.weight.register_hook(lambda gradient: gradient * 2)


CHANGES = {
    "compiled": compiled(True),
    "compiled layers": compiled(False),
    "recomputed blocks": recomputed,
    "recomputed stages": recompute,
    "frozen head": frozen_head,
    "a hook of the head": biased,
    "a hook of the weight": masked,
}
IN_BOTH = {"frozen head", "a hook of the head", "a hook of the weight"}  # in plain autograd, too


# Dynamo takes seconds for each.
COMPILED_BY_DAY = {("compiled", "auto", True), ("compiled layers", "recompute", False)}


def by_night(cases, is_at_night):
    return [pytest.param(*case, marks=[pytest.mark.nightly] if is_at_night(*case) else []) for case in cases]


@pytest.mark.parametrize(
    "change, head, at_once",
    by_night(
        product(CHANGES, OWN, (False, True)),
        lambda *case: "compiled" in case[0] and case not in COMPILED_BY_DAY,
    ),
)
def test_it_goes_with(change, head, at_once):
    extras = [HeadAtOnce()] if at_once else []
    pipeline = pipeline_of(MODELS["llama"](head=head), change=CHANGES[change], extras=extras)
    right = expected("llama", CHANGES[change] if change in IN_BOTH else lambda stage: None)
    assert_equal(trained(pipeline), right)


@pytest.mark.parametrize(
    "head, schedule, change",
    by_night(
        product(OWN, ["zb_h1", "zb_v"], ["compiled", "recomputed blocks", "recomputed stages"]),
        lambda head, schedule, change: change == "compiled" and (head, schedule) != ("auto", "zb_v"),
    ),
)
def test_a_tied_head_goes_with(head, schedule, change):
    """On one rank: the head's weight is the embedding's, in the same stage or in another one."""
    pipeline = pipeline_of(MODELS["gpt, tied"](head=head), schedule, CHANGES[change])
    assert_equal(trained(pipeline), expected("gpt, tied"))


def test_a_frozen_body_trains_the_head_alone():
    for head in OWN:
        found = trained(pipeline_of(MODELS["gpt"](head=head), "zb_h1", only_the_head))
        right = expected("gpt", only_the_head)
        assert right[1].keys() == {"head.weight"}
        assert_equal(found, right)


@pytest.mark.parametrize("head", OWN)
def test_activations_that_leave_and_weights_on_the_host(head):
    offload = ActivationOffload(Costs(f=1, b=1, w=1, host=0.1), least_bytes=1)
    with pipeline_of(MODELS["gpt"](head=head), "gpipe", extras=[offload]) as pipeline:
        assert_equal(trained(pipeline), expected("gpt"))
        assert any(offload.chosen)
    stage = MODELS["gpt"](head=head).build_stage(0, 1).double()
    OffloadedWeights({0: stage})
    model = MODELS["gpt"](head=head)
    assert_equal(trained(Pipeline({0: stage}, plan("zb_h1", 1, M), model.loss)), expected("gpt"))


@pytest.mark.parametrize("head", OWN)
def test_updates_inside_the_step_are_those_behind_it(head):
    import optimi

    found = []
    for release in (False, True):
        pipeline = pipeline_of(MODELS["llama"](head=head))
        optimizer = optimi.AdamW(pipeline.parameters(), lr=1e-2, gradient_release=release)
        if release:
            pipeline.use(GradientRelease(optimizer))
        for _ in range(2):
            trained(pipeline)
            if not release:
                optimizer.step()
                optimizer.zero_grad()
        found.append({name: each.detach().clone() for name, each in pipeline.named_parameters()})
    for name, plain in found[0].items():
        assert torch.equal(found[1][name], plain), name


@mean_over_tokens
def plain_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def losses_in_bfloat16(head, loss_fn=None):
    """The losses of ten steps with float32 masters."""
    model = MODELS["llama"](head=head)
    pipeline = Pipeline({0: model.build_stage(0, 1)}, plan("zb_h1", 1, M), loss_fn or model.loss)
    masters = MasterWeights(pipeline.parameters(), torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.01)
    inputs, target = batch()
    losses = []
    for _ in range(10):
        masters.zero_grad()
        losses.append(torch.stack(pipeline.step(inputs, target=target)).mean().item())
        optimizer.step()
        masters.update()
    return losses


def test_losses_with_masters_are_those_of_torchs_cross_entropy():
    plain = losses_in_bfloat16("whole", plain_loss)
    assert plain[-1] < 0.8 * plain[0]
    for head in HEADS:
        assert losses_in_bfloat16(head) == pytest.approx(plain, rel=0.01), head


# ---------------------------------------------------------------- who wants logits


@pytest.mark.parametrize("head", HEADS)
def test_whoever_wants_logits_gets_them(head):
    """predict, outputs, metrics, observers, a loss of somebody else."""
    model = MODELS["llama"](head=head)
    inputs, target = batch()
    logits = model.build_stage(0, 1).double()(inputs)
    pipeline = pipeline_of(model)
    torch.testing.assert_close(pipeline.predict(inputs), logits)
    losses, outputs, metrics = pipeline.evaluate(
        inputs, target=target, return_outputs=True, metrics=model.metrics
    )
    torch.testing.assert_close(outputs, logits)
    shares = [model.metrics(*each) for each in zip(logits.chunk(M), target.chunk(M), strict=True)]
    assert metrics["accuracy"] == pytest.approx(float(sum(each["accuracy"] for each in shares)) / M)
    torch.testing.assert_close(losses, pipeline.evaluate(inputs, target=target), rtol=1e-12, atol=0)
    seen = []
    pipeline.forward(inputs, observe=lambda output, target: seen.append(output))
    torch.testing.assert_close(torch.cat(seen), logits)
    squares = pipeline_of(model, loss_fn=lambda output, target: output.square().mean())
    found = squares.step(inputs, target=target)
    torch.testing.assert_close(torch.stack(found).mean(), logits.square().mean())


MANY_WORDS = 2000


def most_held(head):
    """The most bytes that a microbatch leaves for W."""
    model, seen = Llama(**{**SIZES, "vocab_size": MANY_WORDS}, head=head), []
    pipeline = pipeline_of(model, "zb_h1")
    worker = pipeline._rank.workers[0]
    run_w = worker.run_w

    def looked_at(microbatch, weight_grads):
        seen.append(weight_grads.held_bytes)
        run_w(microbatch, weight_grads)

    worker.run_w = looked_at
    trained(pipeline)
    return max(seen)


def test_recompute_leaves_no_gradient_of_logits_for_w():
    logits = 2 * TIME * MANY_WORDS * 8
    held = {head: most_held(head) for head in HEADS}
    assert held["auto"] == held["whole"] > logits
    assert held["recompute"] < held["auto"] - 0.9 * logits


def test_a_head_that_is_none_of_the_three_is_refused():
    for make in MODELS.values():
        with pytest.raises(ValueError, match="head=half: write one of auto, whole, recompute"):
            make(head="half")


def test_a_head_that_was_replaced_is_called():
    class Twice(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.head = head

        def forward(self, x):
            return 2 * self.head(x)

    def change(stage):
        if "head" in stage._modules:
            stage.head = Twice(stage.head)

    for head in OWN:
        assert_equal(trained(pipeline_of(MODELS["gpt"](head=head), change=change)), expected("gpt", change))


def with_bias(stage):
    if "head" in stage._modules:
        stage.head.bias = nn.Parameter(torch.linspace(-1, 1, len(stage.head.weight), dtype=torch.float64))


def with_another_forward(stage):
    if "head" in stage._modules:
        before = stage.head.forward
        stage.head.forward = lambda *args: 2 * before(*args)


def with_a_hook(stage):
    if "head" in stage._modules:
        stage.register_forward_hook(lambda module, args, logits: 2 * logits)


@pytest.mark.parametrize("change", [with_bias, with_another_forward, with_a_hook])
def test_what_was_changed_in_the_last_stage_has_its_effect(change):
    for head in OWN:
        assert_equal(trained(pipeline_of(MODELS["gpt"](head=head), change=change)), expected("gpt", change))


# ---------------------------------------------------------------- families of the library


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_leaves_the_loss_to_its_last_stage_if_its_logits_are_a_product(name, caplog):
    model, why = family(name), FAMILIES[name][1]
    found = trained(pipeline_of(model))
    assert_equal(found, expected(name))
    (said,) = {each for each in caplog.messages if "head=whole" in each} or {""}
    assert why in said
    assert bool(said) == bool(why)
    assert (model._cut(2).head == "lm_head") == (why == "")
    if why:
        with pytest.raises(ValueError, match=f"head=recompute can't be, since .*{why}"):
            family(name, head="recompute").build_stage(0, 2)
    else:
        assert_equal(trained(pipeline_of(family(name, head="recompute"))), found, 1e-5)  # norms in float32


# ---------------------------------------------------------------- over two processes


def sharded(rank, cases, tensor=1):
    """FSDP2 over two processes that see the same data; tensor: how many ranks share each process's layers."""
    found = []
    with float64():
        mesh = make_mesh(shard=2, tensor=tensor)
        for (name, schedule), head, (reshard, at_once) in cases:
            options = {"mesh": mesh, "reshard": reshard, "extras": [HeadAtOnce()] if at_once else []}
            with pipeline_of(MODELS[name](head=head), schedule, **options) as pipeline:
                found.append(trained(pipeline))
    return found


SHARDED = [("llama", "zb_v"), ("gpt, tied", "zb_h1")]


@pytest.mark.parametrize(
    "ways",
    [
        [("step", False), ("step", True), ("microbatch", True)],
        pytest.param([("microbatch", False)], marks=pytest.mark.nightly),
    ],
)
def test_heads_in_shards(ways):
    cases = [*product(SHARDED, OWN, ways)]
    right = {name: expected(name) for name, _ in SHARDED}
    for everything in run_ranks(sharded, 2, cases):
        for ((name, _), *_), found in zip(cases, everything, strict=True):
            assert_equal(found, right[name])


def test_shards_of_heads_whose_words_are_split():
    """Without kept logits, W reads a weight that is gathered for it."""
    cases = [*product([("llama", "zb_v")], OWN, [("microbatch", False)])]
    right = expected("llama")
    for everything in run_ranks(sharded, 4, cases, 2):
        for found in everything:
            assert_equal(found, right)


def split_by_tensor(rank, cases):
    with float64():
        mesh = make_mesh(tensor=2)
        found = []
        for name, head, sequence_parallel in cases:
            options = {"sequence_parallel": True} if sequence_parallel else {}
            model = model_of(name, head=head, **options)
            with pipeline_of(model, mesh=mesh) as pipeline:
                found.append(trained(pipeline))
        with pytest.raises(ValueError, match="model.head=auto"):  # its weight is sharded along hidden
            trained(pipeline_of(MODELS["gpt, tied"](head="recompute"), mesh=mesh))
        return found, {head: most_alive(head, mesh) for head in ("auto", "whole")}


def most_alive(head, mesh):
    """The most bytes of a step beside the weights; gradients exist."""
    model = Llama(**{**SIZES, "vocab_size": MANY_WORDS}, head=head)
    with pipeline_of(model, "1f1b", mesh=mesh) as pipeline:
        trained(pipeline)
        with LiveTensors() as live:
            trained(pipeline)
        return live.highest


ALL_SPLIT = [
    *product(MODELS, ("auto",), (False, True)),
    *product(("gpt", "llama"), ("recompute",), (False, True)),
    ("granite", "auto", False),
]
SOME_SPLIT = [ALL_SPLIT[0], *ALL_SPLIT[3:8:2], ALL_SPLIT[-2], ALL_SPLIT[-1]]


@pytest.mark.parametrize(
    "cases", [SOME_SPLIT, pytest.param(ALL_SPLIT, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_heads_whose_words_are_split_over_ranks(cases):
    """19 words over two ranks. No rank holds the logits of all words."""
    for found, alive in run_ranks(split_by_tensor, 2, cases):
        for (name, *_), mine in zip(cases, found, strict=True):
            assert_equal(mine, expected(name))
        assert alive["auto"] < alive["whole"] - TIME * MANY_WORDS * 8
