"""In which order microbatches of different lengths go through a timetable.

order_microbatches  the hill, and a local search from there; also for orders of which none is within a limit
order_bound         what no order can undercut, and the longest microbatch's own path
batched_timing      the makespans of many orders at once
"""

from zbpp.planning.order.order_bound import order_bound, own_path
from zbpp.planning.order.order_microbatches import BestOrder, least_excess, order_microbatches

__all__ = ["BestOrder", "least_excess", "order_bound", "order_microbatches", "own_path"]
