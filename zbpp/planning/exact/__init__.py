"""The best timetable there is, for small cases, by OR-tools CP-SAT; with its proof, if time allows."""

from zbpp.planning.exact.solve import Exact, optimal, solve

__all__ = ["Exact", "optimal", "solve"]
