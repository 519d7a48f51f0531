"""Does a pipeline compute what one process computes? For any trainer, not only for zbpp's.

check      zbpp.parity: the order of the comparisons, on all ranks
ranks      what one rank holds, under the names of the whole model
reference  the whole model in one process: plain autograd, microbatch by microbatch
judge      compares both, on the first rank
faults     the table of known mistakes: what each would have computed instead
report     the verdict, a table by parameter, JSON
command    python -m zbpp.parity FILE:CASE
"""

from zbpp.parity_check.check import parity
from zbpp.parity_check.report import Report, Row

__all__ = ["Report", "Row", "parity"]
