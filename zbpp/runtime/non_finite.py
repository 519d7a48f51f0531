"""The first value of a step that was NaN or infinite: what is known of it, and which one is first.

Of all that a replay saw (non_finite_watcher.py), the first value in the order of data flow is reported:

    parameters -> for each microbatch: input -> F of stage 0 -> message -> F of stage 1 ... -> loss
                  -> B of the last stage ... -> B of stage 0
               -> sums of gradients over replicas, shards and tied copies

A module may return -Infinity on purpose (a mask). So a module's output with -Infinity alone is only
mentioned, beside the first NaN or +Infinity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zbpp.runtime.bad_rows import BadRows
from zbpp.runtime.mesh import local_of

OF_LOSS = "the loss function"
NAN, INFINITY, MINUS_INFINITY = "NaN", "Infinity", "-Infinity"


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first value of a step that was not finite.

    value: "NaN", "Infinity" or "-Infinity". kind: "parameter", "input", "target", "keyword", "message",
     "output", "loss", "auxiliary loss", "backward", "gradient" or "reduced gradient". name: of the
    module, parameter or auxiliary loss; "" where there is none. microbatch: None for parameters and reduced
    gradients.
    data_part: which replica or shard had it; None if there is one alone. note: what else is known.
    rows: of the microbatch, for the kinds "input", "target" and "keyword".
    """

    value: str
    kind: str
    stage: int
    microbatch: int | None = None
    name: str = ""
    data_part: int | None = None
    note: str = ""
    rows: BadRows | None = None

    def __str__(self) -> str:
        part = "" if self.data_part is None else f", data part {self.data_part}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.value} first appeared in {self._where()}{part}{note}"

    def _where(self) -> str:
        stage, microbatch, name = self.stage, self.microbatch, self.name
        rows = "" if self.rows is None else f", {self.rows}"
        match self.kind:
            case "parameter":
                return f"parameter {name} of stage {stage}, before the step"
            case "input" | "target":
                return f"the data: microbatch {microbatch} of the {self.kind}{rows}"
            case "keyword":
                return f"the data: microbatch {microbatch} of the keyword {name} of stage {stage}{rows}"
            case "message":
                return f"the message that stage {stage} received, microbatch {microbatch}"
            case "output":
                module = f", module {name}" if name else ""
                return f"the output of stage {stage}'s F, microbatch {microbatch}{module}"
            case "loss":
                return f"the loss of microbatch {microbatch}"
            case "auxiliary loss":
                return f"the auxiliary loss {name!r} of stage {stage}, microbatch {microbatch}"
            case "gradient":
                what = f"the gradient of {name}" if name else "the gradient of the input"
                return f"{what} in B of stage {stage}, microbatch {microbatch}"
            case "backward":
                what = name if name == OF_LOSS else f"module {name}" if name else "the stage's own code"
                return f"the backward of {what}, in B of stage {stage}, microbatch {microbatch}"
        return f"the gradient of {name} of stage {stage}, summed over replicas, shards and tied copies"


class Seen(NamedTuple):
    """A value that is not finite, and its place in the order of data flow."""

    order: tuple[int, ...]
    found: NonFinite
    is_certain: bool  # False: it may be a mask


def kind_of(values: Any) -> str:
    """What the tensors of a nest hold beside numbers: "NaN", else "Infinity", else "-Infinity", else ""."""
    kinds = [_kind_of(each) for each in tree_leaves(values) if isinstance(each, Tensor)]
    return next((kind for kind in (NAN, INFINITY, MINUS_INFINITY) if kind in kinds), "")


@torch.no_grad()
def _kind_of(tensor: Tensor) -> str:
    tensor = local_of(tensor.detach())
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
        return ""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:  # float8 has no isfinite
        tensor = tensor.float()
    if bool(tensor.isfinite().all()):
        return ""
    if bool(tensor.isnan().any()):
        return NAN
    return INFINITY if bool(tensor.isposinf().any()) else MINUS_INFINITY


def first_of(seen: Iterable[Seen]) -> NonFinite | None:
    """The first value, of what all processes have seen; None if there is none."""
    ordered = sorted(seen, key=lambda each: (each.order, each.found.data_part or 0))
    certain = next((each for each in ordered if each.is_certain), None)
    if certain is None:
        return None
    place = certain.found.microbatch, certain.found.data_part
    for each in ordered:
        if each.order < certain.order and (each.found.microbatch, each.found.data_part) == place:
            before = str(replace(each.found, data_part=None)).replace(" first appeared in ", " in ")
            note = "; ".join(filter(None, [certain.found.note, f"before it, {before}"]))
            return replace(certain.found, note=note)
    return certain.found
