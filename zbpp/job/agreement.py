"""Values that all ranks of a job have, and the error if the ranks' values differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from zbpp.job.errors import communicating


class AgreementError(ValueError):
    """Ranks of one job were given different things."""


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with communicating(f"rank {dist.get_rank(group)}, gathering from all ranks"):
        dist.all_gather_object(values, value, group=group)
    return values


def gather_over(value: Any, groups: Iterable[dist.ProcessGroup | None]) -> list[Any]:
    """The value of every process that these groups join, group after group, on every process."""
    values = [value]
    for group in groups:
        values = [each for values_of_one in gather(values, group) for each in values_of_one]
    return values


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    with communicating(f"rank {dist.get_rank(group)}, broadcast from rank 0"):
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def refuse_together(
    refusal: str, gather: Callable[[Any], Sequence[Any]], error: type[Exception] = ValueError
) -> None:
    """Raise `error` on EVERY process if one of them refuses. Collective.

    refusal: why this process refuses; "" if it does not. gather: gives every process's value, such as
    `place.gather`. The others would wait for a process that raises alone.
    """
    gather_or_refuse(refusal, None, gather, error)


def gather_or_refuse(
    refusal: str,
    value: Any,
    gather: Callable[[Any], Sequence[Any]],
    error: type[Exception] = ValueError,
    cause: BaseException | None = None,
) -> list[Any]:
    """Every process's value; or raise `error` on EVERY process if one of them refuses. One collective.

    refusal, gather: as in `refuse_together`. value: ignored if this process refuses. cause: the exception
    that makes this process refuse, for its traceback.
    """
    everyone = gather((refusal, value))
    for each, _ in everyone:
        if each:
            raise error(each) from cause
    return [found for _, found in everyone]


def check_agreement(
    what: str, value: Any, group: dist.ProcessGroup | None = None, ranks: Sequence[int] | None = None
) -> None:
    """Raise AgreementError on EVERY rank, with the difference, unless all have the same value. Collective.

    ranks: the numbers by which the error calls the group's processes; None: their ranks in the group.
    """
    check_equal(what, gather(value, group), ranks)


def check_equal(what: str, values: Sequence[Any], ranks: Sequence[int] | None = None) -> None:
    """Raise AgreementError, with the difference, unless all ranks have the same value.

    values: per rank; ranks: their numbers, None for 0, 1, ... Dicts are compared key by key.
    """
    numbers = range(len(values)) if ranks is None else ranks
    if all(_is_same(each, values[0]) for each in values):
        return
    if isinstance(values[0], dict):
        keys = sorted({key for each in values for key in each}, key=str)
        columns = {key: [each.get(key, "(nothing)") for each in values] for key in keys}
        text = "\n".join(
            f"  {key}: {_by_rank(column, numbers)}"
            for key, column in columns.items()
            if not all(_is_same(each, column[0]) for each in column)
        )
    else:
        text = "  " + _by_rank(values, numbers)
    raise AgreementError(f"the ranks of this job have different {what}:\n{text}")


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal; NaN equals itself."""
    return bool(one == other) or repr(one) == repr(other)


def _by_rank(values: Sequence[Any], ranks: Sequence[int]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(repr(value), []).append(rank)
    return "; ".join(f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in groups.items())
