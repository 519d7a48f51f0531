"""zbpp's own models over slices of a sequence, against plain autograd over the whole sequence in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from helpers.slices import assert_equals_whole
from helpers.split import assert_close, double
from zbpp import Pipeline, plan
from zbpp.autograd.models.past import Past
from zbpp.models.attention import causal_attention
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.run.stages import recompute_stages
from zbpp.stage_api import takes_slices

TIME, WORDS = 12, 11
BOUNDS = [[0, 6, 12], [0, 3, 6, 9, 12], [0, 5, 6, 10, 12]]
SIZES = {"vocab_size": WORDS, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "sequence_length": TIME}
MODELS = {
    "gpt": lambda **options: Gpt(**SIZES, **options),
    "gpt, tied": lambda **options: Gpt(**SIZES, tie_embeddings=True, **options),
    "llama": lambda **options: Llama(**SIZES, **options),
    "llama, grouped": lambda **options: Llama(**SIZES, num_kv_heads=2, **options),
    "llama, tied": lambda **options: Llama(**SIZES, num_kv_heads=1, tie_embeddings=True, **options),
    "llama, experts": lambda **options: Llama(**SIZES, experts=4, balance_loss=0.0, **options),
}


def tokens():
    return torch.randint(WORDS, (2, TIME), generator=torch.Generator().manual_seed(0))


def targets():
    found = tokens().roll(-1, 1)
    found[0, 3] = found[1, 6:9] = -100
    return found


def stages_of(name, num_stages=1, **options):
    model = MODELS[name](**options)
    return [model.build_stage(index, num_stages).double() for index in range(num_stages)]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_slices_are_the_whole_sequence(name, bounds):
    """In two stages; each defers what it defers without slices: all but the norms and positions."""
    facts = assert_equals_whole(stages_of(name, 2), tokens(), bounds)
    assert all("norm" in each or "router" in each for each in facts.computed), facts.computed


@pytest.mark.parametrize("what", ["block", "stage"])
@pytest.mark.parametrize("name", ["gpt, tied", "llama, grouped"])
def test_recompute_with_slices(name, what):
    stages = stages_of(name, 2)
    recompute_stages(dict(enumerate(stages)), what)
    assert_equals_whole(stages, tokens(), [0, 5, 6, 10, 12], is_recomputed=True)


@pytest.mark.parametrize("head", ["auto", "recompute"])
@pytest.mark.parametrize("name", ["gpt, tied", "llama"])
def test_the_last_stages_own_loss_over_slices_is_that_of_the_sequence(name, head):
    """Each slice's mean weighs as many targets as the slice has; the second has none in row 1."""
    (stage,) = stages_of(name, head=head)
    count = (targets() != -100).sum()

    def loss(hidden, start, end):
        part = targets()[:, start:end]
        return stage.loss(hidden, part) * (part != -100).sum() / count

    def call(stage, x, sequence_slice):
        return stage(x, head=False, sequence_slice=sequence_slice)

    facts = assert_equals_whole(stage, tokens(), [0, 6, 9, 12], call=call, loss=loss)
    assert any(each.startswith(("head", "embedding.token")) for each in facts.deferred)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("name", ["gpt", "llama, grouped"])
def test_documents_in_one_row_stay_apart_over_slices(name, recompute):
    """A document may begin inside a slice, and go on over several. Positions pass from stage to stage."""
    lengths = [[5, 7], [1, 9, 2]]
    positions = torch.stack([torch.cat([torch.arange(each) for each in row]) for row in lengths])
    stages = stages_of(name, 2)
    recompute_stages(dict(enumerate(stages)), recompute)

    def call(stage, x, *received, sequence_slice):
        if not received:
            part = slice(None) if sequence_slice is None else slice(sequence_slice.start, sequence_slice.end)
            received = (positions[:, part],)
        return stage(x, *received, sequence_slice=sequence_slice)

    is_recomputed = recompute != "none"
    assert_equals_whole(stages, tokens(), [0, 4, 6, 12], call=call, is_recomputed=is_recomputed)


def test_lora_with_slices():
    pytest.importorskip("peft")
    from zbpp.training.fine_tuned import FineTuned

    lora = {"r": 2, "target_modules": ["query", "value"], "init_lora_weights": False}
    stage = FineTuned(MODELS["llama, grouped"](), lora=lora).build_stage(0, 1).double()
    facts = assert_equals_whole(stage, tokens(), [0, 5, 6, 12])
    assert len(facts.deferred) == 2 * 2 * 2
    assert not facts.computed


def test_a_sequence_whose_slices_pass_the_models_length_is_refused():
    for name in ("gpt", "llama"):
        (stage,) = stages_of(name)
        past = Past([0, 8, 16])
        stage(tokens()[:, :8], sequence_slice=past.at(0))
        with pytest.raises(ValueError, match="a sequence of 16 tokens is longer .* sequence_length=12"):
            stage(tokens()[:, :8], sequence_slice=past.at(1))


def test_own_models_take_slices():
    for name in ("gpt", "llama"):
        stages = stages_of(name, 2)
        recompute_stages(dict(enumerate(stages)), "stage")
        assert all(takes_slices(stage, index) for index, stage in enumerate(stages))


# ---- Attention


