"""Known mistakes as data: what each would have computed instead.

A comparison that fails is a list of differences. Each fault predicts what stands in place of the expected
numbers; the fault that explains most differences to rounding is named, and then the next one for the rest. At
equal numbers the order of the table decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.closeness import largest
from zbpp.features.reductions.norm import clip_factor
from zbpp.parity_check.reference import Gradients, Reference, Weight


class Difference(NamedTuple):
    """One tensor of one rank that is not what the reference has.

    names: of the parameter's places on this rank. copies: what other ranks have in its place; of a loss, the
    losses of single microbatches. before: the gradient before clipping, the weight's gradient before an
    update. scale: what an error is relative to.
    """

    rank: int
    names: tuple[str, ...]
    found: Tensor | None
    expected: Tensor | None
    scale: float
    copies: Sequence[Tensor | None] = ()
    before: Tensor | None = None
    is_frozen: bool = False


class Case(NamedTuple):
    """What predictions are made from. part_of: each rank's part. replicas: ranks that hold a copy.

    previous: the gradients of the step before. squares: per rank, (parameter, squared norm) of what it holds.
    right: the compared tensors that are equal. tolerance: an error up to here is rounding.
    """

    reference: Reference
    part_of: Sequence[int]
    replicas: int
    weight: Weight
    previous: Gradients | None = None
    squares: Sequence[Sequence[tuple[int, float]]] = ()
    clip: float = 0.0
    right: Sequence[Difference] = ()
    tolerance: float = 0.0
    known: dict[tuple[str, int], Gradients] = {}  # noqa: RUF012  # each case is given its own

    @property
    def microbatches(self) -> int:
        """How many each part has."""
        return len(self.reference.parts[0].counts)

    def gradient(self, name: str, own: int, weight: Weight, *, untied: bool = False) -> Gradients:
        """The weighted gradients, computed once. own: the part that the weight depends on."""
        if (name, own) not in self.known:
            found, _ = self.reference.gradients(weight, untied=untied)
            self.known[name, own] = {
                name: None if each is None else each.cpu() for name, each in found.items()
            }
        return self.known[name, own]


Predict = Callable[[Case, Difference], Tensor | None]


class Fault(NamedTuple):
    """predict: what the difference's tensor would be; None if the fault does not apply.

    is_guess: it follows from which tensors differ, not from numbers. It is named where no other fault is.
    """

    name: str
    predict: Predict
    is_guess: bool = False


# ---- Gradients: other weights of microbatches, parts and terms

Other = Callable[[Case, int, int, str, int], float]  # (case, part, microbatch, term, the rank's own part)


def _last(case: Case, microbatch: int) -> bool:
    return microbatch == case.microbatches - 1


def _own_tokens(case: Case, p: int, i: int) -> float:
    part = case.reference.parts[p]
    return part.share * part.counts[i] / sum(part.counts)


def _all_tokens(case: Case) -> float:
    return sum(sum(part.counts) for part in case.reference.parts)


_OTHER_WEIGHTS: Sequence[tuple[str, Other]] = (
    ("only the last microbatch counts", lambda c, p, i, t, own: _last(c, i) * c.reference.parts[p].share),
    ("only the first microbatch counts", lambda c, p, i, t, own: (i == 0) * c.reference.parts[p].share),
    (
        "only the last microbatch counts, divided by the number of microbatches",
        lambda c, p, i, t, own: _last(c, i) * c.weight(p, i, t),
    ),
    (
        "only the first microbatch counts, divided by the number of microbatches",
        lambda c, p, i, t, own: (i == 0) * c.weight(p, i, t),
    ),
    ("the last microbatch is lost", lambda c, p, i, t, own: (not _last(c, i)) * c.weight(p, i, t)),
    ("the first microbatch is lost", lambda c, p, i, t, own: (i > 0) * c.weight(p, i, t)),
    (
        "the sum over microbatches in place of their mean",
        lambda c, p, i, t, own: c.microbatches * c.weight(p, i, t),
    ),
    (
        "divided by the number of microbatches twice",
        lambda c, p, i, t, own: c.weight(p, i, t) / c.microbatches,
    ),
    (
        "a mean of means in place of the mean over all tokens",
        lambda c, p, i, t, own: c.reference.parts[p].share / c.microbatches,
    ),
    (
        "each replica divides by its own number of tokens",
        lambda c, p, i, t, own: _own_tokens(c, p, i),
    ),
    (
        "the sum over tokens in place of their mean",
        lambda c, p, i, t, own: c.weight(p, i, t) * _all_tokens(c),
    ),
    (
        "replicas are not reduced: the gradient is that of the rank's own data",
        lambda c, p, i, t, own: (p == own) * c.weight(p, i, t) / c.reference.parts[p].share,
    ),
    (
        "replicas are not reduced, and the gradient is divided by their number",
        lambda c, p, i, t, own: (p == own) * c.weight(p, i, t),
    ),
    ("the sum over replicas in place of their mean", lambda c, p, i, t, own: c.replicas * c.weight(p, i, t)),
    ("divided by the number of replicas twice", lambda c, p, i, t, own: c.weight(p, i, t) / c.replicas),
)


def _weighted(name: str, other: Other) -> Fault:
    def predict(case: Case, at: Difference) -> Tensor | None:
        own = case.part_of[at.rank]
        is_own = "replicas are not reduced" in name
        found = case.gradient(name, own if is_own else -1, lambda p, i, t: other(case, p, i, t, own))
        return _or_zeros(found.get(at.names[0]), at)

    return Fault(name, predict)


def _of_terms(case: Case) -> Iterator[Fault]:
    """A term of the loss, such as an auxiliary loss, that is lost or not averaged."""
    for term in case.reference.terms if len(case.reference.terms) > 1 else ():
        yield _other_factor(f"the loss {term!r} is lost", term, 0.0)
        name = f"the loss {term!r} is summed over microbatches, the others are averaged"
        yield _other_factor(name, term, case.microbatches)


def _other_losses(case: Case) -> Iterator[Fault]:
    """A term that depends on the cut into stages, such as a mean over a stage's layers."""
    for term in case.reference.terms if len(case.reference.terms) > 1 else ():
        name = f"the loss {term!r} is another one in the stages than in the whole model"
        yield Fault(name, partial(_all_that_it_reaches, term), is_guess=True)


