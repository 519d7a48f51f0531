"""The best timetable there is, for small cases, by OR-tools CP-SAT: it judges the search and the bounds."""

from helpers.exact.solve import Exact, solve

__all__ = ["Exact", "solve"]
