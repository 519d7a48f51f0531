"""The two tolerances of planning, both relative. No other file of planning defines one.

ROUNDING: what a sum of floats may be off by. A memory level that passes its limit by no more is within the
    limit, and two times that differ by no more are equal.
EQUAL: how close a plan's time must be to a lower bound to count as optimal. It is ten times ROUNDING, since a
    bound is lowered by ROUNDING in several places, so that rounding never puts it above a plan.
"""

ROUNDING = 1e-9
EQUAL = 1e-8
