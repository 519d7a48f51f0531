"""A traced module's stages against the module itself: plain autograd, float64."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import pipe_split
from torch.nn import functional as F

from helpers.processes import run_ranks
from zbpp import Pipeline, auxiliary_loss, make_mesh, plan, trace_stages
from zbpp.training.batches import batch_for

NUM_MICROBATCHES = 4


class Tied(nn.Module):
    """A decoder whose head is its embedding, with a mask by keyword and a skip over the middle."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.gate = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, tokens, *, is_scaled=True, mask=None):
        x = first = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x * self.scale if is_scaled else x, src_key_padding_mask=mask)
        return {"logits": self.head(x + self.gate(first))}


class UNet(nn.Module):
    """Convolutions, each way down joined to the way up; an activation in place, statistics in a buffer."""

    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.down2 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
        self.up2 = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.up1 = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x):
        outer = self.down1(x)
        inner = F.relu(self.down2(outer))
        with torch.no_grad():
            level = outer.mean()
        y = self.up2(self.middle(inner) + inner).relu_()
        return self.up1(torch.cat([y, outer], 1)) - level


def bert():
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "bert", vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8, intermediate_size=9, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def tokens(*shape):
    return torch.randint(12, shape)


def logits(output, target):
    return F.cross_entropy(output["logits"].flatten(0, -2), target.flatten())


# model, batch by microbatches (args, kwargs, target), split points, loss
MODELS = {
    "tied": (
        Tied,
        lambda: ((tokens(8, 5),), {"mask": torch.rand(8, 5) < 0.2, "is_scaled": True}, tokens(8, 5)),
        ["layers.0", "layers.1"],
        logits,
    ),
    "u-net": (
        UNet,
        lambda: ((torch.randn(8, 2, 8, 8).double(),), {}, torch.randn(8, 2, 8, 8).double()),
        ["middle", "up2"],
        F.mse_loss,
    ),
    "bert": (
        bert,
        lambda: (
            (),
            {"input_ids": tokens(8, 6), "attention_mask": (torch.rand(8, 6) < 0.8).long()},
            tokens(8) % 2,
        ),
        ["bert.encoder.layer.0", "bert.encoder.layer.1"],
        logits,
    ),
}


def first_microbatch(args, kwargs):
    def cut(value):
        return value[: len(value) // NUM_MICROBATCHES] if isinstance(value, torch.Tensor) else value

    return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


def made(kind):
    torch.manual_seed(0)
    make, batch, points, loss = MODELS[kind]
    module = make().double().train()
    return module, batch(), points, loss


def plain(module, args, kwargs, target, loss_fn):
    """Mean loss and gradients of autograd, one microbatch after the other."""

    def cuts(value):
        is_tensor = isinstance(value, torch.Tensor)
        return value.chunk(NUM_MICROBATCHES) if is_tensor else [value] * NUM_MICROBATCHES

    losses = []
    for index in range(NUM_MICROBATCHES):
        outputs = module(
            *[cuts(each)[index] for each in args], **{n: cuts(v)[index] for n, v in kwargs.items()}
        )
        loss = loss_fn(outputs, cuts(target)[index])
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.detach())
    return losses


def assert_same_gradients(found, expected):
    largest = max(each.grad.abs().max() for each in expected.values() if each.grad is not None)
    for name, parameter in expected.items():
        if parameter.grad is None:
            assert found[name].grad is None
            continue
        bound = 1e-12 * max(parameter.grad.abs().max(), 1e-6 * largest)
        assert (found[name].grad - parameter.grad).abs().max() <= bound, name


def named(stages):
    return {name: each for stage in stages.values() for name, each in stage.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_a_traced_module_are_plain_autograds(kind):
    """Skips over stages, a mask by keyword, a tied head, buffers, in-place activations, no_grad inside."""
    module, (args, kwargs, target), points, loss_fn = made(kind)
    whole = copy.deepcopy(module)
    example, example_kwargs = first_microbatch(args, kwargs)
    stages = trace_stages(module, example, points, example_kwargs=example_kwargs)
    timetable = plan("interleaved_zb", num_ranks=1, num_microbatches=NUM_MICROBATCHES, stages_per_rank=3)
    pipeline = Pipeline(stages, timetable, loss_fn)
    losses = pipeline.step(*args, target=target, **kwargs)
    torch.testing.assert_close(losses, plain(whole, args, kwargs, target, loss_fn), rtol=1e-12, atol=0)
    # The module's own parameters: an optimizer made from it sees the gradients.
    assert_same_gradients(dict(module.named_parameters()), dict(whole.named_parameters()))
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, whole.get_buffer(name), rtol=1e-12, atol=0)
    assert all(each is module.get_parameter(name) for name, each in named(stages).items())
    assert sorted(named(stages)) == sorted(dict(module.named_parameters()))
    states = [stage.state_dict() for stage in stages.values()]
    assert sorted(name for state in states for name in state) == sorted(module.state_dict())