def _all_that_it_reaches(term: str, case: Case, at: Difference) -> Tensor | None:
    """Whatever was found, if exactly those parameters differ that have a gradient from this term."""
    of_term = case.gradient(f"{term} alone", -1, lambda p, i, t: case.weight(p, i, t) * (t == term))

    def reached(each: Difference) -> float:
        return error_of(None, of_term.get(each.names[0]), each.scale)

    is_apart = all(reached(each) <= case.tolerance for each in case.right)
    some_trained = any(each.expected is not None for each in case.right)
    return at.found if some_trained and is_apart and reached(at) > 0 else None


def _other_factor(name: str, term: str, factor: float) -> Fault:
    return _weighted(name, lambda c, p, i, t, own: c.weight(p, i, t) * (factor if t == term else 1.0))


# ---- Gradients: other mistakes


def _stale(case: Case, at: Difference) -> Tensor | None:
    if case.previous is None or at.expected is None:
        return None
    return at.expected + _or_zeros(case.previous.get(at.names[0]), at)


def _frozen(case: Case, at: Difference) -> Tensor | None:
    return at.found if at.is_frozen else None


def _missing(case: Case, at: Difference) -> Tensor | None:
    return None if at.found is not None or at.expected is None else torch.zeros_like(at.expected)


def _one_place(case: Case, at: Difference) -> Tensor | None:
    places = case.reference.places()
    tied = [name for name, each in places.items() if each is places.get(at.names[0])]
    if len(tied) == len(at.names):
        return None
    found = case.gradient("untied", -1, case.weight, untied=True)
    own = [each for each in map(found.get, at.names) if each is not None]
    return sum(own[1:], own[0]) if own else _or_zeros(None, at)


def _unequal(case: Case, at: Difference) -> Tensor | None:
    return at.found if any(error_of(each, at.found, at.scale) > 0 for each in at.copies) else None


_FROZEN = Fault("a frozen part is trained", _frozen)
_UNEQUAL = Fault("replicas are unequal", _unequal)


def gradient_faults(case: Case) -> Iterator[Fault]:
    """Of gradients after a step."""
    yield _FROZEN
    yield Fault("the gradients of the step before are still in", _stale)
    yield Fault("a tied copy's gradient is not summed with the others'", _one_place)
    yield from _of_terms(case)
    for name, other in _OTHER_WEIGHTS:
        yield _weighted(name, other)
    yield Fault("a trained parameter has no gradient", _missing)
    yield _UNEQUAL
    yield from _other_losses(case)


# ---- The norm, and gradients after clipping


