"""CUDA graphs: a step's actions are captured once, and replayed in every later step.

A replayed action starts all its kernels by one call, and runs no Python of the stage. What an action reads
and writes has one address for ever:

    what                              where it is                                    file
    what lives between F, B and W     in the graphs' memory pool                     capture.py
    messages between stages           in buffers outside the pool                    capture.py
    inputs, targets, keywords         copied into buffers when a step begins         static.py
    losses                            in the pool, copied out of it after the step   capture.py
    gradients                         `.grad` stays the same tensor                  static.py
    random numbers                    each F's seed is set before its replay         capture.py

All graphs share one pool. The capture goes over the actions in the order of the program, so torch's allocator
frees and reuses memory as in an eager step; replays go in the same order, as torch demands of graphs that
share a pool.

cuda_graphs.py: CudaGraphs, the feature: two eager steps, then the capture, then replays.
cuda.py is the only file that knows torch.cuda; tests put an emulation in its place.
compile_ahead.py: CompileAhead, another extra: compiled stages of all ranks compile at once.
"""

from zbpp.features.graphs.capture import GraphMaker
from zbpp.features.graphs.cuda_graphs import CudaGraphs

__all__ = ["CudaGraphs", "GraphMaker"]
