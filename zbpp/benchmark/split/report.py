"""The lines that the sections yield, and their table."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from zbpp.benchmark.split.stages import Settings


@dataclass(kw_only=True)
class Line:
    """One line of the table. values: by contestant. form: how values are written.

    limit: what the value of the contestant `marked` must not exceed, by more than `noise`; None: no limit.
    met: whether it does not. mark: the limit as the table shows it.
    """

    section: str
    figure: str
    values: dict[str, float]
    form: str = ".2f"
    limit: float | None = None
    marked: str = "zbpp"
    noise: float = 0.0
    note: str = ""
    met: bool | None = field(init=False)

    def __post_init__(self) -> None:
        self.met = None if self.limit is None else self.values[self.marked] - self.noise <= self.limit

    @property
    def mark(self) -> str:
        if self.limit is None:
            return ""
        noise = f" ± {self.noise:.2f}" if self.noise else ""
        return f"<= {self.limit:{self.form}}{noise}{self.note}"


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """The processor's name, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def as_json(lines: list[Line], about: dict[str, Any], settings: Settings, remarks: list[str]) -> Any:
    return {
        "machine": about,
        "settings": asdict(settings),
        "remarks": remarks,
        "lines": [{**asdict(line), "mark": line.mark} for line in lines],
    }


def table(lines: list[Line], about: dict[str, Any], settings: Settings, remarks: list[str]) -> str:
    names = list(dict.fromkeys(name for line in lines for name in line.values))
    head = ["", "", *names, "mark", ""]
    body = [
        [
            line.section,
            line.figure,
            *(f"{line.values[name]:{line.form}}" if name in line.values else "–" for name in names),
            line.mark,
            {None: "", True: "met", False: "MISSED"}[line.met],
        ]
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    rows = [_row(row, widths, right=range(2, 2 + len(names))) for row in (head, *body)]
    sizes = (
        f"{settings.blocks} blocks of hidden {settings.hidden}, x {settings.batch} x {settings.time} tokens"
    )
    title = (
        f"{about['device']}, {about['threads']} of {about['cores']} cores, {about['system']}; "
        f"torch {about['torch']}, Python {about['python']}; {settings.dtype}; load {about['load_average']}"
    )
    what = f"memory, compute: {sizes}; host, recompute: hidden {settings.tiny}, x 1 x 4 tokens"
    return "\n".join([title, what, *remarks, "", *rows])


def _row(cells: list[str], widths: list[int], right: range) -> str:
    """right: the columns aligned to the right."""
    return "  ".join(
        f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
