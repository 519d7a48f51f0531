"""The known schedules that need no costs: pure functions of num_ranks and num_microbatches.

FAMILIES has every schedule by its name, and a schedule in it is called a family. A file holds one family, or
two that follow one pattern:

gpipe.py            all forwards, then all backwards
one_f_one_b.py      1F1B: alternates forwards and whole backwards
interleaved.py      several stages per rank in a loop, with whole backwards (1F1B) or split ones (zero bubble)
looped_bfs.py       stages in a loop, too; a rank runs all microbatches on one stage, then all on its next
zb_h.py             ZB-H1 and ZB-H2: split backwards; W's fill the bubble
zb_v.py             ZB-V: two stages per rank in a V, no bubble at F = B = W
building_blocks.py  V-Half and V-Min: a V with less memory
dualpipe_v.py       DualPipeV, without its overlap of an F and a backward

stages_per_rank, where a family offers the choice, and num_slices are keyword-only parameters with the names
that `plan` gives them. Each docstring shows a small timetable, one line per rank;
tests/families/test_golden.py compares it with the real one.

In the docstrings p is num_ranks, m is num_microbatches, v is stages_per_rank, r is a rank (0..p-1), S is
num_slices. In a formula F, B and W stand for the times of these actions on one stage for a whole microbatch.
A stage-activation is what an F of one stage saves of a whole microbatch. The bubble is `Timeline.bubble`: the
largest idle time of a rank within its own span, from its first action to its last. Formulas hold for stages
with equal times, slices with equal times, messages that take no time, BW = B + W.

With slices, B's of a microbatch begin with its last slice. So F's run S - 1 units further ahead of B's than
without: a rank holds S - 1 slices more than it would hold microbatches without slices. Drawings are for S=1.

To add a schedule: a file here, an entry in FAMILIES, and configs/schedule/NAME.yaml; an entry in SCHEDULES of
benchmark/torch_runner.py if torch has it. A choice that `plan` does not know yet becomes an option of `plan`.
On each stage F's, B's with BW's, and W's with BW's must be in the order of `check_row` (check.py); see
`numbered` and `units_in_order` in timetable.py. The schedule must plan 2
microbatches on one rank, which `compare` asks for. It should plan 4 microbatches on one rank and on two: the
search learns its placement from these plans, and does not use a schedule that refuses them.
"""

from collections.abc import Callable

from zbpp.schedule.families.building_blocks import v_half, v_min
from zbpp.schedule.families.dualpipe_v import dualpipe_v
from zbpp.schedule.families.gpipe import gpipe
from zbpp.schedule.families.interleaved import interleaved_1f1b, interleaved_zb
from zbpp.schedule.families.looped_bfs import looped_bfs
from zbpp.schedule.families.one_f_one_b import one_f_one_b
from zbpp.schedule.families.zb_h import zb_h1, zb_h2
from zbpp.schedule.families.zb_v import zb_v
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
