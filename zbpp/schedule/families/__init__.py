"""One file per family of schedules: pure functions (num_ranks, num_microbatches) -> Timetable."""

from collections.abc import Callable

from zbpp.schedule.families.gpipe import gpipe
from zbpp.schedule.families.one_f_one_b import one_f_one_b
from zbpp.schedule.families.zb_h import zb_h1, zb_h2
from zbpp.schedule.families.zb_v import zb_v
from zbpp.schedule.timetable import Timetable

SCHEDULES: dict[str, Callable[[int, int], Timetable]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
}
