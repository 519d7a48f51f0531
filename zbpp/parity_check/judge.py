"""Compares the ranks with the whole model in one process. It exists on the first rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.closeness import largest
from zbpp.parity_check.faults import (
    Case,
    Difference,
    Fault,
    clip_faults,
    clipped,
    error_of,
    explained,
    gradient_faults,
    loss_faults,
    state_faults,
    total_norm,
    update_faults,
)
from zbpp.parity_check.ranks import Facts, Sent
from zbpp.parity_check.reference import Gradients, Reference
from zbpp.parity_check.report import Report, Row

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}  # of the ranks' parameters; 16 bits: the last one
_OF_16_BITS = 5e-2
# A gradient that is zero in theory (a key's bias) is rounding error: it is compared with the largest of all.
_FLOORS = {torch.float64: 1e-6, torch.float32: 1e-2}
_ULPS = 8  # of a weight that an update rounds


class Judge:
    """reference: has the data. dtype: of the ranks' parameters. tolerance: None: the dtype's own."""

    def __init__(
        self, reference: Reference, dtype: torch.dtype, tolerance: float | None, optimizer: Any
    ) -> None:
        self._reference, self._dtype = reference, dtype
        self._floor = _FLOORS.get(dtype, 1e-1)
        self._tolerance = _TOLERANCES.get(dtype, _OF_16_BITS) if tolerance is None else tolerance
        self.report = Report(self._tolerance)
        self._places = reference.places()
        self._parameters = [*dict.fromkeys(self._places.values())]
        self._optimizer = None if optimizer is None else optimizer(self._parameters)
        self._previous: Gradients | None = None

    # ---- Comparisons

    def state(self, weights: Sequence[Sequence[Sent]], buffers: Sequence[Sequence[Sent]]) -> bool:
        """Take the ranks' weights and buffers. Whether copies are equal."""
        self._reference.load([*weights, *buffers])
        expected: Gradients = {name: each.detach().cpu() for name, each in self._places.items()}
        case = Case(self._reference, [], 1, lambda p, i, t: 0.0, known={})
        return self._compare("weights before the step", weights, expected, state_faults, case)

    def gradients(
        self,
        check: str,
        facts: Sequence[Facts],
        losses: Sequence[Sequence[float]],
        sent: Sequence[Sequence[Sent]],
    ) -> bool:
        """Compare a step's gradients, then its losses. Whether they are equal."""
        self._reference.begin(facts)
        case = self._case(facts, sent)
        expected, own = self._reference.gradients(case.weight)
        expected = {name: None if each is None else each.cpu() for name, each in expected.items()}
        are_equal = self._compare(f"gradient of {check}", sent, expected, gradient_faults, case)
        self._previous, self._case_now = expected, case
        return are_equal and self._losses(f"losses of {check}", losses, own, case)

    def evaluation(self, facts: Sequence[Facts], losses: Sequence[Sequence[float]]) -> bool:
        """Compare the losses of an evaluation."""
        self._reference.begin(facts)
        return self._losses("losses of an evaluation", losses, self._reference.evaluate(), self._case_now)

    def clipping(
        self,
        check: str,
        clip: float,
        norms: Sequence[float | None],
        before: Sequence[Sequence[Sent]],
        after: Sequence[Sequence[Sent]],
    ) -> bool:
        """Compare the norm and the gradients after clipping."""
        squares = [[*self._squares_of(of_rank)] for of_rank in before]
        case = self._case_now._replace(squares=squares, clip=clip, known={})
        norm = total_norm(case)
        kept = {(rank, names[0]): value for rank, each in enumerate(before) for names, value in each}
        expected = {
            key: None if value is None else clipped(case, norm, value.double()) for key, value in kept.items()
        }
        most = largest(expected.values())
        found = []
        for rank, (names, value) in ((rank, each) for rank, of_rank in enumerate(after) for each in of_rank):
            wanted, unclipped = expected[rank, names[0]], kept[rank, names[0]]
            scale = self._scale(wanted, most)
            found.append(Difference(rank, names, value, wanted, scale, before=unclipped))
        whole = torch.tensor([norm], dtype=torch.float64)
        found += [
            Difference(rank, ("norm",), torch.tensor([value], dtype=torch.float64), whole, norm)
            for rank, value in enumerate(norms)
            if value is not None
        ]
        return self._judge(f"clipping of {check}", found, clip_faults, case)

    def _squares_of(self, sent: Sequence[Sent]) -> Iterator[tuple[int, float]]:
        for names, value in sent:
            if value is not None:
                yield id(self._places[names[0]]), value.double().square().sum().item()

    def update(self, check: str, gradients: Sequence[Sequence[Sent]], sent: Sequence[Sequence[Sent]]) -> bool:
        """Compare an update. Both sides update with the ranks' gradients: so rounding does not add up."""
        before = {name: each.detach().cpu().clone() for name, each in self._places.items()}
        for name, value in (
            (n, value) for each in reversed(gradients) for names, value in each for n in names
        ):
            place = self._places[name]
            place.grad = None if value is None else value.to(place)
        if self._optimizer is not None:
            self._optimizer.step()
        changes: Gradients = {name: each.detach().cpu() - before[name] for name, each in self._places.items()}
        for parameter in self._parameters:
            parameter.grad = None
        made = [
            [
                Sent(names, None if value is None else value.double() - before[names[0]])
                for names, value in each
            ]
            for each in sent
        ]
        case = self._case_now._replace(known={})
        return self._compare(f"update of {check}", made, changes, update_faults, case, before)

    # ---- How

    def _case(self, facts: Sequence[Facts], sent: Sequence[Sequence[Sent]]) -> Case:
        parts, ranks = self._reference.parts, [each.part for each in facts]
        totals = [part.share * sum(part.counts) for part in parts]

        def weight(part: int, microbatch: int, term: str) -> float:
            if not self._reference.terms.get(term, True):  # a Pipeline weighs auxiliary losses alike
                return parts[part].share / len(parts[part].counts)
            return parts[part].share * parts[part].counts[microbatch] / sum(totals)

        holders: dict[str, int] = {}
        for name in (name for of_rank in sent for names, _ in of_rank for name in names):
            holders[name] = holders.get(name, 0) + 1
        order = [*dict.fromkeys(ranks)]
        own = [order.index(each) for each in ranks]
        return Case(self._reference, own, max(holders.values()), weight, self._previous, known={})

    def _compare(
        self,
        check: str,
        sent: Sequence[Sequence[Sent]],
        expected: Gradients,
        faults: Callable[[Case], Iterator[Fault]],
        case: Case,
        weights: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """weights: what the compared changes were made to."""
        most = largest(expected.values())
        copies: dict[int, list[Tensor | None]] = {}
        for each in (each for of_rank in sent for each in of_rank):
            copies.setdefault(id(self._places[each.names[0]]), []).append(each.value)
        found = []
        for rank, of_rank in enumerate(sent):
            for names, value in of_rank:
                place = self._places[names[0]]
                scale = self._scale(expected[names[0]], most)
                if weights is not None:
                    rounded = _ULPS * torch.finfo(self._dtype).eps * largest([weights[names[0]]])
                    scale = max(scale, rounded / self._tolerance)
                found.append(
                    Difference(
                        rank,
                        names,
                        value,
                        expected[names[0]],
                        scale,
                        copies[id(place)],
                        is_frozen=not place.requires_grad,
                    )
                )
        return self._judge(check, found, faults, case)

    def _losses(
        self, check: str, losses: Sequence[Sequence[float]], own: Sequence[Sequence[float]], case: Case
    ) -> bool:
        found = []
        for rank, given in enumerate(losses):
            if given:
                value, part = torch.tensor(given, dtype=torch.float64), case.part_of[rank]
                possible = [*_possible_losses(len(given), part, own, case)]
                closest = min(possible, key=lambda each: error_of(value, each, 1.0))
                single = torch.tensor(own[part], dtype=torch.float64).split(1)
                found.append(Difference(rank, ("losses",), value, closest, largest([closest]), single))
        if not found:
            self.report.notes = [*dict.fromkeys([*self.report.notes, "no rank returned a loss"])]
        return self._judge(check, found, loss_faults, case)

    def _scale(self, expected: Tensor | None, most: float) -> float:
        return max(largest([expected]), self._floor * most)

    def _judge(
        self,
        check: str,
        compared: Sequence[Difference],
        faults: Callable[[Case], Iterator[Fault]],
        case: Case,
    ) -> bool:
        """Note the errors; if one is too large, write the verdict."""
        errors = [error_of(at.found, at.expected, at.scale) for at in compared]
        right, wrong = list[Difference](), list[Difference]()
        for at, error in zip(compared, errors, strict=True):
            (right if error <= self._tolerance else wrong).append(at)
        case = case._replace(right=right, tolerance=self._tolerance)
        causes = explained(wrong, faults(case), case) if wrong else {}
        by_difference = {id(at): causes.get(number, "") for number, at in enumerate(wrong)}
        rows = [
            Row(check, at.names[0], at.rank, error, by_difference.get(id(at), ""))
            for at, error in zip(compared, errors, strict=True)
        ]
        self.report.note(rows)
        if wrong:
            self._write_verdict(check, [by_difference[id(at)] for at in wrong], len(compared))
        return not wrong

    def _write_verdict(self, check: str, causes: Sequence[str], number: int) -> None:
        counts = {cause: causes.count(cause) for cause in dict.fromkeys(causes) if cause}
        best = max(counts, key=lambda cause: counts[cause], default="")
        texts = [f"{cause} ({count} of {len(causes)} differences)" for cause, count in counts.items()]
        unknown = causes.count("")
        if unknown:
            texts.append(f"no known mistake explains {unknown} of {len(causes)} differences")
        self.report.is_equal, self.report.cause = False, best
        self.report.verdict = f"NOT EQUAL: {check} differs in {len(causes)} of {number}: {'; '.join(texts)}"

    def end(self, num_updates: int) -> Report:
        """The report."""
        if self.report.is_equal:
            worst = max(self.report.checks, key=lambda check: self.report.checks[check])
            self.report.verdict = (
                f"EQUAL: the ranks compute what one process computes, in {len(self.report.checks)} "
                f"comparisons with {num_updates} updates; the largest error is "
                f"{self.report.checks[worst]:.1e} ({worst}), and up to {self._tolerance:.0e} is rounding"
            )
        return self.report


def _possible_losses(number: int, part: int, own: Sequence[Sequence[float]], case: Case) -> Iterator[Tensor]:
    """What a rank may return as so many losses: those of some of its microbatches, or one mean.

    A Pipeline with a loss that is marked by `mean_over` weights its losses: the plain mean of a step's over
    all microbatches and parts is the mean of all data, that of an evaluation's is the mean of its own data.
    """
    losses = [torch.tensor(each, dtype=torch.float64) for each in own]
    weights = [
        torch.tensor([case.weight(p, i, "") for i in range(len(each))], dtype=torch.float64)
        for p, each in enumerate(own)
    ]
    sums = [each @ weight for each, weight in zip(losses, weights, strict=True)]
    mine, share = losses[part], weights[part].sum()
    weighted = mine * weights[part] * len(mine)
    if number > 1 or len(mine) == 1:
        for each in (mine, weighted * len(own), weighted / share):
            yield from each.split(number) if number <= len(mine) else (each,)
    if number == 1:
        yield (sums[part] / share)[None]  # of its own data
        yield torch.stack(sums).sum()[None]  # of all data
