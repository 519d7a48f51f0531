"""A hand-written pipeline of two stages for tests of zbpp.parity, right or with a mistake.

It knows nothing of zbpp. Layouts: "one": both stages in one process; "replicas": both stages in each of two
processes, which have other rows; "pipeline": a stage in each of two processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, ROWS, MICROBATCHES = 3, 12, 4


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.middle = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.middle.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.inner(x).tanh())


class Last(nn.Module):
    """Has a copy of the first stage's inner weight, and a router with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.router, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer.weight = First().inner.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        return self.outer(x * logits.softmax(-1)), logits.logsumexp(-1).square()


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = First(), Last()
        self.last.outer.weight = self.first.inner.weight

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x))


def tokens(target: Tensor) -> Tensor:
    """How many rows count."""
    return (target[:, 0] > -0.5).sum()


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> dict[str, Tensor]:
    valid = target[:, 0] > -0.5
    squares, balance = (output[0] - target).square().mean(-1), output[1]
    return {"near": squares[valid].mean(), "balance": balance[valid].mean()}


def batch_of(part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(part)
    x, target = torch.randn(2, ROWS, WIDTH, generator=generator)
    target[0 :: ROWS // MICROBATCHES, 0] = 1.0  # some row of each microbatch counts
    return x, target


class HandWritten:
    """One rank of the pipeline. fault: the name that zbpp.parity gives to the mistake; "" for none."""

    def __init__(self, layout: str, rank: int = 0, fault: str = "", seed: int = 0) -> None:
        self.layout, self.rank, self.fault = layout, rank, fault
        stages = {"first": First(), "last": Last()}
        kept = list(stages) if layout != "pipeline" else [list(stages)[rank]]
        self.stages = nn.ModuleDict({name: stages[name] for name in kept})
        self.batch = batch_of(2 * seed + (rank if layout == "replicas" else 0))
        self.copies = [
            *([stages["first"].inner.weight] if "first" in kept else []),
            *([stages["last"].outer.weight] if "last" in kept else []),
        ]
        self.buffer: dict[Tensor, Tensor] = {}
        if fault == "a frozen part is trained" and "first" in kept:
            self.stages["first"].middle.bias.requires_grad_()
        if fault == "replicas are unequal" and rank == 1:
            with torch.no_grad():
                self.stages["last"].router.bias += 1

    # ---- A step

    def step(self, batch: Any) -> Any:
        pieces = [*zip(*(each.chunk(MICROBATCHES) for each in batch), strict=True)]
        run = self._both if self.layout != "pipeline" else (self._run_first, self._run_last)[self.rank]
        losses = run(pieces)
        self._sum_copies()
        self._reduce()
        self._spoil()
        return self._told(losses) if losses else losses

    def _both(self, pieces: Any) -> list[Tensor]:
        losses = []
        for number, (x, target) in enumerate(pieces):
            y = self.stages["first"](x)
            losses.append(self._train(y.detach().requires_grad_(), number, target, y))
        return losses

    def _run_first(self, pieces: Any) -> None:
        outputs = [self.stages["first"](x) for x, _ in pieces]
        for each in outputs:
            dist.send(each.detach(), 1)
        for number, each in enumerate(outputs):
            gradient = torch.empty_like(each)
            dist.recv(gradient, 1)
            self._forget(number)
            each.backward(gradient)

    def _run_last(self, pieces: Any) -> list[Tensor]:
        losses, inputs = [], []
        for number, (x, target) in enumerate(pieces):
            received = torch.empty_like(x)
            dist.recv(received, 0)
            inputs.append(received.requires_grad_())
            losses.append(self._train(received, number, target))
        for each in inputs:
            dist.send(each.grad, 0)
        return losses

    def _train(self, x: Tensor, number: int, target: Tensor, y: Tensor | None = None) -> Tensor:
        self._forget(number)
        terms = loss_fn(self.stages["last"](x), target)
        factor = self._factor(target)
        trained = dict(terms)
        if self.fault == "the loss 'balance' is lost":
            del trained["balance"]
        if self.fault == "the loss 'balance' is summed over microbatches, the others are averaged":
            trained["balance"] = MICROBATCHES * trained["balance"]
        if self.fault == "the loss 'balance' is another one in the stages than in the whole model":
            trained["balance"] = trained["balance"].square()
        lost = {"the first microbatch is lost": 0, "the last microbatch is lost": MICROBATCHES - 1}
        if lost.get(self.fault) != number:
            (factor * sum(trained.values())).backward()
            if y is not None:
                y.backward(x.grad)
        return sum(terms.values()).detach()

    def _forget(self, number: int) -> None:
        if (self.fault.startswith("only the last") and number) or (
            self.fault.startswith("only the first") and number == 1
        ):
            self.kept = [each.grad for each in self.stages.parameters()]
            self.stages.zero_grad()

    def _factor(self, target: Tensor) -> Any:
        """Of a microbatch's gradient; summed over replicas, the factors of all microbatches add up to 1."""
        counts = tokens(self.batch[1])
        if self.layout == "replicas" and self.fault != "each replica divides by its own number of tokens":
            dist.all_reduce(counts)
        else:
            counts = counts * (2 if self.layout == "replicas" else 1)
        right = tokens(target) / counts
        return {
            "a mean of means in place of the mean over all tokens": 1 / MICROBATCHES,
            "the sum over tokens in place of their mean": tokens(target),
            "the sum over microbatches in place of their mean": right * MICROBATCHES,
            "divided by the number of microbatches twice": right / MICROBATCHES,
            "only the last microbatch counts": 1.0,
            "only the first microbatch counts": 1.0,
            "replicas are not reduced: the gradient is that of the rank's own data": right * 2,
            "the sum over replicas in place of their mean": right * 2,
            "divided by the number of replicas twice": right / 2,
        }.get(self.fault, right)

    def _sum_copies(self) -> None:
        if self.fault == "a tied copy's gradient is not summed with the others'":
            return
        total = sum(each.grad for each in self.copies)
        if self.layout == "pipeline":
            dist.all_reduce(total)
        for each in self.copies:
            each.grad = total.clone()

    def _reduce(self) -> None:
        if self.layout == "replicas" and "not reduced" not in self.fault:
            for each in self.stages.parameters():
                if each.grad is not None:
                    dist.all_reduce(each.grad)

    def _spoil(self) -> None:
        for each in self.stages.parameters():
            if each.grad is None:
                continue
            if self.fault == "the gradients of the step before are still in":
                each.grad = self.buffer[each] = self.buffer.get(each, 0) + each.grad
        if self.fault == "a trained parameter has no gradient":
            self.stages["last"].router.bias.grad = None
        if self.fault.startswith("only the first"):
            for each, gradient in zip(self.stages.parameters(), self.kept, strict=True):
                each.grad = gradient

    def _told(self, losses: list[Tensor]) -> list[Tensor]:
        if self.fault == "the loss of one microbatch in place of the mean":
            return losses[-1:]
        number = MICROBATCHES if "microbatches" in self.fault else 2
        if self.fault.startswith("losses are divided"):
            return [each / number for each in losses]
        if self.fault.startswith("losses are multiplied"):
            return [each * number for each in losses]
        return losses[::-1] if self.fault == "losses are in the reverse order" else losses

    # ---- Around it

    def evaluate(self, batch: Any) -> Any:
        assert self.layout == "one"
        with torch.no_grad():
            output = self.stages["last"](self.stages["first"](batch[0]))
            pieces = zip(*(each.chunk(MICROBATCHES) for each in (*output, batch[1])), strict=True)
            return [sum(loss_fn((y, balance), target).values()) for y, balance, target in pieces]

    def clip(self, limit: float) -> Tensor:
        """Clips by the norm over all ranks; a tied parameter counts once."""
        if self.fault == "gradients are not clipped":
            return torch.zeros(())
        mine = [each for each in self.stages.parameters() if each.grad is not None]
        once = self.fault != "copies of a parameter count several times in the norm"
        shared = self.copies[-1:] if self.layout != "pipeline" or self.rank else []
        skipped = set(shared) if once else set()
        total = torch.stack([each.grad.square().sum() for each in mine if each not in skipped]).sum()
        if self.fault == "the sum of the ranks' norms in place of the norm":
            norm = torch.stack([each.grad.square().sum() for each in mine]).sum().sqrt()
            dist.all_reduce(norm)
        else:
            if self.layout == "pipeline" and self.fault != "one rank's norm in place of all ranks'":
                dist.all_reduce(total)
            norm = total.sqrt()
        for each in mine:
            each.grad *= min(1.0, limit / (norm.item() + 1e-6))
        return norm

    def update(self) -> None:
        with torch.no_grad():
            for name, each in self.stages.named_parameters():
                if each.grad is not None and not (
                    self.fault.startswith("the optimizer") and "router" in name
                ):
                    each -= 0.1 * each.grad
                if self.fault == "a frozen part is trained" and each.grad is None:
                    each *= 0.9
