"""The parts, in the order in which they run, with their times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PartPlan:
    """module: has `rows`. share: seconds of a run of 8 minutes; least: with fewer the part is skipped."""

    name: str
    module: str
    title: str
    share: float
    least: float


_HERE = "zbpp.benchmark.gpu"
PARTS = (
    PartPlan("split", f"{_HERE}.split", "The split beside torch's", 150, 45),
    PartPlan("graphs", f"{_HERE}.graphs", "CUDA graphs", 75, 25),
    PartPlan("schedules", f"{_HERE}.schedules", "One rank under every schedule", 60, 20),
    PartPlan("offload", f"{_HERE}.offload", "Copies to host memory", 45, 15),
    PartPlan("kernels", f"{_HERE}.kernels", "Kernels and host time of an action", 40, 15),
    PartPlan("tests", f"{_HERE}.gpu_tests", "Tests that need a GPU", 90, 20),
)
TOTAL = 480.0
END = 10.0  # seconds for the report
NAMES = tuple(each.name for each in PARTS)
