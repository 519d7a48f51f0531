"""Cut an existing module into stages that share its parameters: `split_sequential`, `trace_stages`.

sequential  a chain of modules, cut into stages that hold them under their names
traced      any module that torch.export can trace, cut at submodules
graph       one traced graph, cut at its marks
stage       a traced stage
check       do traced stages compute what their module computes?
"""

from zbpp.cutting.sequential import split_sequential
from zbpp.cutting.traced import trace_stages

__all__ = ["split_sequential", "trace_stages"]
