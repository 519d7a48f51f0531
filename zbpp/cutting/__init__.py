"""Cut an existing module into stages that share its parameters: `split_sequential`, `trace_stages`."""

from zbpp.cutting.sequential import split_sequential
from zbpp.cutting.traced import trace_stages

__all__ = ["split_sequential", "trace_stages"]
