"""A step that is taken back and done otherwise, beside torch's optimizer that never did it."""

import copy
import importlib.util
from contextlib import suppress
from weakref import ref

import pytest
import torch
from torch import nn

from zbpp.runtime.partial_updates import partial_updates
from zbpp.training.inverse import InverseRollback
from zbpp.training.rollback import ExactRollback

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
                each.grad.mul_(group["num_steps"]).add_(torch.rand(()) * len(kept["past"]))
        super().step(closure)


MAKE = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, foreach=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Counting": lambda p: Counting(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
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
    rollback = ExactRollback(validated)
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
        rollback.keep([])
        validated.step()
        rollback.after_step(has_stepped=True)
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


def test_copies_exist_from_keep_to_forget():
    ours = parameters()
    optimizer = torch.optim.AdamW(ours)
    rollback = ExactRollback(optimizer)
    num_elements = sum(each.numel() for each in ours)
    for step in range(3):
        set_gradients(ours, step)
        rollback.keep([])
        optimizer.step()
        rollback.after_step(has_stepped=True)
        held = [ref(each.untyped_storage()) for each in rollback.tensors()]
        if step:  # the first step knows neither the states nor whether the step changes gradients
            # weights, two states, the step's number
            assert rollback.num_bytes == 4 * (3 * num_elements + len(ours))
        rollback.forget()
        assert rollback.num_bytes == 0
        assert not any(each() for each in held)


def test_a_step_that_is_not_made_is_not_copied():
    """But a rate that is a tensor, which the caller may change before the step is made after all."""
    ours = parameters()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(ours, lr=rate, foreach=False)
    rollback = ExactRollback(optimizer)
    set_gradients(ours, 0)
    before = [each.detach().clone() for each in ours]
    rollback.keep([], steps=False)
    rollback.after_step(has_stepped=False)
    assert rollback.num_bytes == rate.nbytes
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


class KeepsAnObject(torch.optim.SGD):
    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            self.state[each]["generator"] = torch.Generator()
        super().step(closure)


class KeepsAnAttribute(torch.optim.SGD):
    def step(self, closure=None):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        super().step(closure)


@pytest.mark.parametrize(
    "make, message",
    [
        (KeepsAnObject, "KeepsAnObject: the optimizer keeps an object of type Generator"),
        (KeepsAnAttribute, "KeepsAnAttribute changes its attributes num_steps in step"),
        (torch.optim.LBFGS, "LBFGS.step needs a closure"),
    ],
)
def test_an_optimizer_whose_step_cannot_be_taken_back_is_refused_before_the_first_step(make, message):
    optimizer = make(parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        ExactRollback(optimizer)
    assert not optimizer.state  # the trial step was a twin's


def with_a_complex_weight(of):
    return [*of, nn.Parameter(torch.ones(90, dtype=torch.complex64))]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: torch.optim.AdamW(p, capturable=True), "AdamW can't make a step .*If capturable=True"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "SGD can't make a step .*a leaf Variable"),
        (lambda p: torch.optim.AdamW(with_a_complex_weight(p), fused=True), "AdamW can't .*fused"),
    ],
)
def test_what_torch_refuses_in_step_is_refused_before_the_first_step(make, message):
    """On the CPU. With gradient release, too: its trial of the optimizer sees a weight of each dtype."""
    optimizer = make(parameters())
    with pytest.raises(ValueError, match=message):
        ExactRollback(optimizer)
    with pytest.raises(ValueError, match="a trial step failed"):
        partial_updates(optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SparseAdam])
def test_an_optimizer_whose_step_fails_only_in_the_trial_is_taken(make):
    """A frozen weight of integers gets no gradient, and SparseAdam gets sparse ones."""
    frozen = nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False)
    ExactRollback(make([*parameters(), frozen]))


def inverted(make, dtype, num_steps):
    """Parameters and states before a step, and after it was done and computed backwards."""
    ours = parameters(dtype)
    optimizer = make(ours)
    rollback = InverseRollback(optimizer)
    for step in range(num_steps):
        set_gradients(ours, step)
        rollback.keep([])
        before = [each.clone() if isinstance(each, torch.Tensor) else each for each in tensors_of(optimizer)]
        optimizer.step()
        rollback.after_step(has_stepped=True)
        if step == num_steps - 1:
            with rollback.undone():
                pass
        assert optimizer.param_groups[0]["lr"] == 0.01
    return before, tensors_of(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_the_inverse_gives_back_what_was_there_but_for_rounding(make, num_steps, dtype, tolerance):
    before, after = inverted(make, dtype, num_steps)
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor):
            torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance)
        else:
            assert new == old


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: torch.optim.Adam(p), "for torch's AdamW and SGD, not Adam"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.AdamW(p, betas=(0.0, 0.9)), "betas above 0"),
    ],
)
def test_the_inverse_refuses_what_it_cannot_compute(make, message):
    with pytest.raises(ValueError, match=message):
        InverseRollback(make(parameters()))


@pytest.mark.parametrize("rollback", [ExactRollback, InverseRollback])
def test_after_an_error_within_it_options_and_random_numbers_are_those_of_now(rollback):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(3)
    undo = rollback(optimizer)
    undo.keep([])
    optimizer.step()
    undo.after_step(has_stepped=True)
    optimizer.param_groups[0]["lr"] = 0.2
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    with suppress(KeyError), undo.undone():
        assert optimizer.param_groups[0]["lr"] == 0.1
        raise KeyError
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert torch.equal(torch.rand(1), expected)


def test_parameters_that_were_put_into_a_group_are_refused():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    undo = ExactRollback(optimizer)
    undo.keep([])
    undo.after_step(has_stepped=False)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(RuntimeError, match=r"call settle\(\) of PostValidation before"), undo.undone():
        pass
