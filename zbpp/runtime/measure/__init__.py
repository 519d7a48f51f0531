"""Measured steps: when each instruction ran, the timeline of all ranks, costs for a planner."""

from zbpp.runtime.measure.costs import measured_costs
from zbpp.runtime.measure.length_costs import measured_costs_of_lengths, two_parts
from zbpp.runtime.measure.record import StepRecord
from zbpp.runtime.measure.recorder import ProfilerNames, Recorder
from zbpp.runtime.measure.timeline import clock_offset, measured_timeline, peak_memory_bytes

__all__ = [
    "ProfilerNames",
    "Recorder",
    "StepRecord",
    "clock_offset",
    "measured_costs",
    "measured_costs_of_lengths",
    "measured_timeline",
    "peak_memory_bytes",
    "two_parts",
]
