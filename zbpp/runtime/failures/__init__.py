"""What a rank leaves when a call fails or does not end: a file with its last instructions, and its stacks.

flight_recorder     FlightRecorder, an extra that notes each instruction and writes the file
"""

from zbpp.runtime.failures.flight_recorder import FlightRecorder

__all__ = ["FlightRecorder"]
