"""Auxiliary losses and losses that are dicts, in a stage and in a pipeline, against plain autograd.

The reference never calls `auxiliary_loss`: it gets the values as return values.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.moe import SIZE, Moe
from helpers.processes import run_ranks
from helpers.split import assert_close, grads_of
from helpers.tensors import drawn
from zbpp import Pipeline, auxiliary_loss, plan
from zbpp.autograd import recompute
from zbpp.runtime import StageWorker
from zbpp.runtime.call.feed import Feed, LossGradients
from zbpp.runtime.call.results import summed

M, ROWS = 3, 4
SCALE = 8.0  # the pipeline's loss_scale

# ---------------------------------------------------------------- one stage


class Case(nn.Module):
    """compute(x) -> (output, [(name, value), ...]); forward returns the one and reports the others."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.router = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.single, self.scale = nn.Linear(SIZE, 1), nn.Parameter(torch.tensor(0.5))
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(drawn(*parameter.shape, seed=seed))
        self.double()

    def forward(self, x):
        output, losses = self.compute(x)
        for name, value in losses:
            auxiliary_loss(name, value)
        return output


class OnTheWay(Case):
    """The output is computed from what the losses are computed from, and from a loss itself."""

    def compute(self, x):
        hidden = self.first(x)
        value = self.router(hidden).square().mean()
        return self.second(hidden).tanh() * value, [("z", value), ("size", hidden.abs().mean())]


class OnlyAuxiliary(Case):
    def compute(self, x):
        hidden = self.first(x)
        return hidden.detach(), [("z", self.router(hidden).square().mean())]


class OnDetached(Case):
    def compute(self, x):
        return self.first(x), [("z", self.router(x.detach()).logsumexp(-1).mean())]


class SideBranch(Case):
    """No weight is shared between the branches, and no input gradient comes from the main one."""

    def compute(self, x):
        return self.first(x.detach()), [("z", self.router(x).logsumexp(-1).mean())]


class SeveralCalls(Case):
    """One name twice, one value under two names, tied weights, shape [1, 1]."""

    def compute(self, x):
        value, logits = self.router(x).square().mean(), self.router(self.first(x))
        more = [("z", logits.sin().mean()), ("also", value), ("row", self.single(x[:1]))]
        return logits, [("z", value), *more]


class OfAParameter(Case):
    def compute(self, x):
        return self.first(x) * self.scale, [("scale", self.scale), ("square", self.scale.square())]


class Frozen(Case):
    """A value without grad, which counts in the metrics only."""

    def compute(self, x):
        return self.first(x), [("z", self.router(x.detach()).detach().square().mean())]


CASES = [OnTheWay, OnlyAuxiliary, OnDetached, SideBranch, SeveralCalls, OfAParameter, Frozen]


def mean_square(output, target):
    return F.mse_loss(output, target)


def data(microbatch):
    """x, the gradient of the output, and a target."""
    return (drawn(ROWS, SIZE, seed=10 * microbatch + each) for each in range(3))


def plain(case, kind):
    """(gradients of parameters and of each x, sums of the losses by name) of autograd on the summed loss."""
    module, grads, sums = case(), {}, {}
    for microbatch in range(M):
        x, g, target = data(microbatch)
        x.requires_grad_(kind != "first")
        output, losses = module.compute(x)
        total = sum(value.sum() for _, value in losses) * SCALE / M
        if kind == "last":
            total = total + F.mse_loss(output, target) * SCALE / M
        elif kind != "no gradient comes":
            total = total + (output * g).sum()
        if total.requires_grad:
            total.backward()
        if x.grad is not None:
            grads[f"x{microbatch}"] = x.grad
        for name, value in losses:
            sums[name] = sums.get(name, 0.0) + value.item()
    return grads | grads_of(module), sums


def worker_for(module, kind):
    index = {"first": 0, "last": 2}.get(kind, 1)
    loss_fn = mean_square if kind == "last" else None
    worker = StageWorker(index, module, is_last=kind == "last", loss_fn=loss_fn)
    args = [(next(data(each)),) for each in range(M)] if kind == "first" else ()
    targets = [list(data(each))[2] for each in range(M)] if kind == "last" else None
    worker.begin(Feed(args, [{}] * M, targets, range(M), LossGradients(SCALE / M)))
    return worker


def run(module, kind, order):
    """The same of a StageWorker."""
    worker, grads, starts = worker_for(module, kind), {}, {}
    for word in order.split():
        op, microbatch = word[:-1], int(word[-1])
        x, g, _ = data(microbatch)
        if op == "F":
            message = worker.forward(microbatch, () if kind == "first" else (x.requires_grad_(),))
            starts[microbatch] = message if kind == "last" else (g,)
        elif op == "W":
            worker.backward_weight(microbatch)
        else:
            work = worker.backward_input if op == "B" else worker.backward
            given = (None,) if kind == "no gradient comes" else starts[microbatch]
            (grad,) = work(microbatch, given)
            if grad is not None:
                grads[f"x{microbatch}"] = grad
    named = worker.end().named
    assert all(len(values) == M for values in named.values())
    return grads | grads_of(module), {name: sum(map(float, values)) for name, values in named.items()}


ORDERS = ["F0 F1 B0 F2 B1 W0 W1 B2 W2", "F0 BW0 F1 F2 BW1 BW2"]
KINDS = ["first", "between", "last", "no gradient comes"]


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_values_are_those_of_plain_autograd(case, kind, is_recomputed):
    expected, expected_sums = plain(case, kind)
    found = []
    for order in ORDERS:
        module = case()
        if is_recomputed:
            recompute(module)
        grads, sums = run(module, kind, order)
        assert_close(grads, expected)
        assert sums == pytest.approx(expected_sums, rel=1e-13)
        found.append(grads)
    assert all(torch.equal(found[0][name], found[1][name]) for name in expected)


