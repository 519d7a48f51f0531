"""Search for plans: memory-limited, for costs as they are, any placement.

auto      zb_auto, the door
problem   what is to be planned, as plain lists
hunt      the search as a whole: a pool of plans, rounds
paper     the Zero Bubble paper's planner: zb_1p, zb_2p
aimed     list scheduling towards a target (one stage per rank); evolve draws its settings
blocks    repeated patterns for a V; weave puts W's into an order; seeds gathers what to begin with
board     a plan that is timed again in microseconds after a move
justify   everything to the left, everything to the right
anneal    random moves on the critical path; whole joins and splits BW's
stretch   a plan for few microbatches, repeated for many
"""

from zbpp.planning.search.auto import zb_auto
from zbpp.planning.search.paper_planner import zb_1p, zb_2p

__all__ = ["zb_1p", "zb_2p", "zb_auto"]
