"""Each microbatch's gradients go into the optimizer's states: as optimi itself does in one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import float64
from zbpp import GradientRelease, HeadAtOnce, OverlapExchange, Pipeline, make_mesh, plan
from zbpp.models.llama import Llama
from zbpp.runtime.processes.tensor_parallel import parallelize

optimi = pytest.importorskip("optimi")

M, SIZE, STEPS = 8, 16, 4
OPTIMIZERS = {
    "AdamW": lambda p: optimi.AdamW(p, lr=0.01, gradient_release=True),
    "StableAdamW": lambda p: optimi.StableAdamW(p, lr=0.01, gradient_release=True),
    "Lion": lambda p: optimi.Lion(p, lr=0.01, gradient_release=True),
    "Adan": lambda p: optimi.Adan(p, lr=0.01, gradient_release=True),
    "SGD": lambda p: optimi.SGD(p, lr=0.1, momentum=0.9, dampening=True, gradient_release=True),
}


def layers(dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.GELU()).to(dtype) for _ in range(4)]


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(M, SIZE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


def pipeline_of(schedule="zb_v", parts=None, **options):
    timetable = plan(schedule, 1, M)
    parts, num = parts or layers(), timetable.num_stages
    cuts = [len(parts) * stage // num for stage in range(num + 1)]
    stages = {stage: nn.Sequential(*parts[cuts[stage] : cuts[stage + 1]]) for stage in range(num)}
    return Pipeline(stages, timetable, F.mse_loss, **options)


def accumulated(make_optimizer, dtype=torch.float64):
    """Losses and weights of the pipeline."""
    pipeline = pipeline_of(parts=layers(dtype))
    optimizer = make_optimizer(pipeline.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    pipeline.use(GradientRelease(optimizer, accumulate=True))
    losses = []
    for step in range(STEPS):
        inputs, target = batch(step, dtype)
        losses += map(float, pipeline.step(inputs, target=target))
        assert all(each.grad is None for each in pipeline.parameters())
        scheduler.step()
    return losses, [each.detach() for each in pipeline.parameters()]


def by_optimi(make_optimizer, dtype=torch.float64):
    """The same by optimi's own hooks in a plain loop over the microbatches."""
    module = nn.Sequential(*layers(dtype))
    optimizer = make_optimizer(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimi.prepare_for_gradient_release(module, optimizer)
    losses = []
    for step in range(STEPS):
        pairs = zip(*(each.chunk(M) for each in batch(step, dtype)), strict=True)
        for number, (inputs, target) in enumerate(pairs):
            optimizer.optimizer_accumulation = number + 1 < M
            loss = F.mse_loss(module(inputs), target)
            loss.backward()
            losses.append(loss.item())
        scheduler.step()
    return losses, [each.detach() for each in module.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_take_gradients_as_in_optimis_own_loop(name):
    losses, weights = accumulated(OPTIMIZERS[name])
    expected, expected_weights = by_optimi(OPTIMIZERS[name])
    assert losses == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-12)
    assert losses[-M:] != losses[:M]


def on_two_ranks(rank):
    """Losses of this rank and its weights, by name."""
    timetable = plan("zb_h1", 2, M)
    stage = nn.Sequential(*layers()[2 * rank : 2 * rank + 2])
    with Pipeline({rank: stage}, timetable, F.mse_loss) as pipeline:
        optimizer = OPTIMIZERS["AdamW"](pipeline.parameters())
        pipeline.use(GradientRelease(optimizer, accumulate=True))
        losses = []
        for step in range(2):
            inputs, target = batch(step)
            losses += map(float, pipeline.step(inputs, target=target))
    return losses, split_over_two_processes("StableAdamW", make_mesh(tensor=2))


@float64()
def split_over_two_processes(name, mesh):
    """Losses of a Llama whose layers are split over the processes of the mesh."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "vocab_size": 16}
    model = Llama(num_layers=2, sequence_length=4, **sizes)
    stages = {0: model.build_stage(0, 1)}
    if mesh is not None:
        parallelize(model, stages, mesh)
    pipeline = Pipeline(stages, plan("zb_h1", 1, M), model.loss, mesh=mesh)
    optimizer = OPTIMIZERS[name](pipeline.parameters())
    pipeline.use(GradientRelease(optimizer, accumulate=True))
    tokens = torch.arange(M * 4).reshape(M, 4) % 16
    return [float(loss) for _ in range(3) for loss in pipeline.step(tokens, target=tokens)]


def test_two_ranks_and_parts_of_layers_accumulate_as_one_process_does():
    (nothing, in_parts), (losses, _) = run_ranks(on_two_ranks, 2)
    assert nothing == []
    assert losses == by_optimi(OPTIMIZERS["AdamW"])[0][: 2 * M]
    assert in_parts == pytest.approx(split_over_two_processes("StableAdamW", None), rel=1e-12)


def peak_gradients(accumulate):
    """(the most bytes of `.grad` that existed at a time in a step, the bytes of one stage, of all stages)."""
    pipeline = pipeline_of("zb_v")
    optimizer = optimi.AdamW(pipeline.parameters(), lr=0.01, gradient_release=True)
    pipeline.use(GradientRelease(optimizer, accumulate=accumulate))
    inputs, target = batch(0)
    highest = 0

    def see(_):
        nonlocal highest
        highest = max(highest, sum(p.grad.nbytes for p in pipeline.parameters() if p.grad is not None))

    for parameter in pipeline.parameters():
        parameter.register_post_accumulate_grad_hook(see)
    pipeline.step(inputs, target=target)
    one, both = (sum(p.nbytes for stage in some for p in stage.parameters()) for some in (
        [pipeline.stages[0]], pipeline.stages.values(),
    ))  # fmt: skip
    return highest, one, both


def test_never_more_than_one_stages_gradients_exist():
    highest, one, both = peak_gradients(True)
    assert highest == one
    assert peak_gradients(False) == (both, one, both)


class Sometimes(nn.Module):
    """Uses its weight in the first microbatch of a step alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((SIZE,), 0.5, dtype=torch.float64))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight if self.calls % M == 1 else x * 1.0


