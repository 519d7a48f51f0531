"""CUDA graphs: a step's actions are captured once, and replayed in every later step.

A replayed action starts all its kernels by one call, and runs no Python of the stage. What an action reads
and writes has one address for ever:

    what                              where it is                                    file
    what lives between F, B and W     in the graphs' memory pool                     actions.py
    messages between stages           in buffers outside the pool, each shared by    messages.py,
                                      messages that are never alive together         lifetimes.py
    inputs, targets, keywords         copied into buffers when a step begins         call.py
    losses                            copied into buffers by F, read after the step  losses.py
    gradients                         `.grad` stays the same tensor                  gradients.py
    random numbers                    each F's seed is set before its replay         actions.py

MEMORY. All graphs share one pool. The capture goes over the actions in the order of the program, so torch's
allocator frees and reuses memory as in an eager step; replays go in the same order, as torch demands of
graphs that share a pool.

WHEN. step_graphs.py: two eager steps, then the capture, then replays. relied_on.py has what a capture relies
on: where it has changed, steps are eager again until they are captured anew. What a replay would get wrong is
refused before (refusals.py), or keeps the steps eager, with a line that says why.

program.py captures a rank's whole step, with its messages, as one graph. cuda.py is the only file that knows
torch.cuda; tests put an emulation in its place.
"""

from zbpp.runtime.graphs.actions import RankActions
from zbpp.runtime.graphs.maker import GraphMaker, NotCapturable
from zbpp.runtime.graphs.refusals import MODES, RELEASED, VALIDATED, check_graphs
from zbpp.runtime.graphs.step_graphs import StepGraphs, step_graphs

__all__ = [
    "MODES",
    "RELEASED",
    "VALIDATED",
    "GraphMaker",
    "NotCapturable",
    "RankActions",
    "StepGraphs",
    "check_graphs",
    "step_graphs",
]
