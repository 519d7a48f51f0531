"""Costs of a model that is not cut yet, one number for a rank's share of it; and files of such costs."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbpp.planning.links_file import links_of
from zbpp.schedule import Links
from zbpp.schedule.costs import ACTIVATIONS, BYTES, COST_NAMES, TIMES, CostNumbers, Costs, PerStage
from zbpp.schedule.interchange import naming
from zbpp.schedule.timetable import PlanError, printable, shown


@dataclass(frozen=True)
class RankCosts(CostNumbers):
    """The same names as `Costs`; a number is for one rank's share of the model, however many stages that is.

    So schedules with one stage per rank and with several run the same model, see `per_stage`. A list has one
    number per part of the model, in model order, for any number of parts that num_ranks divides.
    shape: (rows, tokens of a row) of a microbatch of length 1; None: not known.
    Raises PlanError as `Costs` does, and for a shape that is not two whole numbers of 1 or more.
    """

    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape is None:
            return
        given = tuple(self.shape) if isinstance(self.shape, list | tuple) else ()
        if len(given) != 2 or not all(type(each) is int and each >= 1 for each in given):
            raise PlanError(
                f"shape is {shown(self.shape)}; the rows of a microbatch and the tokens of a row are "
                "expected, as [4, 512]"
            )
        object.__setattr__(self, "shape", given)

    @property
    def work(self) -> tuple[float, float, float]:
        """F, B and W of a microbatch of length 1 on a mean rank, or stage (ms)."""
        parts = [self] if self.quadratic is None else [self, self.quadratic]
        f, b, w = (sum(_mean(getattr(part, name)) for part in parts) for name in ("f", "b", "w"))
        return f, b, w

    def of_tokens(self, numbers: Sequence[float]) -> RankCosts:
        """The costs of microbatches with these numbers of tokens.

        Without a shape these costs are those of a microbatch with the mean number of tokens.
        """
        unit = statistics.fmean(numbers) if self.shape is None else math.prod(self.shape)
        return RankCosts.of_lengths([each / unit for each in numbers], self)

    def per_stage(self, num_stages: int, num_ranks: int) -> Costs:
        """The costs of `num_stages` stages on `num_ranks` ranks that together are this model.

        A number is divided evenly among a rank's stages. A list whose length is a multiple of num_ranks
        is made finer (a stage falls into equal parts) or coarser (neighbours become one stage). So two stages
        a rank take half of the share's reduction each: each has half of the gradients. A message
        takes as long as before; of neighbours that become one stage, the longest message counts. Raises
        PlanError for less than one rank.
        """
        if num_ranks < 1:
            raise PlanError(f"num_ranks={num_ranks}: write a whole number, 1 or more")
        fitted = {
            name: _fitted(value, num_stages, num_ranks, is_message=name == "comm")
            for name, value in self.numbers.items()
        }
        quadratic = None if self.quadratic is None else self.quadratic.per_stage(num_stages, num_ranks)
        if quadratic is not None:  # only its times count, and the others have the values of Costs()
            quadratic = Costs(**{name: getattr(quadratic, name) for name in TIMES})
        return Costs(
            **fitted,
            memory_unit=self.memory_unit,
            lengths=self.lengths,
            quadratic=quadratic,
            slice_bounds=self.slice_bounds,
            links=self.links,
        )


def layers_of(costs: RankCosts, num_layers: int, num_ranks: int) -> list[Costs]:
    """The costs of each layer of this model. A number is divided evenly among the layers, except for comm.

    A list has a number for each layer, or for each of fewer, equal parts of the model. Raises PlanError.
    """
    if costs.lengths or costs.slice_bounds or costs.quadratic is not None:
        raise PlanError(
            "a cut is chosen for whole, equal microbatches: leave lengths and slices out of the costs"
        )
    numbers: dict[str, Sequence[float]] = {}
    for name in ("f", "b", "w", "bw", "comm", "saved", "deferred", "static"):
        value = getattr(costs, name)
        if isinstance(value, Sequence):
            if not value or num_layers % len(value):
                raise PlanError(
                    f"{name} has {len(value)} numbers for {num_layers} layers: write one for each"
                )
            parts = num_layers // len(value)
            numbers[name] = [each if name == "comm" else each / parts for each in value for _ in range(parts)]
        elif value is not None:
            numbers[name] = [value if name == "comm" else value * num_ranks / num_layers] * num_layers
    made = []
    for layer in range(num_layers):
        own: dict[str, Any] = {name: each[layer] for name, each in numbers.items()}
        made.append(Costs(**own, memory_unit=costs.memory_unit, links=costs.links))
    return made


def _mean(value: PerStage) -> float:
    return statistics.fmean(value) if isinstance(value, Sequence) else value


def _fitted(value: PerStage, num_stages: int, num_ranks: int, is_message: bool) -> PerStage:
    if isinstance(value, int | float):
        return value if is_message else value * num_ranks / num_stages
    length = len(value)
    if not length or length % num_ranks or max(length, num_stages) % min(length, num_stages):
        return value  # Costs.per_stage says what is wrong with this list
    if length < num_stages:
        parts = num_stages // length
        return [number if is_message else number / parts for number in value for _ in range(parts)]
    size = length // num_stages
    groups = [value[start : start + size] for start in range(0, length, size)]
    return [max(group) if is_message else sum(group) for group in groups]


About = dict[str, Any]
"""What was measured, where and how. Any keys are allowed."""

_UNITS = (ACTIVATIONS, BYTES)
_LONGEST = 80  # characters of an entry of `about` that are shown


def read_costs(path: str | os.PathLike[str]) -> tuple[RankCosts, About]:
    """The costs in a file, and what the file says about them.

    Raises OSError, or PlanError that names the file.
    """
    with naming(path):
        given = _read_json(Path(path).read_bytes())
        if not isinstance(given, dict):
            raise PlanError(f"{shown(given)} is no object with any of {', '.join(COST_NAMES)}")
        about = given.pop("about", {})
        if not isinstance(about, dict):
            raise PlanError(f"about is {shown(about)}; an object is expected")
        squared, shape = given.pop("quadratic", None), given.pop("shape", None)
        links = _links(given.pop("links")) if "links" in given else None
        unit = given.pop("memory_unit", ACTIVATIONS)
        if not isinstance(unit, str) or unit not in _UNITS:
            raise PlanError(f"memory_unit is {shown(unit)}; write {' or '.join(_UNITS)}")
        for name in given.keys() - set(COST_NAMES):
            known = ", ".join((*COST_NAMES, "memory_unit", "quadratic", "shape", "links"))
            raise PlanError(f"{shown(name)} is no cost; known: {known}")
        quadratic = _quadratic(squared)
        return RankCosts(**given, memory_unit=unit, quadratic=quadratic, shape=shape, links=links), about


def _links(given: object) -> Links:
    """The links of a costs file, in the form of a file of links."""
    try:
        return links_of(given)
    except PlanError as error:
        raise PlanError(f"links: {error}") from None


def _quadratic(given: object) -> RankCosts | None:
    """The part of the times that grows with the square of a microbatch's length; a time left out is 0."""
    if given is None:
        return None
    if not isinstance(given, dict) or given.keys() - set(TIMES):
        raise PlanError(f"quadratic is {shown(given)}; an object with any of {', '.join(TIMES)} is expected")
    return RankCosts(**{"f": 0.0, "b": 0.0, "w": 0.0, **given})


def about_in_words(about: About) -> str:
    """One line with the plain entries of `about` (no lists, no tables); empty if there are none."""
    plain = {
        key: f"{value:.4g}" if isinstance(value, float) else str(value)
        for key, value in about.items()
        if not isinstance(value, dict | list)
    }
    words = "; ".join(f"{key.replace('_', ' ')} {value}"[:_LONGEST] for key, value in plain.items())
    return f"costs measured: {printable(words)}" if words else ""


def _read_json(text: str | bytes) -> object:
    """Parse a JSON text. Raises PlanError for any other text, and for one that is nested too deep."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"line {error.lineno}, column {error.colno} is no JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, too many digits, nested too deep
        raise PlanError(f"no JSON that can be read: {error}") from None
