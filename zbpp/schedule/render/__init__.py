"""Timelines as text, picture, page, table and trace: pure functions, nothing is printed here."""

from zbpp.schedule.render.page import render_page
from zbpp.schedule.render.picture import render_picture
from zbpp.schedule.render.table import render_figures, render_table
from zbpp.schedule.render.text import render_text
from zbpp.schedule.render.titled import Timelines
from zbpp.schedule.render.trace import chrome_trace

__all__ = [
    "Timelines",
    "chrome_trace",
    "render_figures",
    "render_page",
    "render_picture",
    "render_table",
    "render_text",
]
