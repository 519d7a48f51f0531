"""zbpp.parity names the mistakes that are planted in a hand-written trainer, and accuses no right one."""

import pytest
import torch

import zbpp
from helpers.hand_written import MICROBATCHES, HandWritten, Whole, loss_fn, tokens
from helpers.processes import run_ranks
from helpers.split import float64

IN_ONE_PROCESS = [
    "",
    "only the last microbatch counts",
    "only the first microbatch counts",
    "only the last microbatch counts, divided by the number of microbatches",
    "the last microbatch is lost",
    "the sum over microbatches in place of their mean",
    "divided by the number of microbatches twice",
    "a mean of means in place of the mean over all tokens",
    "the sum over tokens in place of their mean",
    "a tied copy's gradient is not summed with the others'",
    "the loss 'balance' is lost",
    "the loss 'balance' is summed over microbatches, the others are averaged",
    "the gradients of the step before are still in",
    "a frozen part is trained",
    "a trained parameter has no gradient",
    "gradients are not clipped",
    "copies of a parameter count several times in the norm",
    "the optimizer leaves this parameter out",
    "losses are divided by the number of microbatches",
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
    ],
    "pipeline": [
        "",
        "one rank's norm in place of all ranks'",
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


def causes_of(rank, layout, faults):
    return [checked(layout, rank, fault).cause for fault in faults]


@pytest.mark.parametrize("layout", IN_TWO)
def test_a_planted_mistake_of_two_processes_is_named_on_both(layout):
    assert run_ranks(causes_of, 2, layout, IN_TWO[layout]) == [IN_TWO[layout]] * 2
