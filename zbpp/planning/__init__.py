"""Makes plans, by name or by search, and bounds on how good any plan can be. Pure Python and numpy."""

from zbpp.planning.answer import Answer
from zbpp.planning.bounds import Bound, Certificate, certificate, lower_bound
from zbpp.planning.choose import choose
from zbpp.planning.compare import compare
from zbpp.planning.costs_file import About, about_in_words, measured_layers, read_costs
from zbpp.planning.memory_limit import read_memory_limit
from zbpp.planning.plan import SCHEDULES, canonical_name, placement_of, plan, takes_costs
from zbpp.planning.rank_costs import RankCosts
from zbpp.planning.request import PlanningRequest

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
    "measured_layers",
    "placement_of",
    "plan",
    "read_costs",
    "read_memory_limit",
    "takes_costs",
]
