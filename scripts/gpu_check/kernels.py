"""Head with its loss, embedding, norm: time, peak, error against float64, equal bits three times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bench_head
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_check.measuring import MIB, error_of, has_same_bits, ms_of, peak_mib
from gpu_check.page import ROUNDED, Page
from gpu_check.stages import LLAMA_8B, SMALL, Sizes
from zbpp.autograd import backward_input
from zbpp.features.reductions.norm import clip_grad_norm_
from zbpp.planning import plan
from zbpp.runtime import Pipeline

Run = Callable[[], dict[str, Tensor]]  # the results by name


def run(page: Page) -> None:
    sizes: Sizes = page.here.choose(LLAMA_8B._replace(tokens=4096), SMALL)
    embedding(page, sizes)
    norm(page)
    head(page, sizes)


def rows(
    page: Page, what: str, run: Run, exact: dict[str, Tensor], *, floor: float, why: str, nbytes: int
) -> None:
    """Time, peak, errors and bits of one way to compute something. nbytes: of its results."""
    here = page.here
    took = page.figure(what, "ms", lambda: ms_of(here, run, rounds=5), floor=floor, why=why)
    if took != took:
        return  # it failed
    page.figure(
        f"{what}: most live bytes", "MiB", lambda: peak_mib(here, run), floor=nbytes / MIB, why="the results"
    )
    for name, value in exact.items():
        why = f"{ROUNDED:.4g}: rounded to bfloat16 once" if name in ("dx", "dW") else "below 1e-4"
        page.figure(
            f"{what}: error of {name}", "", lambda n=name, v=value: error_of(run()[n][: len(v)], v), why=why
        )
    page.check(f"{what}: unlike in two more runs", lambda: _repeated(run))


def _repeated(run: Run) -> int:
    first = {name: value.clone() for name, value in run().items()}
    return sum(not has_same_bits(value, first[name]) for _ in range(2) for name, value in run().items())


# ---- The head: logits = x @ weight.T, then the loss


def head(page: Page, sizes: Sizes) -> None:
    here = page.here
    page.say(f"head: {sizes.tokens} tokens, hidden {sizes.hidden}, {sizes.vocab} words, bfloat16")
    generator = torch.Generator(here.device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=here.device, dtype=here.dtype)

    x = drawn(sizes.tokens, sizes.hidden)
    weight = nn.Parameter(drawn(sizes.vocab, sizes.hidden).div_(sizes.hidden**0.5))
    target = torch.randint(sizes.vocab, (sizes.tokens,), generator=generator, device=here.device)
    exact = _exact_head(x, weight.detach(), target)
    product = 2.0 * x.numel() * sizes.vocab
    for name, loss in bench_head.FORMS.items():
        num = 4 if name == "logits again" else 3

        def step(loss: Any = loss) -> dict[str, Tensor]:
            weight.grad = None
            arrived = x.detach().requires_grad_()
            value = loss(arrived, weight, target)
            (dx,), weight_grads = backward_input(value, None, arrived)
            weight_grads.accumulate()
            assert weight.grad is not None
            return {"loss": value.detach().reshape(1), "dx": dx, "dW": weight.grad}

        floor = here.ms(flops=num * product)
        rows(
            page,
            f"head, {name}: F, B, W",
            step,
            exact,
            floor=floor,
            why=f"{num} products of {product:.3g} operations",
            nbytes=weight.nbytes + x.nbytes,
        )
        weight.grad = None


def _exact_head(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
    """In float64: the loss, the gradient of x, and some rows of the weight's."""
    logits = x.double() @ weight.double().T
    scale = 1 / len(x)
    loss = F.cross_entropy(logits, target).reshape(1)
    logits = logits.sub_(logits.logsumexp(-1, keepdim=True)).exp_()
    logits[torch.arange(len(x), device=x.device), target] -= 1
    logits *= scale
    some = min(4096, len(weight))
    return {"loss": loss, "dx": logits @ weight.double(), "dW": logits[:, :some].T @ x.double()}


# ---- The embedding's weight gradient, with one token in every twelfth place


def embedding(page: Page, sizes: Sizes) -> None:
    here = page.here
    tokens = sizes.tokens
    page.say(
        f"embedding: {tokens} tokens of {sizes.vocab} words, hidden {sizes.hidden}; "
        f"one token comes {tokens // 12} times"
    )
    generator = torch.Generator(here.device).manual_seed(0)
    indices = torch.randint(sizes.vocab, (tokens,), generator=generator, device=here.device)
    indices[::12] = 3
    weight = nn.Parameter(torch.zeros(sizes.vocab, sizes.hidden, device=here.device, dtype=here.dtype))
    dy = torch.randn(tokens, sizes.hidden, generator=generator, device=here.device, dtype=here.dtype)
    some = min(4096, sizes.vocab)
    exact = torch.zeros(some, sizes.hidden, device=here.device, dtype=torch.float64)
    near = indices < some
    exact.index_add_(0, indices[near], dy[near].double())

    def zbpps() -> dict[str, Tensor]:
        weight.grad = None
        _, weight_grads = backward_input(F.embedding(indices, weight), dy, ())
        weight_grads.accumulate()
        return {"dW": weight.grad}  # type: ignore[dict-item]

    def plain() -> dict[str, Tensor]:
        weight.grad = None
        F.embedding(indices, weight).backward(dy)
        return {"dW": weight.grad}  # type: ignore[dict-item]

    floor = here.ms(nbytes=weight.nbytes + 3 * dy.nbytes)
    for name, form in (("plain", plain), ("zbpp", zbpps)):
        rows(
            page,
            f"embedding, {name}: F, W",
            form,
            {"dW": exact},
            floor=floor,
            why="bytes",
            nbytes=weight.nbytes,
        )


# ---- The norm of all gradients


def norm(page: Page) -> None:
    here = page.here
    size = here.choose(8192, 64)
    page.say(f"norm of a gradient of {size}^2 numbers in bfloat16")
    stage = nn.Linear(size, size, bias=False, device=here.device, dtype=here.dtype)
    generator = torch.Generator(here.device).manual_seed(0)
    stage.weight.grad = torch.randn(size, size, generator=generator, device=here.device, dtype=here.dtype)
    exact = stage.weight.grad.double().norm().reshape(1).cpu()
    with Pipeline({0: stage}, plan("1f1b", 1, 1), F.mse_loss) as pipeline:

        def clipped() -> dict[str, Tensor]:
            return {"norm": clip_grad_norm_(pipeline, 1e30).reshape(1)}

        floor = here.ms(nbytes=stage.weight.nbytes)
        rows(page, "clip_grad_norm_", clipped, {"norm": exact}, floor=floor, why="bytes read once", nbytes=8)
