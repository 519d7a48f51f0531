"""The schedules of the field: pure functions of num_ranks and num_microbatches, one file per family.

gpipe.py            all forwards, then all backwards
one_f_one_b.py      1F1B: alternates forwards and whole backwards
interleaved.py      several stages per rank in a loop, with whole backwards (1F1B) or split ones (zero bubble)
looped_bfs.py       a loop, too: all microbatches on one stage, then all on the next
zb_h.py             ZB-H1 and ZB-H2: split backwards; W's fill the bubble
zb_v.py             ZB-V: two stages per rank in a V, no bubble at F = B = W
building_blocks.py  V-Half and V-Min: a V with less memory
dualpipe_v.py       DualPipeV, one action at a time

Further choices, such as stages_per_rank, are keyword-only parameters with the names that `plan` gives them.
Each docstring shows a small timetable, one line per rank; tests/families/test_golden.py compares it with the
real one.

To add a schedule: a file here, an entry in FAMILIES, and configs/schedule/NAME.yaml; an entry in SCHEDULES of
benchmark/torch_runner.py if torch has it. A choice that `plan` does not know yet becomes an option of `plan`.
The schedule should plan 4 microbatches on one rank and on two: the search learns its placement from these
plans, and does not use a schedule that refuses them.
"""

from collections.abc import Callable

from zbpp.families.building_blocks import v_half, v_min
from zbpp.families.dualpipe_v import dualpipe_v
from zbpp.families.gpipe import gpipe
from zbpp.families.interleaved import interleaved_1f1b, interleaved_zb
from zbpp.families.looped_bfs import looped_bfs
from zbpp.families.one_f_one_b import one_f_one_b
from zbpp.families.zb_h import zb_h1, zb_h2
from zbpp.families.zb_v import zb_v
from zbpp.schedule.timetable import Timetable

FAMILIES: dict[str, Callable[..., Timetable]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
}