def attention_by_hand(query, key, value):
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    seen = torch.ones(query.shape[-2], key.shape[-2]).tril(key.shape[-2] - query.shape[-2]).bool()
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("dropout", [0.0, 1e-15], ids=["two kernels", "a mask"])
@pytest.mark.parametrize(("time", "seen"), [(5, 5), (1, 7), (5, 12), (40, 71)])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_attention_of_the_last_tokens(num_groups, time, seen, dropout):
    """Long enough for several blocks of the kernel. A probability near 0 takes the way of dropout."""
    sizes = {"query": (2, 4, time, 8), "key": (2, num_groups, seen, 8), "value": (2, num_groups, seen, 8)}
    found, expected = (
        {name: double(*size, seed=n).requires_grad_() for n, (name, size) in enumerate(sizes.items())}
        for _ in range(2)
    )
    outputs = causal_attention(**found, dropout=dropout), attention_by_hand(**expected)
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for output in outputs:
        output.backward(double(*output.shape, seed=9))
    for name, each in found.items():
        torch.testing.assert_close(each.grad, expected[name].grad, rtol=1e-12, atol=1e-12, msg=name)


def test_attention_of_a_slice_in_bfloat16_is_as_exact_as_torchs():
    """But for the rounding of the two results that are joined."""
    sizes = (2, 4, 40, 8), (2, 2, 71, 8), (2, 2, 71, 8)
    exact = [double(*size, seed=n) for n, size in enumerate(sizes)]
    given = [each.bfloat16() for each in exact]
    expected = attention_by_hand(*(each.double() for each in given))
    mask = torch.ones(40, 71, dtype=torch.bool).tril(31)
    ours, torchs = causal_attention(*given), causal_attention(*given, mask=mask)
    assert ours.dtype == torch.bfloat16
    assert (ours - expected).abs().mean() <= 2 * (torchs - expected).abs().mean()


def test_attention_of_a_slice_saves_no_mask():
    """Held for B: query, key, value, output, and a number per query and head."""
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    query, key, value = (torch.randn(1, 4, time, 8, requires_grad=True) for time in (64, 256, 256))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = causal_attention(query, key, value)
    assert sum(held.values()) == query.nbytes + key.nbytes + value.nbytes + output.nbytes + 4 * 4 * 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_attention_of_the_last_tokens_on_a_gpu(num_groups, dtype):
    """The kernels align the last query with the last key; without one a mask does. Not run anywhere yet."""
    sizes = (2, 4, 40, 64), (2, num_groups, 71, 64), (2, num_groups, 71, 64)
    given = [double(*size, seed=n).to("cuda", dtype).requires_grad_() for n, size in enumerate(sizes)]
    exact = [each.detach().double().requires_grad_() for each in given]
    outputs = causal_attention(*given), attention_by_hand(*exact)
    for output in outputs:
        output.backward(double(*output.shape, seed=9).to(output))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    pairs = zip((outputs[0], *given), (outputs[1], *exact), strict=True)
    for found, expected in ((a, b) if a.grad is None else (a.grad, b.grad) for a, b in pairs):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


# ---- In a pipeline


@pytest.mark.parametrize("name", ["gpt", "llama, grouped"])
def test_a_pipeline_over_slices_has_the_losses_and_gradients_of_whole_sequences(name):
    """The second microbatch's second slice has no target."""
    x, target = tokens().repeat(2, 1), targets().repeat(2, 1)
    target[2:, 5:6] = -100
    model, expected = MODELS[name](), stages_of(name, 2)
    loss = model.loss(expected[1](expected[0](x)), target)
    loss.backward()
    stages = dict(enumerate(stages_of(name, 2)))
    timetable = plan("zb_v", 1, 2, num_slices=3)
    with Pipeline(stages, timetable, model.loss, slice_bounds=[0, 5, 6, TIME]) as pipeline:
        losses = pipeline.step(x, target=target)
        assert sum(map(float, losses)) / 2 == pytest.approx(loss.item(), rel=1e-13)
        found = {name: each.grad for name, each in pipeline.named_parameters()}
    assert_close(found, {name: each.grad for stage in expected for name, each in stage.named_parameters()})


def test_the_balance_of_experts_over_slices_is_the_mean_of_the_slices_own():
    """It multiplies two means over tokens, so it is not that of the whole sequence."""
    model, bounds = Llama(**SIZES, experts=4, balance_loss=0.1), [0, 5, TIME]
    stage = model.build_stage(0, 1).double()
    own = []
    for start, end in pairwise(bounds):
        share = (end - start) / TIME
        own.append(share * balance_of(stage, start, end))
    sum(own).backward()
    expected = {name: each.grad for name, each in stage.named_parameters() if "router" in name}
    assert sum(own).item() != pytest.approx(balance_of(stage, 0, TIME).item(), rel=1e-5)
    again = model.build_stage(0, 1).double()
    timetable = plan("1f1b", 1, 1, num_slices=2)
    no_targets = torch.full((2, TIME), -100)
    with Pipeline({0: again}, timetable, model.loss, slice_bounds=bounds) as pipeline:
        pipeline.step(tokens(), target=no_targets)
        assert pipeline.auxiliary_losses()["balance"] == pytest.approx(sum(own).item(), rel=1e-13)
    assert_close({name: again.get_parameter(name).grad for name in expected}, expected)


def balance_of(stage, start, end):
    """0.1 x experts x (share of the tokens' choices x mean probability), of these tokens of each layer."""
    found = []

    def report(router, args, logits):
        probabilities = logits.view(2, TIME, 4)[:, start:end].flatten(0, 1).softmax(-1)
        chosen = probabilities.topk(2).indices
        shares = F.one_hot(chosen, 4).sum((0, 1)) / len(probabilities)
        found.append(0.1 * 4 * (shares * probabilities.mean(0)).sum())

    routers = [module for name, module in stage.named_modules() if name.endswith("router")]
    hooks = [router.register_forward_hook(report) for router in routers]
    stage(tokens())
    for hook in hooks:
        hook.remove()
    return sum(found)
