"""Compiled stages: F, B and W of a module as three graphs, compiled by Inductor.

How a module's call is compiled, step by step:

    compiled_forward.py     `compile_stage`: a forward that runs compiled, and falls back to eager
    dynamo.py               Dynamo: the Python code of a call as a graph, with guards
    aot_autograd.py         AOTAutograd: the graphs of forward and backward
    backward_cut.py         the backward graph cut in two, B and W; W's adds its products to the gradients
    adding.py               operations that add to a gradient, for W's graph
    build_split.py          these graphs compiled, and how values pass between them
    inductor.py             Inductor: a graph made callable
    compiled_split.py       the result: F, B and W as callables, and the autograd Function that runs them
    fx_graphs.py            small operations on FX graphs

Between B and W live the x and the dy of each product whose result is a weight's gradient.
"""

from zbpp.autograd.compiled.compiled_forward import SplitCache, compile_stage

__all__ = ["SplitCache", "compile_stage"]