# ---------------------------------------------------------------- losses that are dicts


def two_terms(output, target):
    return {"error": F.mse_loss(output, target), "size": output.square().mean().reshape(1)}


def one_rank(loss_fn, module=None, schedule="zb_h1"):
    return Pipeline({0: module or nn.Linear(SIZE, SIZE).double()}, plan(schedule, 1, 2), loss_fn)


def test_a_dict_of_losses_trains_with_its_sum_and_each_is_reported():
    x, _, target = data(0)
    pipeline = one_rank(two_terms)
    found = pipeline.step(x, target=target)
    grads = grads_of(pipeline.stages[0])
    pipeline.stages[0].zero_grad()
    output = pipeline.stages[0](x)
    error, size = F.mse_loss(output, target), output.square().mean()
    (error + size).backward()
    assert_close(grads, grads_of(pipeline.stages[0]))
    assert sum(found).item() / 2 == pytest.approx((error + size).item(), rel=1e-13)
    expected = {"error": error.item(), "size": size.item()}
    assert pipeline.auxiliary_losses() == pytest.approx(expected, rel=1e-13)
    pipeline.step(2 * x, target=target)
    twice = pipeline.auxiliary_losses()
    assert twice["size"] > expected["size"]
    assert pipeline.evaluate(x, target=target)[0] == found[0]
    assert summed([pipeline.evaluation_losses.means()]) == pytest.approx(expected, rel=1e-13)
    losses, outputs = pipeline.evaluate(x, target=target, return_outputs=True)
    assert (len(losses), outputs.shape) == (2, x.shape)
    assert pipeline.auxiliary_losses() == twice  # still the last step's


# ---------------------------------------------------------------- what is reported


class Reports(nn.Module):
    """Reports numbers from a list, one in each forward; None: nothing."""

    def __init__(self, *values):
        super().__init__()
        self.linear, self.values = nn.Linear(SIZE, SIZE).double(), list(values)

    def forward(self, x):
        if self.training and (value := self.values.pop(0)) is not None:
            auxiliary_loss("z", torch.tensor(value))
        return self.linear(x)


def test_a_microbatch_that_reports_nothing_counts_as_zero():
    x, _, target = data(0)
    pipeline = one_rank(mean_square, Reports(None, 3.0, None, None))
    assert pipeline.auxiliary_losses() == {}
    pipeline.step(x, target=target)
    assert pipeline.auxiliary_losses() == {"z": 1.5}
    pipeline.step(x, target=target)
    assert pipeline.auxiliary_losses() == {}


# ---------------------------------------------------------------- a mixture of experts on real processes

NUM_MICROBATCHES = 4


def moe_batch(step):
    return drawn(16, SIZE, seed=500 + step), drawn(16, SIZE, seed=600 + step)


def train_moe(rank, runs):
    """Per run (losses and named losses of two steps, gradients of the second); a run: schedule, recompute?"""
    results = []
    for schedule, is_recomputed in runs:
        pipeline = Pipeline(Moe(), schedule, num_microbatches=NUM_MICROBATCHES)
        if is_recomputed:
            for stage in pipeline.stages.values():
                for layer in stage:
                    recompute(layer)
        history = []
        for step in range(2):
            for parameter in pipeline.parameters():
                parameter.grad = None
            pipeline.loss_scale = float(4**step)
            x, target = moe_batch(step)
            losses = [loss.item() for loss in pipeline.step(x, target=target)]
            pipeline.evaluate(x, target=target)
            history.append((losses, pipeline.auxiliary_losses()))
        grads = {name: p.grad / pipeline.loss_scale for name, p in pipeline.named_parameters()}
        results.append((history, grads))
        pipeline.close()
    return results


def plain_moe():
    """The same of one process, over the microbatches of one whole model."""
    model, history = Moe(), []
    whole = model.build_stage(0, 1)
    for step in range(2):
        whole.zero_grad()
        losses, sums = [], Counter()
        for x, target in zip(*(each.chunk(NUM_MICROBATCHES) for each in moe_batch(step)), strict=True):
            total = 0.0
            for layer in whole:
                x, auxiliary = layer.compute(x)
                total = total + sum(auxiliary.values())
                sums.update({name: value.item() for name, value in auxiliary.items()})
            terms = model.loss(x, target)
            sums.update({name: value.item() for name, value in terms.items()})
            losses.append(sum(terms.values()).item())
            ((total + sum(terms.values())) / NUM_MICROBATCHES).backward()
        history.append((losses, {name: sums[name] / NUM_MICROBATCHES for name in sorted(sums)}))
    return history, grads_of(whole)


def test_a_mixture_of_experts_trains_as_in_one_process():
    """Four stages on two ranks with and without recompute, and two stages."""
    runs = [("zb_v", False), ("zb_v", True), ("1f1b", False), ("zb_h1", False)]
    expected_history, expected_grads = plain_moe()
    by_run = [*zip(*run_ranks(train_moe, 2, runs), strict=True)]
    for ranks in by_run:
        assert_close({name: grad for _, own in ranks for name, grad in own.items()}, expected_grads)
        for step, (losses, named) in enumerate(expected_history):
            (one, on_one), (other, on_other) = (history[step] for history, _ in ranks)
            assert one + other == pytest.approx(losses, rel=1e-12)  # one of them is empty
            assert on_one == on_other == pytest.approx(named, rel=1e-12)
            assert [*on_one] == [*on_other] == ["balance", "error", "size", "z"]
    one_f_one_b, zb_h1 = by_run[2:]
    for (history, own), (other_history, other) in zip(one_f_one_b, zb_h1, strict=True):
        assert history == other_history
        assert all(torch.equal(own[name], other[name]) for name in own)
