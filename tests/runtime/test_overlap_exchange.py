"""W's in the shadow of exchanges: losses and gradients to the last bit, under any timetable and extra."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from helpers.timetables import random_timetable
from zbpp import Feature, GradientRelease, OverlapExchange, Pipeline, Recorder, plan
from zbpp.autograd import recompute
from zbpp.autograd.models.exchange import Exchange
from zbpp.models.emulated import Emulated
from zbpp.schedule import Action, Op, Timetable

M, HIDDEN, STEPS = 4, 6, 2


class Countdown:
    """A transfer that is over after it was asked a number of times."""

    def __init__(self, rows, asked):
        self.rows, self.left = rows, asked

    def is_done(self):
        self.left -= 1
        return self.left < 0

    def wait(self):
        return self.rows.clone()


class Plain(torch.autograd.Function):
    """A Function that zbpp knows nothing about: B guards the gradients around it."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy * 1


class Block(nn.Module):
    """Linears, a norm, and two exchanges between them, as in a layer of experts."""

    def __init__(self, rng, autocast=False):
        super().__init__()
        self.before, self.expert, self.after = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.norm, self.autocast = nn.LayerNorm(HIDDEN), autocast
        self.dispatch, self.combine = Exchange(), Exchange()
        for exchange in (self.dispatch, self.combine):
            exchange.transfer = lambda rows, send, receive: Countdown(rows, rng.randint(0, 5))

    def forward(self, x):
        counts = [len(x)]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            x = self.dispatch(self.before(x), counts, counts)
            x = self.combine(Plain.apply(torch.tanh(self.expert(x))), counts, counts)
            return self.norm(x + self.after(x)).to(self.norm.weight.dtype)


def stages_of(number, rng, *, dtype=torch.float64, autocast=False, recomputes=False):
    torch.manual_seed(0)
    stages = {each: nn.Sequential(Block(rng, autocast), Block(rng, autocast)) for each in range(number)}
    for stage in stages.values():
        stage.to(dtype)
        for block in stage if recomputes else ():
            recompute(block)
    return stages


class Counted(OverlapExchange):
    """Counts the exchanges in which it runs W's, by the op that waits for them."""

    def attach(self, rank):
        super().attach(rank)
        self.ran = Counter()

    def around(self, call, at, run):
        run = super().around(call, at, run)

        def noted(message):
            self.op = at.op
            return run(message)

        return noted if isinstance(at, Action) else run

    def _run_w(self, exchange):
        before = self._num_tasks()
        super()._run_w(exchange)
        self.ran[self.op] += self._num_tasks() < before

    def _num_tasks(self):
        return sum(
            len(each._tasks) for worker in self._workers.values() for each in worker._deferred.values()
        )


def trained(timetable, *extras, seed=0, prepare=lambda stages: None, **options):
    """Losses and gradients of some steps that add up."""
    stages = stages_of(timetable.num_stages, random.Random(seed), **options)
    prepare(stages)
    generator = torch.Generator().manual_seed(1)
    dtype = options.get("dtype", torch.float64)
    x, target = (
        torch.randn(timetable.num_microbatches, HIDDEN, generator=generator, dtype=dtype) for _ in "xy"
    )
    pipeline = Pipeline(stages, timetable, nn.functional.mse_loss, extras=extras)
    losses = [loss for _ in range(STEPS) for loss in pipeline.step(x, target=target)]
    return torch.stack(losses), {name: each.grad for name, each in pipeline.named_parameters()}


def assert_equal(mine, expected):
    assert torch.equal(mine[0], expected[0])
    assert all(torch.equal(mine[1][name], expected[1][name]) for name in expected[1])


LATE = {  # W's postponed
    1: "0F0 0B0 0F1 0B1 0W0 0F2 0B2 0W1 0F3 0B3 0W2 0W3",
    2: "0F0 0F1 1F0 1B0 0B0 0F2 1F1 1B1 1W0 0W0 0B1 0F3 1F2 1B2 1W1 0W1 0B2 1F3 1B3 1W2 0B3 0W2 1W3 0W3",
}


@pytest.mark.parametrize("number", LATE)
@pytest.mark.parametrize(
    "options",
    [{}, {"recomputes": True}, {"dtype": torch.float32, "autocast": True}],
    ids=["plain", "recompute", "autocast"],
)
def test_no_bit_changes_and_w_runs_in_forward_and_in_backward(number, options):
    timetable, extra = Timetable.parse(LATE[number]), Counted()
    expected = trained(timetable, **options)
    assert_equal(trained(timetable, extra, **options), expected)
    assert extra.ran[Op.F]
    assert extra.ran[Op.B]


