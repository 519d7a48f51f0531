"""Search for plans: memory-limited, for costs as they are, any placement.

auto                  zb_auto, the entry
local_search          the search as a whole: a pool of plans, improved in rounds
initial_orders        plans to begin with; periodic_blocks: repeated patterns for a V
insert_weight_grads   W's inserted into a given order of F's and B's
paper_planner         the Zero Bubble paper's planner: zb_1p, zb_2p
list_scheduling       towards a target, one stage per rank; evolve: which priority rules suit the costs
plan_graph            a plan as a graph of actions
incremental_timing    a plan that is timed again in microseconds after a move
random_moves          random moves on the critical path
justify               everything to the left, then everything to the right
fuse_backward         B and W to one BW, or a BW split
repeat_steady_state   a plan for few microbatches, repeated for many
"""

from zbpp.planning.search.auto import zb_auto
from zbpp.planning.search.paper_planner import zb_1p, zb_2p

__all__ = ["zb_1p", "zb_2p", "zb_auto"]
