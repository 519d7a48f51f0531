"""Memory as text: which unit is meant is never guessed, and what is printed can be typed."""

import re

import pytest

from zbpp.planning import plan, read_memory_limit
from zbpp.schedule import Costs, PlanError

GIB = 2**30
BYTES = Costs(saved=GIB, deferred=GIB / 2, memory_unit="bytes")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12GiB", 12 * GIB), ("12 gib", 12 * GIB), ("1.5MiB", 1.5 * 2**20), ("12GB", 12e9), ("7kB", 7e3),
        ("100B", 100), ("1e3B", 1e3), ("1TiB", 2**40), ("2GiB,1GiB", [2 * GIB, GIB]),
        (["2GiB", "3B"], [2 * GIB, 3]), (None, None),
    ],
)  # fmt: skip
def test_limits_in_bytes_have_a_unit(text, number):
    assert read_memory_limit(text, BYTES) == number


@pytest.mark.parametrize(
    ("given", "number"), [("8", 8), (8, 8), ("4.5", 4.5), ("8,6", [8, 6]), ([8, 6.5], [8, 6.5])]
)
def test_limits_in_activations_have_none(given, number):
    assert read_memory_limit(given, Costs()) == number


@pytest.mark.parametrize(
    ("limit", "costs", "message"),
    [
        ("8", BYTES, "memory limit '8': the costs are in bytes; write a unit, such as 12GiB"),
        (8.0, BYTES, "memory limit 8.0: the costs are in bytes; write a unit, such as 12GiB"),
        ("12GiB", Costs(), "memory limit '12GiB': the costs are in activations of one rank's share"),
        ("much", BYTES, "memory limit 'much' is no amount of memory: the costs are in bytes; write a unit"),
        ("-8", Costs(), "memory limit '-8' is no amount"),
        (True, Costs(), "memory limit True is no amount"),
    ],
)  # fmt: skip
def test_the_wrong_unit_is_refused_with_the_one_to_write(limit, costs, message):
    with pytest.raises(PlanError) as caught:
        read_memory_limit(limit, costs)
    assert str(caught.value).startswith(message)


def test_the_least_that_works_can_be_typed():
    costs = Costs(saved=GIB + 0.3, deferred=GIB / 2, memory_unit="bytes")
    with pytest.raises(
        PlanError, match=r"zb_h1 needs 4 GiB on rank 0, the memory limit allows 1.5 GiB;"
    ) as caught:
        plan("zb_h1", 4, 8, costs=costs, memory_limit=1.5 * GIB)
    (least,) = re.findall(r"per rank: (.*)", str(caught.value))
    limits = read_memory_limit(least.replace(", ", ","), costs)
    assert plan("zb_h1", 4, 8, costs=costs, memory_limit=limits) == plan("zb_h1", 4, 8)
