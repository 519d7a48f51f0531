"""Measured steps: when each instruction ran, the timeline of all ranks, costs for a planner.

recorder           the observer that measures steps; names of instructions for a profiler
record             when each instruction of one rank ran
timeline           the timeline of all ranks, from their records
costs              costs of measured steps
length_costs       the same where microbatches differ in length: times in two parts

fake_tensors       torch's fake tensors, with values for small tensors of integers
live_tensors       the bytes of live tensors at any moment
microbatch_memory  the bytes that one microbatch takes on a stage
products           the matrix products of a stage's F, B and W
"""

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
