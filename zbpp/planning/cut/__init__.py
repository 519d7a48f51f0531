"""Which layers go to which stage on ranks of unequal speed and memory.

choose_cut    the best of all cuts under all families, then a search for its timetable; orders of ranks
cut_timing    the makespans and the memory of many cuts at once
cuts          all cuts, or those that a local search visits
"""

from zbpp.planning.cut.choose_cut import (
    ChosenCut,
    CutTooLarge,
    better_order,
    choose_cut,
    timetables_of_families,
)

__all__ = ["ChosenCut", "CutTooLarge", "better_order", "choose_cut", "timetables_of_families"]
