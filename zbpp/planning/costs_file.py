"""Costs as `zbpp measure` writes them: a JSON object with the fields of `RankCosts`, and `about`."""

from __future__ import annotations

import json
import os
from typing import Any

from zbpp.planning.rank_costs import RankCosts
from zbpp.schedule.costs import ACTIVATIONS, BYTES, COST_NAMES
from zbpp.schedule.interchange import naming, read_bytes
from zbpp.schedule.timetable import PlanError, printable, shown

About = dict[str, Any]
"""What was measured, where and how. Any keys are allowed."""

_UNITS = (ACTIVATIONS, BYTES)
_LARGEST_FILE = 2**24  # bytes
_LONGEST = 80  # characters of an entry of `about` that are shown


def read_costs(path: str | os.PathLike[str]) -> tuple[RankCosts, About]:
    """The costs in a file, and what the file says about them.

    Raises OSError, or PlanError that names the file.
    """
    with naming(path):
        given = _read_json(read_bytes(path, _LARGEST_FILE))
        if not isinstance(given, dict):
            raise PlanError(f"{shown(given)} is no object with any of {', '.join(COST_NAMES)}")
        about = given.pop("about", {})
        if not isinstance(about, dict):
            raise PlanError(f"about is {shown(about)}; an object is expected")
        unit = given.pop("memory_unit", ACTIVATIONS)
        if not isinstance(unit, str) or unit not in _UNITS:
            raise PlanError(f"memory_unit is {shown(unit)}; write {' or '.join(_UNITS)}")
        for name in given.keys() - set(COST_NAMES):
            raise PlanError(f"{shown(name)} is no cost; known: {', '.join(COST_NAMES)}, memory_unit")
        return RankCosts(**given, memory_unit=unit), about


def about_in_words(about: About) -> str:
    """One line with the plain entries of `about` (no lists, no tables); empty if there are none."""
    plain = {key: str(value) for key, value in about.items() if not isinstance(value, dict | list)}
    words = "; ".join(f"{key.replace('_', ' ')} {value}"[:_LONGEST] for key, value in plain.items())
    return f"costs measured: {printable(words)}" if words else ""


def _read_json(text: str | bytes) -> object:
    """Parse a JSON text. Raises PlanError for any other text, and for one that is nested too deep."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"line {error.lineno}, column {error.colno} is no JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"no JSON that can be read: not UTF-8 text, at byte {error.start}") from None
    except RecursionError:
        raise PlanError("no JSON that can be read: it is nested too deep") from None
    except ValueError:  # Python's guard of int()
        raise PlanError("no JSON that can be read: a number has too many digits") from None
