"""Which layers go to which stage on ranks of unequal speed and memory.

choose_cut    the answer: all cuts under all families, then a search for the best of them
cut_timing    the makespans and the memory of many cuts at once
cuts          all cuts, or those that a local search visits
"""

from zbpp.planning.cut.choose_cut import ChosenCut, choose_cut

__all__ = ["ChosenCut", "choose_cut"]