def total_norm(case: Case) -> float:
    """The norm over the whole model: each parameter counts once."""
    return math.sqrt(math.fsum({key: value for each in case.squares for key, value in each}.values()))


_OTHER_NORMS: Sequence[tuple[str, Callable[[Case, int], float]]] = (
    (
        "one rank's norm in place of all ranks'",
        lambda case, rank: math.sqrt(math.fsum(dict(case.squares[rank]).values())),
    ),
    (
        "copies of a parameter count several times in the norm",
        lambda case, rank: math.sqrt(math.fsum(value for each in case.squares for _, value in each)),
    ),
    (
        "the sum of the ranks' norms in place of the norm",
        lambda case, rank: sum(math.sqrt(math.fsum(value for _, value in each)) for each in case.squares),
    ),
    ("gradients are not clipped", lambda case, rank: 0.0),
)


def clipped(case: Case, norm: float, gradient: Tensor) -> Tensor:
    """A gradient after clipping by this norm."""
    return gradient * clip_factor(norm, case.clip)


def clip_faults(case: Case) -> Iterator[Fault]:
    """Known mistakes of clipping: in the norm, which has the name "norm", and in the clipped gradients."""
    for name, norm_of in _OTHER_NORMS:
        yield Fault(name, partial(_of_norm, norm_of))
    yield _UNEQUAL


def _of_norm(norm_of: Callable[[Case, int], float], case: Case, at: Difference) -> Tensor:
    norm = norm_of(case, at.rank)
    return torch.tensor([norm]) if at.before is None else clipped(case, norm, at.before)


# ---- Weights and losses


def update_faults(case: Case) -> Iterator[Fault]:
    """Of changes of weights in an update."""
    yield _FROZEN
    yield Fault(
        "the optimizer leaves this parameter out",
        lambda case, at: None if at.expected is None else torch.zeros_like(at.expected),
    )
    yield _UNEQUAL


def state_faults(case: Case) -> Iterator[Fault]:
    """Of weights before the first step."""
    yield _UNEQUAL


def loss_faults(case: Case) -> Iterator[Fault]:
    """Known mistakes in the losses that a call returns."""
    for what, number in {"microbatches": case.microbatches, "replicas": case.replicas}.items():
        yield _scaled(f"losses are divided by the number of {what}", 1 / number)
        yield _scaled(f"losses are multiplied by the number of {what}", number)
    yield Fault(
        "losses are in the reverse order",
        lambda case, at: None if at.expected is None else at.expected.flip(0),
    )
    yield Fault("the loss of one microbatch in place of the mean", _of_one)


def _of_one(case: Case, at: Difference) -> Tensor | None:
    return min(at.copies, key=lambda each: error_of(at.found, each, 1.0), default=None)


def _scaled(name: str, factor: float) -> Fault:
    return Fault(name, lambda case, at: None if at.expected is None else factor * at.expected)


# ---- Explaining


def error_of(found: Tensor | None, expected: Tensor | None, scale: float) -> float:
    """The largest difference relative to `scale`; no gradient is a gradient of zero."""
    if found is None or expected is None:
        some = expected if found is None else found
        difference = torch.zeros(()) if some is None else some
    elif found.shape != expected.shape:
        return math.inf
    else:
        difference = found.double() - expected.double()
    most = difference.abs().max().item() if difference.numel() else 0.0
    if not math.isfinite(most):
        return math.inf
    return most / scale if scale else float(most > 0) * math.inf if most else 0.0


def explained(differences: Sequence[Difference], faults: Iterator[Fault], case: Case) -> dict[int, str]:
    """{number of the difference: the fault's name}; those that no fault explains are left out."""
    by_fault: dict[Fault, set[int]] = {}
    for fault in faults:
        by_fault[fault] = {
            number
            for number, at in enumerate(differences)
            if (tensor := fault.predict(case, at)) is not None
            and error_of(at.found, tensor, max(at.scale, largest([tensor]))) <= case.tolerance
        }
        if len(by_fault[fault]) == len(differences):
            break
    found: dict[int, str] = {}
    while by_fault:
        best = max(by_fault, key=lambda fault: (not fault.is_guess, len(by_fault[fault] - found.keys())))
        found |= dict.fromkeys(by_fault.pop(best) - found.keys(), best.name)
    return found


def _or_zeros(gradient: Tensor | None, at: Difference) -> Tensor:
    some = at.expected if at.found is None else at.found
    if gradient is not None:
        return gradient
    return torch.zeros(()) if some is None else torch.zeros_like(some, dtype=torch.float64)
