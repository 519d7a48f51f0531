"""A step that is taken back and done otherwise, beside torch's optimizer that never did it."""

import copy
import importlib.util
from weakref import ref

import pytest
import torch
from torch import nn

from zbpp.training.optim.rollback import Rollback

SHAPES = (7, 5), (5,), ()


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def set_gradients(of, seed):
    generator = torch.Generator().manual_seed(seed)
    for each in of:
        each.grad = torch.randn(each.shape, dtype=each.dtype, generator=generator)


class Counting(torch.optim.SGD):
    """Counts in its options, as some optimizers do, keeps a nest of things, and changes its gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for each in group["params"]:
                kept = self.state[each].setdefault("nest", {"past": [], "pair": (0.0, torch.zeros(()))})
                kept["past"].append(each.grad.norm())
                kept["pair"] = (kept["pair"][0] + 1, kept["pair"][1] + 1)
                each.grad.mul_(group["num_steps"]).add_(0.3 * len(kept["past"]))
        super().step(closure)


MAKE = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, foreach=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Counting": lambda p: Counting(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
}
if importlib.util.find_spec("optimi"):
    import optimi

    MAKE["optimi Kahan"] = lambda p: optimi.AdamW(p, lr=0.1, kahan_sum=True)
    MAKE["optimi Lion"] = lambda p: optimi.Lion(p, lr=0.1)


def tensors_of(optimizer):
    """All tensors and numbers of parameters, states and options, in one order."""
    state = optimizer.state_dict()
    parts = [[each.detach() for group in optimizer.param_groups for each in group["params"]]]
    return torch.utils._pytree.tree_leaves([*parts, state["state"], state["param_groups"]])


def assert_same(one, other):
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=True))
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("name", MAKE)
def test_a_step_taken_back_and_done_otherwise_leaves_nothing(name, first):
    """first: the number of steps before; in the very first one states don't exist yet."""
    dtype = torch.bfloat16 if "Kahan" in name else torch.float32
    ours, plain = parameters(dtype), parameters(dtype)
    validated, reference = MAKE[name](ours), MAKE[name](plain)
    rollback = Rollback(validated)
    for step in range(first + 3):
        seeds = 10 + step, step  # of wrong gradients and of right ones
        set_gradients(plain, seeds[1])
        torch.manual_seed(step)
        if step != first + 1:  # that one is skipped
            for group in reference.param_groups:
                group["lr"] = group["lr"] * 0 + 0.1 / (step + 1)
            reference.step()
        torch.manual_seed(step)
        set_gradients(ours, seeds[1])
        for group in validated.param_groups:
            group["lr"] = group["lr"] * 0 + 0.1 / (step + 1)
        rollback.keep()
        validated.step()
        rollback.after_step()
        for group in validated.param_groups:
            group["lr"] = group["lr"] * 0 + 7.0  # a scheduler's, for the next step
        if step >= first:
            with rollback.undone():
                if step != first + 1:
                    validated.step()
            assert all(group["lr"] == 7.0 for group in validated.param_groups)
        for groups in zip(validated.param_groups, reference.param_groups, strict=True):
            groups[0]["lr"] = copy.copy(groups[1]["lr"])
        assert_same(validated, reference)


def nbytes(rollback):
    return sum(each.nbytes for each in rollback.tensors())


@pytest.mark.parametrize("scales", [False, True])
def test_copies_exist_from_keep_to_forget(scales):
    ours = parameters()
    optimizer = torch.optim.AdamW(ours)
    rollback = Rollback(optimizer)
    num_elements = sum(each.numel() for each in ours)
    for step in range(3):
        set_gradients(ours, step)
        rollback.keep(scales=scales)
        optimizer.step()
        rollback.after_step()
        held = [ref(each.untyped_storage()) for each in rollback.tensors()]
        if step:  # weights, two states, gradients that are scaled; the step's number
            assert nbytes(rollback) == 4 * ((3 + scales) * num_elements + len(ours))
        rollback.forget()
        assert nbytes(rollback) == 0
        assert not any(each() for each in held)


def test_a_step_that_is_not_made_is_not_copied():
    """But a rate that is a tensor, which the caller may change before the step is made after all."""
    ours = parameters()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(ours, lr=rate, foreach=False)
    rollback = Rollback(optimizer)
    set_gradients(ours, 0)
    before = [each.detach().clone() for each in ours]
    rollback.keep(steps=False)
    rollback.after_step()
    assert rollback.tensors() == []
    rate.fill_(7.0)
    with rollback.undone():
        assert rate.item() == pytest.approx(0.1)
        assert all(map(torch.equal, ours, before))
        optimizer.step()
    assert rate.item() == 7.0
    expected = parameters()
    reference = torch.optim.AdamW(expected, lr=torch.tensor(0.1), foreach=False)
    set_gradients(expected, 0)
    reference.step()
    assert all(map(torch.equal, ours, expected))
