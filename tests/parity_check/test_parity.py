"""zbpp.parity names the mistakes that are planted in a hand-written trainer, and accuses no right one."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zbpp
from helpers.hand_written import MICROBATCHES, HandWritten, Whole, loss_fn, tokens
from helpers.processes import run_ranks
from helpers.split import float64
from zbpp.job.world import World
from zbpp.parity_check import command, faults
from zbpp.parity_check.command import main

IN_ONE_PROCESS = [
    "",
    "only the last microbatch counts",
    "only the first microbatch counts",
    "only the last microbatch counts, divided by the number of microbatches",
    "only the first microbatch counts, divided by the number of microbatches",
    "the last microbatch is lost",
    "the first microbatch is lost",
    "the sum over microbatches in place of their mean",
    "divided by the number of microbatches twice",
    "a mean of means in place of the mean over all tokens",
    "the sum over tokens in place of their mean",
    "a tied copy's gradient is not summed with the others'",
    "the loss 'balance' is lost",
    "the loss 'balance' is summed over microbatches, the others are averaged",
    "the loss 'balance' is another one in the stages than in the whole model",
    "the gradients of the step before are still in",
    "a frozen part is trained",
    "a trained parameter has no gradient",
    "gradients are not clipped",
    "copies of a parameter count several times in the norm",
    "the optimizer leaves this parameter out",
    "losses are divided by the number of microbatches",
    "losses are multiplied by the number of microbatches",
    "losses are in the reverse order",
    "the loss of one microbatch in place of the mean",
]
IN_TWO = {
    "replicas": [
        "",
        "replicas are not reduced: the gradient is that of the rank's own data",
        "replicas are not reduced, and the gradient is divided by their number",
        "the sum over replicas in place of their mean",
        "divided by the number of replicas twice",
        "each replica divides by its own number of tokens",
        "replicas are unequal",
        "losses are divided by the number of replicas",
        "losses are multiplied by the number of replicas",
    ],
    "pipeline": [
        "",
        "one rank's norm in place of all ranks'",
        "the sum of the ranks' norms in place of the norm",
        "copies of a parameter count several times in the norm",
        "a tied copy's gradient is not summed with the others'",
        "only the last microbatch counts",
    ],
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def checked(layout, rank=0, fault="", **options):
    with float64():
        trainer = HandWritten(layout, rank, fault)
        given = {
            "names": lambda stage, name: name,
            "whole": Whole,
            "batch": trainer.batch,
            "loss_fn": loss_fn,
            "num_microbatches": MICROBATCHES,
            "tokens": tokens,
            "optimizer": sgd,
            "clip": 0.05,
            "clip_grad_norm": trainer.clip,
            "update": trainer.update,
            "evaluate": trainer.evaluate if layout == "one" else None,
        }
        return zbpp.parity(trainer.step, trainer.stages, **(given | options))


@pytest.mark.parametrize("fault", IN_ONE_PROCESS)
def test_a_planted_mistake_is_named(fault):
    report = checked("one", fault=fault)
    print(report)
    assert report.cause == fault
    assert report.is_equal == (not fault)


def test_every_known_mistake_is_planted():
    reference = SimpleNamespace(terms=["near", "balance"], parts=[SimpleNamespace(counts=[1, 1])])
    case = faults.Case(reference, [0], 2, lambda part, microbatch, term: 0.5)
    tables = (
        faults.state_faults, faults.gradient_faults, faults.clip_faults, faults.update_faults,
        faults.loss_faults,
    )  # fmt: skip
    names = {fault.name.replace("'near'", "'balance'") for table in tables for fault in table(case)}
    assert names == {each for planted in (IN_ONE_PROCESS, *IN_TWO.values()) for each in planted if each}


def causes_of(rank, layout, faults):
    return [checked(layout, rank, fault).cause for fault in faults]


@pytest.mark.parametrize("layout", IN_TWO)
def test_a_planted_mistake_of_two_processes_is_named_on_both(layout):
    assert run_ranks(causes_of, 2, layout, IN_TWO[layout]) == [IN_TWO[layout]] * 2


class Routed(nn.Module):
    """Layers with one auxiliary loss, which is not the sum over layers."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        means = []
        for layer in self.layers:
            means.append(layer(x).mean())
            x = layer(x).tanh()
        zbpp.auxiliary_loss("balance", sum(means).square())
        return x


def routed():
    torch.manual_seed(0)
    first, second, head = (nn.Linear(3, 3) for _ in range(3))
    return nn.Sequential(Routed(first, second), head)


