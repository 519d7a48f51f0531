"""Search for plans: within a memory limit, for given costs, with any placement.

local_search        zb_auto, the search as a whole: a pool of plans, improved in rounds
deadline            how much of the search's time is left
initial_orders      plans to begin with; W's inserted into a given order of F's and B's, or postponed
paper_planner       the Zero Bubble paper's planner: zb_1p, zb_2p
list_scheduling     one stage per rank: a plan made action by action, by rules that evolve
plan_graph          a plan as a graph of actions
incremental_timing  a plan that is timed again in microseconds after a move
improve             random moves and justification

Where a W goes is decided when a plan is made (by a family, initial_orders, paper_planner or list_scheduling),
and again when the plan is improved.

With exchanges a W's time depends on its place. A plan is improved with the times that its W's have when the
improvement begins, and then judged by the simulation.
"""

from zbpp.planning.search.local_search import zb_auto
from zbpp.planning.search.paper_planner import zb_1p, zb_2p

__all__ = ["zb_1p", "zb_2p", "zb_auto"]
