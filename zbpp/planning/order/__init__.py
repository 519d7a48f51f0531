"""In which order microbatches of different lengths go through a timetable.

order_microbatches  the hill, and a local search from there
order_bound         what no order can undercut, and the longest microbatch's own path
batched_timing      the makespans of many orders at once
"""

from zbpp.planning.order.order_bound import order_bound, own_path
from zbpp.planning.order.order_microbatches import order_microbatches

__all__ = ["order_bound", "order_microbatches", "own_path"]