class Echo(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return {"logits": self.head(self.layer(self.embedding(tokens)))}


def an_echo():
    torch.manual_seed(0)
    return Echo().double(), tokens(8, 5), tokens(8, 5)


def two_ranks_with_a_tied_embedding(rank):
    module, batch, target = an_echo()
    stages = trace_stages(module, batch[:2], ["layer"])
    mine = {rank: stages[rank]}
    with Pipeline(mine, plan("zb_h1", 2, NUM_MICROBATCHES), logits) as pipeline:
        args = (batch,) if rank == 0 else ()
        losses, evaluated = pipeline.step(*args, target=target), pipeline.evaluate(*args, target=target)
    return losses, evaluated, {name: each.grad for name, each in stages[rank].named_parameters()}


def test_an_embedding_tied_to_a_head_on_another_rank_gets_both_gradients():
    """The weight travels along, its gradient comes back: no rank has a second copy that drifts apart."""
    module, batch, target = an_echo()
    expected = plain(module, (batch,), {}, target, logits)
    (_, _, first), (losses, evaluated, last) = run_ranks(two_ranks_with_a_tied_embedding, 2)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(evaluated, expected, rtol=1e-12, atol=0)  # no dropout: eval mode is the same
    assert list(first) == ["embedding.weight"]
    assert list(last) == ["layer.weight", "layer.bias"]
    for name, parameter in module.named_parameters():
        torch.testing.assert_close((first | last)[name], parameter.grad, rtol=1e-10, atol=1e-14)


class Chain(nn.Module):
    """a, b, c: three layers, called as `forward` is told."""

    def __init__(self, forward, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.how = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.how(self, *args, **kwargs)


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def in_a_row(stages, *args):
    for stage in stages.values():
        args = stage(*args)
        args = args if isinstance(args, tuple) else (args,)
    return args[0]


def test_dropout_follows_the_mode_of_the_stage():
    """torch's tracer bakes the mode in: `eval()` of what it returns leaves dropout on."""
    module = Chain(lambda m, x: m.b(m.drop(m.a(x))), drop=nn.Dropout(0.5))
    stages = trace_stages(module, X, ["b"])
    torch.manual_seed(1)
    expected = module(X)
    torch.manual_seed(1)
    assert torch.equal(in_a_row(stages, X), expected)
    for stage in stages.values():
        stage.eval()
    assert torch.equal(in_a_row(stages, X), module.eval()(X))
    pipeline = Pipeline({i: each.train() for i, each in stages.items()}, plan("zb_v", 1, 4), F.mse_loss)
    batch = X.repeat(4, 1)
    losses = pipeline.evaluate(batch, target=batch)
    torch.testing.assert_close(torch.stack(losses), F.mse_loss(module(X), X).detach().expand(4))
    assert all(stage.training for stage in stages.values())


def test_the_module_is_left_as_it_was():
    """Tracing and checking change no hook, mode, gradient, buffer or random number."""
    module = Chain(lambda m, x: m.b(m.norm(m.a(x))), norm=nn.BatchNorm1d(4), drop=nn.Dropout().eval())
    before, state = torch.random.get_rng_state(), copy.deepcopy(module.state_dict())
    trace_stages(module, X, ["b"])
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(dict(module.state_dict()), dict(state), rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert (module.training, module.norm.training, module.drop.training) == (True, True, False)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def replacing(m, x):
    m.count = m.count + 1
    return m.b(m.a(x) * m.count)


def test_a_buffer_that_forward_replaces_keeps_its_value_from_step_to_step():
    module = Chain(replacing)
    module.register_buffer("count", torch.zeros(()))
    stages = trace_stages(module, X, ["b"])
    first, second = in_a_row(stages, X), in_a_row(stages, X)
    assert stages[0].count == module.count == 2
    module.count.zero_()
    torch.testing.assert_close([module(X), module(X)], [first, second])


def test_calls_of_pipe_split_in_forward_are_split_points():
    def forward(m, x):
        x = m.a(x)
        pipe_split()
        return m.c(m.b(x))

    module = Chain(forward)
    stages = trace_stages(module, (X,), ["c"])
    assert [list(dict(stage.named_children())) for stage in stages.values()] == [["a"], ["b"], ["c"]]
    assert torch.equal(in_a_row(stages, X), module(X))


def test_a_module_on_meta_can_be_traced_and_get_its_weights_later():
    """No process needs to hold the whole model."""
    with torch.device("meta"):
        module = Chain(lambda m, x: m.b(m.a(x)))
    with pytest.raises(ValueError, match="on the meta device can't be run: write check=False"):
        trace_stages(module, X.to("meta"), ["b"])
    stage = trace_stages(module, X.to("meta"), ["b"], check=False)[1].to_empty(device="cpu")
    whole = Chain(lambda m, x: m.b(m.a(x)))
    stage.load_state_dict({"b.weight": whole.b.weight, "b.bias": whole.b.bias})
    assert torch.equal(stage(X), whole.b(X))


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def counting(m, x):
    m.calls += 1
    return m.b(m.a(x) * m.calls)


def doubled(m, x):
    y = m.a(x)
    y.register_hook(lambda grad: 2 * grad)
    return m.b(y)


def aliased(m, x):
    y = m.a(x)
    flat = y.view(-1)
    z = m.b(x)
    y.add_(1)  # flat changes with it, if both are in one memory
    return z + flat.view(2, 4)


def branching(m, x):
    return m.b(m.a(x)) if x.sum() > 0 else m.c(x)


def reporting(m, x):
    auxiliary_loss("z", m.c(x).square().mean())
    return m.b(m.a(x))


@pytest.mark.parametrize(
    "forward, attributes, points, message",
    [
        (reporting, {}, ["b"], r"Chain reports auxiliary losses \('z'\), which a trace does not contain"),
        (lambda m, x: m.b(Thrice.apply(m.a(x))), {}, ["b"], "gradients 'a.(weight|bias)' differs"),
        (doubled, {}, ["b"], "gradients 'a.(weight|bias)' differs"),
        (counting, {"calls": 0}, ["b"], "Python state"),
        (aliased, {}, ["b"], "the outputs '0' differs"),
        (branching, {}, ["b"], "torch.export can't trace Chain .training mode.: .*; if forward branches"),
        (lambda m, x: m.n(m.b(m.n(m.a(x)))), {"n": nn.BatchNorm1d(4)}, ["b"],
         "stage 1 would take .* in eval mode"),
        (lambda m, x: m.b(m.a(x)[x[:, 0] > 0]), {}, ["b"], r"\[u0, 4\], is no tensor of a fixed shape"),
        (lambda m, x: m.b(m.b(m.a(x))), {}, ["b"], "forward calls 'b' 2 times: split at a submodule"),
        (lambda m, x: m.b(m.a(x)), {}, ["c"], "forward calls 'c' 0 times"),
        (lambda m, x: m.l[1](m.l[0](x)), {"l": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])}, ["l"],
         "forward calls 'l' 0 times: split at a submodule that it calls once, such as l.1"),
        (lambda m, x: m.b(m.a(x)), {}, "b", "split_points is a str, not a list of names of submodules"),
        (lambda m, x: m.b(m.a(x)), {}, X, "split_points is a Tensor, not a list"),
        (lambda m, x: m.b(m.a(x)), {}, ["a"], "stage 0 of 2 would compute nothing"),
        (lambda m, x: m.b(m.a(x)) * m.w, {"w": torch.ones(4, requires_grad=True)}, ["b"],
         "make it an nn.Parameter"),
    ],
)  # fmt: skip
def test_a_module_that_a_trace_would_get_wrong_is_refused(forward, attributes, points, message):
    with pytest.raises(ValueError, match=message):
        trace_stages(Chain(forward, **attributes), X, points)


def test_a_stage_refuses_another_microbatch_than_the_example():
    """The trace is for one shape, and numbers made of it are constants there."""
    stages = trace_stages(Chain(lambda m, x, scale=2: m.b(m.a(x)).sum(0) / len(x)), X, ["b"])
    with pytest.raises(
        ValueError, match=r"traced for \(float32\[2, 4\]\), got \(float32\[4, 4\]\): .*one microbatch"
    ):
        stages[0](X.repeat(2, 1))
    with pytest.raises(ValueError, match=r"stage 1 was traced for .*, got \(float64\[2, 4\]\)"):
        stages[1](X.double())
    with pytest.raises(
        TypeError, match="got 1 positional arguments and the keywords .'scale'.; the example has 1"
    ):
        stages[0](X, scale=3)


class Two(nn.Module):
    """Two linear layers, each in a module of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Sequential(nn.Linear(4, 6)), nn.Sequential(nn.Linear(6, 4))

    def forward(self, x):
        return self.second(self.first(x).tanh())


def in_shards(rank):
    stages = trace_stages(Two().double(), (torch.randn(2, 4).double(),), ["second"])
    mesh = make_mesh(shard=2)
    with Pipeline(stages, plan("zb_v", 1, 2), loss_fn=F.mse_loss, mesh=mesh) as pipeline:
        x = torch.linspace(-1, 1, 32).double().view(8, 4).chunk(2)[rank]
        pipeline.step(x, target=x.sin())
        return {name: each.grad.full_tensor() for name, each in pipeline.named_parameters()}


def test_traced_stages_go_with_shards():
    module, x = Two().double(), torch.linspace(-1, 1, 32).double().view(8, 4)
    F.mse_loss(module(x), x.sin()).backward()
    for found in run_ranks(in_shards, 2):
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=0)


# ---------------------------------------------------------------- batches of the trainer's data


class OfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, t, scale=None):
        return self.last(self.first(x) + t)


class OfPair(OfTwo):
    def forward(self, pair):
        return super().forward(*pair)


ROWS, TIMES = torch.arange(16.0).view(4, 4) / 10, torch.ones(4, 4)
GIVEN = [
    (OfTwo, (ROWS[:2], TIMES[:2]), {}, {"t": TIMES, "x": ROWS, "target": ROWS}),
    (OfTwo, (ROWS[:2],), {"t": TIMES[:2]}, {"x": ROWS, "t": TIMES, "target": ROWS}),
    (OfTwo, (ROWS[:2], TIMES[:2]), {}, (ROWS, TIMES, ROWS)),
    (OfPair, ((ROWS[:2], TIMES[:2]),), {}, ((ROWS, TIMES), ROWS)),
    (OfPair, ((ROWS[:2], TIMES[:2]),), {}, ([ROWS, TIMES], ROWS)),
]


@pytest.mark.parametrize(("kind", "example", "keywords", "given"), GIVEN)
def test_a_traced_stage_takes_what_the_whole_modules_forward_takes(kind, example, keywords, given):
    """Dicts were refused: "stage 0 takes x, t by name only"."""
    module = kind()
    whole = module((ROWS, TIMES)) if kind is OfPair else module(ROWS, TIMES)
    stages = trace_stages(module, example, ["last"], example_kwargs=keywords)
    args, target = batch_for(stages, 2, _Always(given), 0, torch.device("cpu"))
    pipeline = Pipeline(stages, plan("zb_v", 1, 2), nn.functional.mse_loss)
    losses = pipeline.step(*args, target=target)
    assert sum(losses).item() / 2 == pytest.approx(nn.functional.mse_loss(whole, ROWS).item(), rel=1e-5)


def test_an_argument_that_the_example_lacks_is_refused():
    stages = trace_stages(OfTwo(), (ROWS, TIMES), ["last"])
    with pytest.raises(TypeError, match="the example has 2"):
        stages[0](ROWS, TIMES, scale=TIMES)


class _Always:
    def __init__(self, batch):
        self._batch = batch

    def batch(self, number):
        return self._batch


def test_a_split_point_that_is_no_submodule_is_refused_with_the_nearest_names():
    with pytest.raises(
        ValueError, match="OfTwo has no submodule 'lasst'; it has first, last; did you mean last"
    ):
        trace_stages(OfTwo(), (ROWS, TIMES), ["lasst"])