def test_no_bit_changes_under_random_timetables(first_seed):
    num_in_shadow = 0
    for seed in range(first_seed, first_seed + 25):
        timetable, extra = random_timetable(random.Random(seed), most_ranks=1), Counted()
        assert_equal(trained(timetable, extra, seed=seed), trained(timetable, seed=seed + 1))
        num_in_shadow += extra.ran.total()
    assert num_in_shadow > 100


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_v"])
def test_no_bit_changes_under_schedules(schedule):
    timetable = plan(schedule, 1, M)
    assert_equal(trained(timetable, OverlapExchange()), trained(timetable))


def test_hooks_fire_as_they_do_without():
    timetable = Timetable.parse(LATE[2])

    def hooked(*extras):
        seen = []

        def prepare(stages):
            for stage in stages.values():
                weight = stage[0].before.weight
                weight.register_hook(lambda grad: grad * 2)
                weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.sum().item()))

        return trained(timetable, *extras, prepare=prepare), sorted(seen)

    (mine, seen), (expected, seen_without) = hooked(Counted()), hooked()
    assert_equal(mine, expected)
    assert seen == seen_without
    assert len(seen) == STEPS * M * 2


class DropAll(Feature):
    """Drops the tasks of all W's."""

    name = "drop_all"

    def around_w(self, stage, run_w):
        return lambda microbatch, weight_grads: None


def test_a_w_in_an_exchange_runs_as_other_features_say():
    stages = stages_of(2, random.Random(0))
    extras = [OverlapExchange(), DropAll()]
    pipeline = Pipeline(stages, Timetable.parse(LATE[2]), nn.functional.mse_loss, extras=extras)
    pipeline.step(torch.ones(M, HIDDEN).double(), target=torch.zeros(M, HIDDEN).double())
    assert all(each.grad is None for each in pipeline.parameters())


def test_it_goes_with_gradients_that_are_released():
    def weights(*extras):
        stages = stages_of(2, random.Random(0))
        pipeline = Pipeline(stages, Timetable.parse(LATE[2]), nn.functional.mse_loss, extras=extras)
        pipeline.use(GradientRelease(torch.optim.AdamW(pipeline.parameters(), lr=0.01)))
        for _ in range(STEPS):
            pipeline.step(torch.ones(M, HIDDEN).double(), target=torch.zeros(M, HIDDEN).double())
        return [each.detach() for each in pipeline.parameters()]

    assert all(map(torch.equal, weights(OverlapExchange()), weights()))


def test_evaluation_runs_no_w_and_the_extra_leaves_nothing_behind():
    stages = stages_of(1, random.Random(0))
    pipeline = Pipeline(stages, plan("zb_h1", 1, M), nn.functional.mse_loss)
    x = torch.ones(M, HIDDEN).double()
    with pipeline.using(OverlapExchange()):
        pipeline.step(x, target=x)
        pipeline.evaluate(x, target=x)
        assert stages[0][0].dispatch.meanwhile
    assert stages[0][0].dispatch.meanwhile is None


def test_the_recorder_measures_exposed_exchanges():
    """Nothing is pending in F0 and B0; W0 is as long as what is exchanged in F1 and B1.

    A loaded machine takes the process off its core for a while, and then the exchange goes on without it: it
    changes one step's times by any amount. So every action counts as it was in the step that was least so.
    """
    model = Emulated(num_layers=4, f=[12, 2, 2, 2], b=[12, 2, 2, 2], w=5, exchange=[10, 0, 0, 0])
    timetable = Timetable.parse("0F0 0B0 0F1 0B1 0W0 0W1")
    pipeline = Pipeline(model, timetable, extras=[OverlapExchange(), recorder := Recorder()])
    x = torch.ones(2, 8)
    steps = []
    for _ in range(12):
        pipeline.step(x, target=x)
        steps.append(recorder.timeline().exposed[0])
    exposed, ops = np.stack(steps[1:]), timetable.rows[0].ops
    assert exposed.max(axis=0)[:2].min() > 9
    assert exposed.min(axis=0)[2:4].max() < 3
    assert exposed[:, ops == Op.W].max() == 0


@pytest.mark.parametrize(
    "stages, message",
    [
        ({0: nn.Linear(2, 2)}, "no stage exchanges rows"),
        ("shared", "a parameter that stages of one rank share"),
    ],
)
def test_what_it_cant_go_with_is_refused(stages, message):
    if stages == "shared":
        stages = stages_of(2, random.Random(0))
        stages[1][0].before = stages[0][0].before
    timetable = plan("gpipe" if len(stages) == 1 else "zb_v", 1, M)
    with pytest.raises(ValueError, match=message):
        Pipeline(stages, timetable, nn.functional.mse_loss, extras=[OverlapExchange()])
