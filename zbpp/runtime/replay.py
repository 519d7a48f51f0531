"""A step that runs twice: a second time under another timetable, compared to the last bit.

A timetable can't change a number: same weights, batch and seeds give the same losses, gradients and buffers.
If they differ, memory or arithmetic of a machine is at fault, or a stage whose result depends on the order of
the calls, or a kernel that adds in an order of its own.

    keep   before the step   buffers, and gradients that are there already
    run    after it          sets gradients and buffers back; runs the step again; compares; then the
                             gradients are those of the first run

A replay takes the memory of a second set of gradients and of two sets of buffers. Hooks run twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.autograd.leaf_grad import total_of
from zbpp.runtime.call import Call
from zbpp.runtime.checksums import checksum
from zbpp.runtime.engine import Engine
from zbpp.runtime.mesh import Place, local_of, planned_by_rank_0
from zbpp.runtime.named_losses import NamedLosses
from zbpp.runtime.named_tensors import Named, buffers_of, parameters_of, sharing_stages
from zbpp.runtime.restored import Buffers
from zbpp.schedule import Timetable
from zbpp.schedule.other_order import other_order

_SHOWN = 5  # differences in an error


class ReplayError(RuntimeError):
    """A step gave other numbers when it ran a second time, under another timetable."""


class Replay:
    """Runs one step again.

    stages, loss: this rank's. number: of the step, from 0; the random timetable depends on it. Raises
    ValueError on all ranks if the step can't run twice. Collective.
    """

    def __init__(
        self,
        engine: Engine,
        place: Place,
        stages: Mapping[int, nn.Module],
        loss: object,
        timetable: Timetable,
        call: Call,
        number: int,
    ) -> None:
        self._engine, self._place, self._stages, self._loss = engine, place, stages, loss
        self._call, self._number = call, number
        given = (call.args, dict(call.kwargs), call.target)
        asks = any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(given))
        self._refuse_everywhere(
            "replay doesn't go with inputs that require grad, whose gradient would come twice" if asks else ""
        )
        mine = sharing_stages(stages, loss, timetable.num_stages - 1)
        sharing = {stage for some in place.gather(mine) for stage in some}
        self._timetable = planned_by_rank_0(lambda: other_order(timetable, number, sharing), place)
        # Microbatches count in-place changes apart from the batch that they are parts of: so compare bits.
        self._given = [each for each in tree_leaves(given) if isinstance(each, Tensor)]
        self._bits = [int(checksum(each)) for each in self._given]
        self._buffers = Buffers([*stages.values(), *([loss] if isinstance(loss, nn.Module) else [])])
        self._buffers.keep()
        self._before = {str(each): _copy(total_of(each.tensor)) for each in self._parameters()}

    def run(self, seeds: Mapping[int, int], losses: Sequence[Tensor], named: NamedLosses) -> None:
        """Run the step again and compare. Raises ReplayError on all ranks if anything differs."""
        self._refuse_everywhere(
            "replay: a stage changes the step's inputs in place, so the step can't run twice: copy them there"
            if self._bits != [int(checksum(each)) for each in self._given]
            else ""
        )
        first = self._take_gradients()
        buffers = {str(each): each.tensor.clone() for each in buffers_of(self._stages, self._loss)}
        self._buffers.restore()
        again = self._engine.run_again(self._call, seeds, self._timetable)
        found = _compared_losses(losses, again.losses)
        if repr(named.means()) != repr(again.named.means()):
            found.append(f"auxiliary losses: {named.means()}, then {again.named.means()}")
        for each in self._parameters():
            found += _compared(f"the gradient of {each}", first[str(each)], total_of(each.tensor))
        for each in buffers_of(self._stages, self._loss):
            found += _compared(f"the buffer {each}", buffers.get(str(each)), each.tensor)
        self._raise_everywhere(found)
        for each in self._parameters():
            if getattr(each.tensor, "main_grad", None) is None:
                each.tensor.grad = first[str(each)]

    def _parameters(self) -> list[Named]:
        return [each for each in parameters_of(self._stages, self._loss) if each.tensor.requires_grad]

    def _take_gradients(self) -> dict[str, Tensor | None]:
        """The step's gradients; afterwards each parameter has the one from before the step."""
        found: dict[str, Tensor | None] = {}
        for each in self._parameters():
            before, total = self._before[str(each)], total_of(each.tensor)
            if getattr(each.tensor, "main_grad", None) is None:
                found[str(each)], each.tensor.grad = total, before
            else:  # others refer to this tensor
                assert total is not None
                assert before is not None
                found[str(each)] = total.clone()
                local_of(total).copy_(local_of(before))
        return found

    def _refuse_everywhere(self, refusal: str) -> None:
        for each in self._place.gather(refusal):
            if each:
                raise ValueError(each)

    def _raise_everywhere(self, found: Sequence[str]) -> None:
        told = [each for some in self._place.gather(list(found[: _SHOWN + 1])) for each in some]
        texts = list(dict.fromkeys(told))  # replicas say the same
        if not texts:
            return
        more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        raise ReplayError(
            f"step {self._number + 1} gave other numbers when it ran again under another timetable: "
            f"{'; '.join(texts[:_SHOWN])}{more}. A timetable can't change a number: memory or arithmetic of "
            "a machine is at fault, a stage depends on the order of calls or draws random numbers of Python, "
            "of numpy or of a generator of its own, or a kernel adds in an order of its own (on CUDA: "
            "torch.use_deterministic_algorithms(True) names it)"
        )


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _compared_losses(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[str]:
    differ = [each for each, pair in enumerate(zip(some, others, strict=True)) if _difference(*pair)]
    if not differ:
        return []
    one, other = some[differ[0]].item(), others[differ[0]].item()
    return [f"the losses of microbatches {', '.join(map(str, differ))}: the first is {one!r}, then {other!r}"]


def _compared(what: str, one: Tensor | None, other: Tensor | None) -> list[str]:
    if one is None or other is None:
        return [] if one is other else [f"{what}, which is missing in one of the runs"]
    difference = _difference(one, other)
    return [f"{what}, {difference}"] if difference else []


def _difference(one: Tensor, other: Tensor) -> str:
    """How two tensors differ in a bit, "" if they don't; NaN equals NaN."""
    one, other = (local_of(each.detach()) for each in (one, other))
    one, other = (each.to_dense() if each.is_sparse else each for each in (one, other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{tuple(one.shape)}, then {tuple(other.shape)}"
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    differs = (one != other) | (torch.signbit(one) != torch.signbit(other))
    differs &= ~((one != one) & (other != other))
    count = int(differs.sum())
    if not count:
        return ""
    a, b = (float(each[differs].view(-1)[0]) for each in (one, other))
    return f"{count} of {one.numel()} elements: the first is {a!r}, then {b!r}"