def test_a_weight_that_the_last_microbatch_does_not_use_is_updated_all_the_same():
    """As by a gradient of zero; optimi's hooks would leave it until a later step."""
    part = Sometimes()
    pipeline = pipeline_of("zb_h1", [*layers()[:1], part, *layers()[1:2]])
    optimizer = optimi.AdamW(pipeline.parameters(), lr=0.01, weight_decay=0.0, gradient_release=True)
    pipeline.use(GradientRelease(optimizer, accumulate=True))
    inputs, target = batch(0)
    pipeline.step(inputs, target=target)
    weight = nn.Parameter(torch.full((SIZE,), 0.5, dtype=torch.float64))
    module = nn.Sequential(*layers()[:2])
    own = optimi.AdamW([weight], lr=0.01, weight_decay=0.0, gradient_release=True)
    own.optimizer_accumulation = True
    first = F.mse_loss(module[1](module[0](inputs[:1]) * weight), target[:1])
    (weight.grad,) = torch.autograd.grad(first, weight)
    own.step(param=weight)
    own.optimizer_accumulation = False
    weight.grad = torch.zeros_like(weight)
    own.step(param=weight)
    torch.testing.assert_close(part.weight, weight, rtol=1e-12, atol=1e-12)
    assert not torch.equal(weight, torch.full_like(weight, 0.5))


class Merged(nn.Module):
    """Each weight is used as it is, and detached as the x of the other's gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = (nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64) / 4) for _ in range(2))

    def forward(self, x):
        one, other = F.linear(self.a.detach(), self.b), F.linear(self.b.detach(), self.a)
        return F.linear(x, self.a) + F.linear(x, self.b) + x @ one + x @ other


def test_a_weight_that_anothers_gradient_is_computed_from_is_updated_after_it():
    pipeline = pipeline_of("zb_h1", [Merged()])
    optimizer = OPTIMIZERS["AdamW"](pipeline.parameters())
    pipeline.use(GradientRelease(optimizer, accumulate=True))
    module = Merged()
    own = OPTIMIZERS["AdamW"](module.parameters())
    inputs, target = batch(0)
    pipeline.step(inputs, target=target)
    for number in range(M):
        F.mse_loss(module(inputs[number : number + 1]), target[number : number + 1]).backward()
        own.optimizer_accumulation = number + 1 < M
        for parameter in module.parameters():  # after the whole backward, which no hook waits for
            own.step(param=parameter)
            parameter.grad = None
    torch.testing.assert_close([*pipeline.parameters()], [*module.parameters()], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.AdamW(p), "accumulation needs an optimizer of torch-optimi"),
        (lambda p: optimi.AdamW(p, lr=0.1), r"make it with AdamW\(..., gradient_release=True\)"),
        (lambda p: optimi.SGD(p, lr=0.1, gradient_release=True), "SGD without momentum has no state"),
    ],
)
def test_an_optimizer_that_would_lose_gradients_is_refused(make, words):
    pipeline = pipeline_of()
    with pytest.raises(ValueError, match=words):
        pipeline.use(GradientRelease(make(pipeline.parameters()), accumulate=True))


@pytest.mark.parametrize("other", [HeadAtOnce, OverlapExchange])
@pytest.mark.parametrize("order", [1, -1])
def test_what_runs_w_before_its_turn_would_mix_microbatches(other, order):
    optimizer = OPTIMIZERS["AdamW"](pipeline_of().parameters())
    extras = [GradientRelease(optimizer, accumulate=True), other()][::order]
    with pytest.raises(ValueError, match="would mix microbatches|no stage exchanges rows"):
        pipeline_of(extras=extras)


def test_a_learning_rate_set_after_loading_a_state_is_used():
    """load_state_dict gives each parameter's state a copy of its group, with the rate of the saved run."""
    pipeline = pipeline_of("zb_h1")
    optimizer = OPTIMIZERS["AdamW"](pipeline.parameters())
    pipeline.use(GradientRelease(optimizer, accumulate=True))
    inputs, target = batch(0)
    pipeline.step(inputs, target=target)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [each.detach().clone() for each in pipeline.parameters()]
    pipeline.step(inputs, target=target)
    assert all(map(torch.equal, before, pipeline.parameters()))
