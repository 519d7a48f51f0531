"""Lower bounds on makespan and max span, and certificates: how far a plan is from the best.

relaxation            what the bounds are about: no action longer, nothing held longer; read this first
idle_bound            a rank must idle, because memory fills up or a microbatch takes its time to come back
first_backward_bound  sharper: a rank runs whole F's, and a late B makes other ranks late
link_bound            a link sends one message after another
round_trip_bound      few microbatches in memory, each held for a whole round trip
unequal_lengths       units of different lengths, in their order or over all orders
lower_bound           the largest of all these bounds, and certificates
"""

from zbpp.planning.bounds.lower_bound import (
    Bound,
    Certificate,
    bound_of,
    bound_over_orders,
    certificate,
    lower_bound,
)

__all__ = ["Bound", "Certificate", "bound_of", "bound_over_orders", "certificate", "lower_bound"]
