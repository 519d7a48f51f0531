"""Sections products and recompute: how often B and W compute what a plain backward computes once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zbpp.autograd import checkpoint
from zbpp.benchmark.split.contestants import Contestant
from zbpp.benchmark.split.report import Line
from zbpp.benchmark.split.stages import Microbatch, Settings, llama_stage, x_and_dy

# An operator counts if its name begins with one of these: so in-place variants and backwards count, too.
_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "matmul", "linear", "convolution"),
    *("_grouped_mm", "_scaled_mm", "_scaled_dot_product"),
)


class _CountProducts(TorchDispatchMode):
    """Counts the matrix products, convolutions and attentions that are executed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__.startswith(_PRODUCTS):
            self.number += 1
        return func(*args, **(kwargs or {}))


def products(contestants: Mapping[str, Contestant], settings: Settings) -> Iterator[Line]:
    counted: dict[str, float] = {}
    gradients: dict[str, list[Tensor]] = {}
    for name, contestant in contestants.items():
        stage = llama_stage(settings.blocks, settings, settings.hidden)
        microbatch = Microbatch(contestant, stage, *x_and_dy(stage, 1, min(settings.time, 32), settings))
        microbatch.f()
        with _CountProducts() as counter:
            microbatch.b()
            microbatch.w()
        counted[name] = counter.number
        gradients[name] = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
    yield Line(
        section="products", figure="products in B and W", values=counted, form=".0f", limit=counted["plain"]
    )
    off = {name: _difference(each, gradients["plain"]) for name, each in gradients.items()}
    exact = 8 * torch.finfo(getattr(torch, settings.dtype)).eps
    figure = "largest difference from plain's gradients, relative"
    yield Line(section="products", figure=figure, values=off, form=".0e", limit=exact)


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference, each parameter's relative to its largest gradient."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


class _Checkpointed(nn.Module):
    """Blocks, each inside a checkpoint; counts their forwards."""

    def __init__(self, blocks: nn.Sequential, how: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks, self.how = blocks, how
        self.forwards: Counter[nn.Module] = Counter()
        for block in blocks:
            block.register_forward_pre_hook(lambda module, _: self.forwards.update([module]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.how(block, x)
        return x


def recompute(contestants: Mapping[str, Contestant], settings: Settings) -> Iterator[Line]:
    torchs = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    own = {name: checkpoint if name == "zbpp" else torchs for name in contestants}
    for figure, how in (
        ("zbpp under zbpp.checkpoint, the others under torch's", own),
        ("all under torch's checkpoint", dict.fromkeys(contestants, torchs)),
    ):
        forwards = {name: float(_forwards(each, how[name], settings)) for name, each in contestants.items()}
        yield Line(
            section="recompute", figure=f"forwards of a block, {figure}", values=forwards, form=".0f", limit=1
        )


def _forwards(contestant: Contestant, how: Callable[..., Any], settings: Settings) -> int:
    """The largest number of times that B and W together run one block forward."""
    stage = _Checkpointed(llama_stage(settings.blocks, settings), how)
    microbatch = Microbatch(contestant, stage, *x_and_dy(stage, 1, 4, settings))
    microbatch.f()
    in_f = stage.forwards.copy()
    microbatch.b()
    microbatch.w()
    return max((stage.forwards - in_f).values())
