"""Makes plans, by name or by search, and bounds on how good any plan can be. Pure Python and numpy.

Entries:

    plan             `plan`: a schedule by name
    schedules        the schedules by name, and the spellings of their names
    choose           `choose`: every family and the search at the same costs
    compare          the timeline of each of several schedules, for one model

Plans and their limits:

    problem          what is to be planned: the search and the bounds take it
    search/          zb_auto, zb_1p, zb_2p: plans for given costs within memory
    bounds/          how good a plan can be at best

What they use:

    option_ranges    the ranges of plan's options
    placement        placements by name: which rank owns which stage
    complete_stages_early   the order of last W's that ends reductions early
    objective        what a plan is judged by: makespan or span
    memory_limit     memory limits: read, resolved per rank, checked
    memory_budget    the bytes that each rank holds over a step, from those of its stages
    recompute        which stages compute their activations again, so that everything fits
    size_limit       refuses plans that are too large
    tolerance        the two tolerances of planning
    messages         the values that pass from stage to stage, by kind of action
    earliest_starts  how soon the actions of one microbatch can run
    rank_costs       costs of a model that is not cut yet
    costs_file       costs as `zbpp measure` writes them
"""

from zbpp.planning.bounds import Bound, Certificate, certificate, lower_bound
from zbpp.planning.choose import Answer, PlanningRequest, choose
from zbpp.planning.compare import compare
from zbpp.planning.costs_file import About, about_in_words, read_costs
from zbpp.planning.memory_limit import read_memory_limit
from zbpp.planning.plan import placement_of, plan
from zbpp.planning.rank_costs import RankCosts
from zbpp.planning.schedules import SCHEDULES, canonical_name, takes_costs

__all__ = [
    "SCHEDULES",
    "About",
    "Answer",
    "Bound",
    "Certificate",
    "PlanningRequest",
    "RankCosts",
    "about_in_words",
    "canonical_name",
    "certificate",
    "choose",
    "compare",
    "lower_bound",
    "placement_of",
    "plan",
    "read_costs",
    "read_memory_limit",
    "takes_costs",
]