def test_an_auxiliary_loss_that_depends_on_the_cut_is_named():
    """Each of two stages squares its own layer's sum; the whole model squares the sum of both."""
    with float64():
        (first, second), head = routed()[0].layers, routed()[1]
        stages = {0: Routed(first), 1: nn.Sequential(Routed(second), head)}
        timetable = zbpp.Timetable.parse("0F0 1F0 1B0 0B0 1W0 0W0 0F1 1F1 1B1 0B1 1W1 0W1")
        pipeline = zbpp.Pipeline(stages, timetable, nn.functional.mse_loss)
        report = zbpp.parity(
            lambda batch: pipeline.step(batch[0], target=batch[1]), pipeline, whole=routed,
            names=lambda stage, name: name.replace("layers.0", "layers.1") if stage else f"0.{name}",
            batch=tuple(torch.randn(2, 4, 3)), loss_fn=nn.functional.mse_loss,
        )  # fmt: skip
    assert report.cause == "the loss 'balance' is another one in the stages than in the whole model"
    assert "in 4 of 6" in report.verdict


# ---- Bad input


class Noise(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(())


class Narrow(nn.Linear):
    """Runs in float32 alone."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias.float())


def chain(middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), middle(3, 3), nn.Linear(3, 3))


def report_of(whole, stages, batch=None, **options):
    batch = tuple(torch.ones(2, 4, 3)) if batch is None else batch

    def step(batch):
        losses = [
            nn.functional.mse_loss(stages(x), y) for x, y in zip(*(b.chunk(2) for b in batch), strict=True)
        ]
        (sum(losses) / 2).backward()
        return losses

    given = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 2} | options
    return zbpp.parity(step, stages, whole=whole, batch=batch, **given)


@pytest.mark.parametrize(
    "whole, text",
    [
        (lambda: nn.Sequential(nn.Linear(3, 3)), "rank 0 has 1.weight, whole() does not"),
        (lambda: nn.Sequential(*chain(nn.Linear), nn.Linear(3, 3)), "no rank has 3.weight"),
        (
            lambda: nn.Sequential(nn.Linear(3, 4), *chain(nn.Linear)[1:]),
            "0.weight is [3, 3] on rank 0, [4, 3]",
        ),
        (lambda: chain(Noise), "1 (Noise) draws random numbers"),
        (lambda: "model", "whole() returned a str"),
    ],
)
def test_a_whole_that_does_not_fit_is_refused(whole, text):
    with pytest.raises(ValueError) as caught:
        report_of(whole, chain(nn.Linear))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_microbatches": None}, "num_microbatches is missing"),
        ({"num_microbatches": 3}, "has 4 rows, which don't split"),
        ({"clip": 1.0}, "clip_grad_norm is missing"),
        ({"update": print}, "optimizer is missing"),
        ({"batch": (torch.ones(4, 3),)}, r"batch on rank 0 has one value: write \(\*inputs, target\)"),
        ({"batch": torch.ones(4, 3)}, r"batch on rank 0 is a Tensor: write \(\*inputs, target\)"),
        (
            {"batch": (zbpp.per_microbatch([torch.ones(4, 3), None]),) * 2},
            "microbatch 1 of the batch is em",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        report_of(lambda: chain(nn.Linear), chain(nn.Linear), **options)


@pytest.mark.parametrize(
    "found, text",
    [
        ({"batchh": 1}, "zbpp.parity has no argument 'batchh'; did you mean batch?"),
        ({"step": 1, "stages": 1, "whole": 1, "batch": 1}, "loss_fn is missing: zbpp.parity needs it"),
        ([], "returned a list: return a dict"),
    ],
)
def test_a_case_that_does_not_fit_is_one_line_and_the_status_2(found, text, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "some_case", SimpleNamespace(case=lambda: found))
    assert main(["some_case.py:case", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert text in said
    assert said.count("\n") == 1


def test_a_case_that_fails_on_another_rank_alone_says_so(monkeypatch, capsys):
    """The first rank saw a closed connection, and no rank said why."""
    monkeypatch.setattr(command, "world", lambda device: nullcontext(World(1, 2, torch.device("cpu"))))
    monkeypatch.setitem(sys.modules, "some_case", SimpleNamespace(case=lambda: int("x")))
    assert main(["some_case.py:case"]) == 2
    assert capsys.readouterr().err.startswith("error on rank 1: invalid literal")


def test_a_model_that_does_not_run_in_float64_runs_as_it_is_made():
    report = report_of(lambda: chain(Narrow), chain(Narrow))
    assert report.is_equal
    assert report.notes == ["the whole model does not run in float64: it ran as it is made"]


def refused(rank):
    batch = tuple(torch.ones(2, 4, 3)) if rank == 0 else None
    with pytest.raises(ValueError, match="batch is None on rank 1"):
        zbpp.parity(
            lambda batch: None, chain(nn.Linear), whole=lambda: chain(nn.Linear), batch=batch,
            loss_fn=nn.functional.mse_loss, num_microbatches=2,
        )  # fmt: skip


def test_a_batch_that_only_one_rank_has_is_refused_on_both():
    run_ranks(refused, 2)
