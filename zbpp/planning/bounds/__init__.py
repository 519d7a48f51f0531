"""Lower bounds on makespan and max span, and certificates: how far a plan is from the best."""

from zbpp.planning.bounds.lower_bound import Bound, Certificate, bound_of, certificate, lower_bound

__all__ = ["Bound", "Certificate", "bound_of", "certificate", "lower_bound"]
