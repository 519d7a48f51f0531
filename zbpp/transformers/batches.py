"""The Trainer's batches as microbatches of a pipeline, and a number that tells different batches apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.models.hf.labels import shifted
from zbpp.runtime import per_microbatch
from zbpp.stage_api import IGNORED

Inputs = Mapping[str, Any]
"""A batch of the Trainer: {column: value}."""

_TAKEN = ("input_ids", "attention_mask", "position_ids")  # by stage 0, in this order
_LABELS = ("labels", "shift_labels")
_LEFT_OUT = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)  # follow from positions
_ADDED = ("use_cache", "return_dict", "num_items_in_batch")


def check_columns(names: Iterable[str]) -> None:
    """Raise ValueError for a column that no stage takes."""
    if surplus := {*names} - {*_TAKEN, *_LABELS, *_LEFT_OUT, *_ADDED}:
        raise ValueError(
            f"the first stage of a pipeline does not take {', '.join(sorted(surplus))}: it takes "
            f"{', '.join(_TAKEN)}, and the last stage labels"
        )


def arguments(microbatches: Sequence[Inputs], num_planned: int) -> list[Any]:
    """The arguments of stage 0: its columns, None for one that no microbatch needs.

    num_planned: the microbatches of the timetable. Those that there are not are empty.
    """
    pad = [None] * (num_planned - len(microbatches))
    found: list[Any] = []
    for name in _TAKEN:
        column = [each.get(name) for each in microbatches]
        is_needed = any(each is not None for each in column)
        if name == "attention_mask":
            is_needed = any(each is not None and not bool(each.all()) for each in column)
        found.append(per_microbatch([*column, *pad]) if is_needed else None)
    return found


def targets(microbatches: Sequence[Inputs], num_planned: int) -> Any:
    """The target of each position, for zbpp's own loss."""
    pad = [None] * (num_planned - len(microbatches))
    return per_microbatch([*map(target_of, microbatches), *pad])


def target_of(inputs: Inputs) -> Tensor:
    """For each position the label of the next one, int64 [batch, time]."""
    given: Tensor | None = inputs.get("shift_labels")
    return shifted(inputs["labels"]).contiguous() if given is None else given


def share_of_targets(microbatches: Sequence[Inputs], num_items: Any, total: Callable[[int], int]) -> float:
    """What the mean over the microbatches' targets is multiplied by to give the Trainer's loss.

    num_items: by which the Trainer divides. For some models it counts labels before they are shifted; None:
    it takes the mean. total: the number of targets in these microbatches -> in all that num_items counts. NaN
    where it counts none, as the Trainer's loss is then.
    """
    if num_items is None:
        return 1.0
    count = total(sum(int((target_of(each) != IGNORED).sum()) for each in microbatches))
    return count / float(num_items) if num_items else math.nan


def split(inputs: Inputs, most: int) -> list[Inputs]:
    """The rows of a batch as at most so many microbatches."""
    rows = len(inputs["input_ids"])
    sizes = [len(each) for each in torch.arange(rows).tensor_split(min(rows, most))]
    columns = {
        name: each.split(sizes)
        for name, each in inputs.items()
        if isinstance(each, Tensor) and each.dim() and len(each) == rows
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(len(sizes))]


def checksum(microbatches: Sequence[Inputs]) -> Tensor:
    """A number of the tokens and labels, int64 []; other tokens, or another order, give another one."""
    found = []
    for inputs in microbatches:
        tokens = inputs["input_ids"].reshape(-1).to(torch.int64)
        labels = inputs.get("labels", inputs["input_ids"]).reshape(-1).to(torch.int64)
        place = torch.arange(1, len(tokens) + 1, device=tokens.device)
        found.append(((tokens * 31 + labels + 7) * place % 1_000_003).sum())
    order = torch.arange(1, len(found) + 1, device=found[0].device)
    return (torch.stack(found) * order).sum()
