"""Timelines and answers of the planner in forms that people read. Functions return text or write a file.

text.py        the staircase: one line of letters per rank
table.py       figures of one timeline, or of several schedules beside each other
hang.py        where each rank stood when a call failed
memory.py      what each rank holds over a step, and what switches would save
picture.py     PNG, SVG or PDF, with matplotlib
curves.py      loss, speed, bubble and memory of training runs, with matplotlib
page.py, web/  an HTML page to zoom into, with memory curves
trace.py       Chrome's trace format, for Perfetto
link_strips.py the messages on each link, below the ranks of a picture
style.py       what the drawings share: colours, the words for ops and figures
choice.py      which schedule to use: an answer of `choose`
cut.py         which layers go to which stage: an answer of `choose_cut`
"""

from zbpp.render.choice import render_bought, render_choice, render_short_w
from zbpp.render.curves import render_curves
from zbpp.render.cut import render_cut
from zbpp.render.hang import render_hang
from zbpp.render.memory import (
    in_bytes,
    render_limit,
    render_memory,
    render_switches,
)
from zbpp.render.page import render_page
from zbpp.render.picture import render_picture
from zbpp.render.style import Timelines
from zbpp.render.table import render_figures, render_table
from zbpp.render.text import render_text
from zbpp.render.trace import chrome_trace

__all__ = [
    "Timelines",
    "chrome_trace",
    "in_bytes",
    "render_bought",
    "render_choice",
    "render_curves",
    "render_cut",
    "render_figures",
    "render_hang",
    "render_limit",
    "render_memory",
    "render_page",
    "render_picture",
    "render_short_w",
    "render_switches",
    "render_table",
    "render_text",
]
