"""What stages and links take: costs of measured steps for a planner, bytes of one microbatch, timed messages.

costs              costs of measured steps
length_costs       the same where microbatches differ in length: times in two parts
link_times         the links between ranks: latency and time per byte
fake_tensors       torch's fake tensors, with values for small tensors of integers
live_tensors       the bytes of live tensors at any moment
microbatch_memory  the bytes that one microbatch takes on a stage
products           the matrix products of a stage's F, B and W

When instructions ran: zbpp/observers/recorder.py.
"""

from zbpp.measure.costs import measured_costs, measured_links
from zbpp.measure.length_costs import measured_costs_of_lengths, two_parts

__all__ = ["measured_costs", "measured_costs_of_lengths", "measured_links", "two_parts"]
