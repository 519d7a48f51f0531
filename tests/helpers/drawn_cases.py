"""Random cases for tests/test_random_combinations.py: what may be combined with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import assume, reject
from hypothesis.strategies import SearchStrategy, composite, integers, sampled_from

from helpers.drawn_layers import (
    BOUNDARIES,
    EMBEDDINGS,
    LAYERS,
    TORCH_CHECKPOINTS,
    WITH_EFFECTS,
    WRAPPERS,
    ZBPP_CHECKPOINTS,
)
from zbpp import SCHEDULES, PlanError, Timetable, plan

TIED = "tied"  # all layers of this name in a model have one weight
OPTIMIZERS = ("sgd", "adamw", "adagrad", "rmsprop")
UPDATES = ("plain", "clip", "accumulate", "release", "validated")
WEIGHTS = ("", "offloaded", "main_grad", "masters")
SWITCHES = ("offload", "dynamic shapes", "evaluate", "freeze", "front", "keyword", "recompute", "zero")
# Torch's selective checkpoint gives wrong gradients where a product that it keeps is changed in place.
CHANGED_IN_PLACE = {"in place", "gru"}
# In 16 bits these draw other numbers, choose other rows, or do not run.
NOT_IN_16_BITS = {"dropout", "routed", "batch norm"}


class Case(NamedTuple):
    """A model and how it is trained. layers: of each stage; boundaries: between stages; see build_stages."""

    layers: tuple[tuple[str, ...], ...]
    boundaries: tuple[str, ...] = ()
    schedule: str = "zb_h1"
    stages_per_rank: int | None = None
    num_ranks: int = 1  # of one pipeline
    parallel: str = ""  # "replicate", "shard": two processes for each rank
    num_microbatches: int = 1
    optimizer: str = "sgd"
    update: str = "plain"
    weights: str = ""
    compiled: str = ""
    loss: str = "mean"
    switches: tuple[str, ...] = ()

    def __repr__(self) -> str:
        default = self._field_defaults
        given = {name: value for name, value in self._asdict().items() if value != default.get(name)}
        return f"Case({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def updates_in_step(self) -> bool:
        """Whether the weights are updated in a step, and not by the loop around it."""
        return self.update in ("release", "validated")

    @property
    def has_main_grads(self) -> bool:
        return self.weights in ("main_grad", "masters")

    @property
    def num_parts(self) -> int:
        """How many parts the data has: one for each replica or shard."""
        return 2 if self.parallel else 1

    def timetable(self) -> Timetable:
        return plan(
            self.schedule, self.num_ranks, self.num_microbatches, stages_per_rank=self.stages_per_rank
        )


def kind_of(layer: str) -> str:
    """A layer without its wrappers."""
    return layer.split("/")[-1]


Draw = Callable[[SearchStrategy[Any]], Any]


@composite
def cases(draw: Draw, num_processes: int) -> Case:
    """Draws a case for this number of processes. The first value of a choice is the one to shrink to."""
    parallel = draw(sampled_from(["", "", "replicate", "shard"])) if num_processes > 1 else ""
    case = Case(
        layers=(),
        schedule=draw(sampled_from([*SCHEDULES])),
        stages_per_rank=draw(sampled_from([None, None, 2, 3])),
        num_ranks=num_processes // 2 if parallel else num_processes,
        parallel=parallel,
        num_microbatches=draw(sampled_from([4, 8] if num_processes > 1 else [1, 2, 3, 4])),
    )
    try:
        num_stages = case.timetable().num_stages
    except PlanError:
        reject()
    assume(num_stages > 1 or draw(integers(0, 2)) == 0)
    case = _possible(
        case._replace(
            boundaries=tuple(draw(sampled_from(["one", *BOUNDARIES])) for _ in range(num_stages - 1)),
            optimizer=draw(sampled_from(OPTIMIZERS)),
            update=draw(sampled_from(["plain", *UPDATES])),
            weights=draw(sampled_from(["", "", *WEIGHTS])),
            compiled=draw(sampled_from(["", "", "", "stage", "layer"])),
            loss=draw(sampled_from(["mean", "mean", "dict", "module"])),
            switches=tuple(each for each in SWITCHES if draw(integers(0, 4)) == 4),
        )
    )
    layers = [[_layer(draw, case) for _ in range(draw(integers(1, 3)))] for _ in range(num_stages)]
    if "front" not in case.switches and draw(integers(0, 4)) > 2:
        wrapper = draw(sampled_from(["", "", "recompute/", "save_on_cpu/", "zbpp checkpoint/"]))
        layers[0].insert(0, wrapper + draw(sampled_from([*EMBEDDINGS])))
    return case._replace(layers=tuple(map(tuple, layers)))


def _possible(case: Case) -> Case:
    """The case without most of what zbpp refuses."""
    left_out = set()
    if case.weights == "offloaded":
        case = case._replace(weights="" if case.parallel else "offloaded", update="plain", compiled="")
        left_out.add("offload")
    if case.update == "release" or case.weights == "main_grad":
        case = case._replace(weights="" if case.updates_in_step else case.weights)
    if case.parallel or case.has_main_grads or case.update not in ("plain", "accumulate"):
        left_out.add("front")  # its weights get a plain backward's gradients, after the step
    impossible = {"in place"} if "recompute" in case.switches else set()  # that changes its own input
    impossible |= {"mask"} if case.weights == "masters" else set()
    boundaries = tuple("one" if each in impossible else each for each in case.boundaries)
    switches = tuple(each for each in case.switches if each not in left_out)
    return case._replace(boundaries=boundaries, switches=switches)


def _layer(draw: Draw, case: Case) -> str:
    kind = draw(sampled_from([*LAYERS, TIED]))
    impossible = {"batch norm"} if case.parallel else set()  # replicas have statistics of their own
    if case.parallel == "shard":
        shares = case.timetable().num_stages > case.num_ranks  # a rank has two stages
        impossible |= {"channels last", TIED} if shares else {"channels last"}
    impossible |= NOT_IN_16_BITS if case.weights == "masters" else set()
    impossible |= {"hooks", TIED} if case.weights == "offloaded" else set()
    if kind in impossible:
        kind = "linear"
    possible = [each for each in WRAPPERS if kind not in WITH_EFFECTS or each not in TORCH_CHECKPOINTS]
    if kind in CHANGED_IN_PLACE:
        possible.remove("selective")
    if case.weights == "offloaded":
        possible = [*ZBPP_CHECKPOINTS]
    num_wrappers = draw(sampled_from([0, 0, 0, 1] if case.compiled else [0, 0, 1, 1, 2]))
    wrappers = [draw(sampled_from(possible)) for _ in range(num_wrappers)]
    if case.has_main_grads or "recompute" in case.switches or {*wrappers} & {*ZBPP_CHECKPOINTS}:
        wrappers = [each for each in wrappers if each != "reentrant"]
    return "/".join([*wrappers, kind])
