"""Makes plans, by name or by search, and bounds on how good any plan can be. Pure Python and numpy.

plan             `plan`: a schedule by name; `compare`: several for one model
choose           `choose`: which schedule to use, at given costs and memory
problem          what is to be planned: the search and the bounds take it
search/          zb_auto, zb_1p, zb_2p: plans for given costs within memory
bounds/          how good a plan can be at best
order/           in which order microbatches of different lengths go through a timetable
cut/             which layers go to which stage on ranks of unequal speed and memory
longest_paths    a timetable's actions by level: many sets of durations are timed at once
dependencies     what actions wait for, by kind of action
slices           where the slices of sequences begin, so that all take equally long
work             the work of a microbatch, and the length that has so much work
placement        placements by name: which rank owns which stage
slowest_link     the link between ranks that a step waits for most
messages_ahead   how many messages a link holds that has a latency
rank_costs       costs of a model that is not cut yet, and files of them
links_file       files of the links between ranks
memory_limit     memory limits: read, resolved per rank, checked
options          the objectives, the tolerances, and the check of a count
"""

from zbpp.planning.bounds import Bound, Certificate, certificate, lower_bound
from zbpp.planning.choose import Answer, PlanningRequest, choose, what_would_buy
from zbpp.planning.cut import (
    ChosenCut,
    CutTooLarge,
    better_order,
    choose_cut,
    timetables_of_families,
)
from zbpp.planning.links_file import read_links, written_links
from zbpp.planning.memory_limit import MemoryLimit, read_memory_limit
from zbpp.planning.messages_ahead import messages_ahead
from zbpp.planning.order import order_bound, order_microbatches, own_path
from zbpp.planning.plan import SCHEDULES, check_name, compare, placement_of, plan, takes_costs
from zbpp.planning.rank_costs import About, RankCosts, about_in_words, layers_of, read_costs
from zbpp.planning.slices import balanced_bounds, balanced_shares
from zbpp.planning.slowest_link import SlowestLink, slowest_link

__all__ = [
    "SCHEDULES",
    "About",
    "Answer",
    "Bound",
    "Certificate",
    "ChosenCut",
    "CutTooLarge",
    "MemoryLimit",
    "PlanningRequest",
    "RankCosts",
    "SlowestLink",
    "about_in_words",
    "balanced_bounds",
    "balanced_shares",
    "better_order",
    "certificate",
    "check_name",
    "choose",
    "choose_cut",
    "compare",
    "layers_of",
    "lower_bound",
    "messages_ahead",
    "order_bound",
    "order_microbatches",
    "own_path",
    "placement_of",
    "plan",
    "read_costs",
    "read_links",
    "read_memory_limit",
    "slowest_link",
    "takes_costs",
    "timetables_of_families",
    "what_would_buy",
    "written_links",
]
