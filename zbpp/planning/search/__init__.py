"""Search for plans: within a memory limit, for given costs, with any placement.

local_search          zb_auto, the search as a whole: a pool of plans, improved in rounds
deadline              how much of the search's time is left
initial_orders        plans to begin with
insert_weight_grads   W's inserted into a given order of F's and B's
paper_planner         the Zero Bubble paper's planner: zb_1p, zb_2p
list_scheduling       a plan made action by action towards a target, for one stage per rank
evolve                which priority rules of list_scheduling suit the costs
plan_graph            a plan as a graph of actions
incremental_timing    a plan that is timed again in microseconds after a move
random_moves          random moves on the critical path
justify               everything to the left, then everything to the right
fuse_backward         B and W fused into one BW, or a BW split

Where a W goes is decided when a plan is made (by a family, insert_weight_grads, paper_planner or
list_scheduling), and again when the plan is improved (by random_moves, justify and fuse_backward).
"""

from zbpp.planning.search.local_search import zb_auto
from zbpp.planning.search.paper_planner import zb_1p, zb_2p

__all__ = ["zb_1p", "zb_2p", "zb_auto"]
