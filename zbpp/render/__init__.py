"""Answers and timelines as text, picture, page, table and trace: pure functions, nothing is printed here."""

from zbpp.render.advice import render_advice
from zbpp.render.cuts import render_cuts
from zbpp.render.page import render_page
from zbpp.render.picture import render_picture
from zbpp.render.statements import Statement, statements
from zbpp.render.style import Timelines
from zbpp.render.table import render_figures, render_table
from zbpp.render.text import render_text
from zbpp.render.trace import chrome_trace

__all__ = [
    "Statement",
    "Timelines",
    "chrome_trace",
    "render_advice",
    "render_cuts",
    "render_figures",
    "render_page",
    "render_picture",
    "render_table",
    "render_text",
    "statements",
]
