"""Which degrees of a mesh keep the groups that talk most inside a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zbpp.benchmark.cluster.machines import hosts_of_ranks
from zbpp.benchmark.cluster.rows import NOTE, OK
from zbpp.runtime.parallel.node_placement import placement_warning

if TYPE_CHECKING:
    from zbpp.benchmark.cluster.parts import Found, Step


def steps() -> Iterator[Step]:
    """One row. Collective."""
    yield "tensor groups on nodes", lambda: tensor_degrees(hosts_of_ranks())


def tensor_degrees(hosts: list[str]) -> Found:
    """Which tensor degrees stay on a node, and why the next larger one does not."""
    degrees = [degree for degree in range(2, len(hosts) + 1) if len(hosts) % degree == 0]
    warnings = {degree: placement_warning(hosts, {"tensor": degree}) for degree in degrees}
    inside = [degree for degree, warning in warnings.items() if not warning]
    outside = [degree for degree, warning in warnings.items() if warning]
    numbers = {"inside": inside, "across": outside}
    if not outside:
        return OK, f"every degree stays on its node: {_list(inside)}", numbers
    return (
        NOTE,
        f"inside a node: {_list(inside)}; tensor={outside[0]}: {warnings[outside[0]]}",
        numbers,
    )


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
