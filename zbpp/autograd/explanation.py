"""The answer of `explain`: a row per leaf, the totals, and both as a text table."""

from __future__ import annotations

from typing import Literal, NamedTuple

Where = Literal["W", "B", "later", "none"]


class Row(NamedTuple):
    """One trainable leaf. where: its gradient is computed in W, in B, decided later, or not at all.

    x_bytes, dy_bytes: tensors that are held for W to compute the gradient. gradient_bytes: a gradient that B
    computes, held until W adds it to `.grad`. Bytes of dy and gradient follow from their shapes: less is held
    where they turn out to share memory. For a DTensor, shape and nbytes are those of the whole tensor, and
    the held bytes are those of this rank.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    where: Where
    why: str
    x_bytes: int = 0
    dy_bytes: int = 0
    gradient_bytes: int = 0


class Explanation(NamedTuple):
    """The rows, and the totals of what is held between B and W, in bytes. Each storage is counted once.

    `str(explanation)` is the table.
    """

    rows: tuple[Row, ...]
    x_bytes: int
    dy_bytes: int
    gradient_bytes: int
    compiled_bytes: int  # all that compiled layers hold

    @property
    def held_bytes(self) -> int:
        """What `WeightGrads.held_bytes` will be after B.

        WeightGrads holds less where gradients share memory, more where they are views of larger storages.
        """
        return self.x_bytes + self.dy_bytes + self.gradient_bytes + self.compiled_bytes

    def __str__(self) -> str:
        return _table(self)


def _table(explanation: Explanation) -> str:
    head = ("parameter", "size", "in", "x", "dy", "gradient", "why")
    body = [
        (
            row.name,
            _size(row.nbytes),
            row.where,
            *map(_size, (row.x_bytes, row.dy_bytes, row.gradient_bytes)),
            row.why,
        )
        for row in explanation.rows
    ]
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(6)]
    lines = [_line(line, widths) for line in (head, *body)]
    lines += [_count(explanation.rows, where) for where in ("W", "B", "later", "none")]
    kinds = zip(("x", "dy", "gradients", "compiled"), explanation[1:], strict=True)
    held = ", ".join(f"{kind} {_size(count)}" for kind, count in kinds if count or kind != "compiled")
    lines.append(
        f"held between B and W, what is shared counted once: {held}; {_size(explanation.held_bytes)} in all"
    )
    return "\n".join(line for line in lines if line)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    """One line: name and place to the left, sizes to the right, the reason as it is."""
    *columns, why = cells
    padded = [
        f"{cell:<{width}}" if column in (0, 2) else f"{cell:>{width}}"
        for column, (cell, width) in enumerate(zip(columns, widths, strict=True))
    ]
    return "  ".join((*padded, why)).rstrip()


_WHERE = {
    "W": "computed in W",
    "B": "computed in B",
    "later": "decided in a recompute",
    "none": "no gradient",
}


def _count(rows: tuple[Row, ...], where: str) -> str:
    chosen = [row for row in rows if row.where == where]
    size = _size(sum(row.nbytes for row in chosen))
    return f"{_WHERE[where]}: {len(chosen)} of {len(rows)} parameters, {size}" if chosen else ""


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B" if count else "–"
    value, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"
