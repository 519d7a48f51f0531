"""What ranks say when they were given different things, and a job of one."""

import pytest
import torch

from helpers.processes import outcomes, run_ranks
from zbpp.job.agreement import broadcast, check_agreement, gather, gather_or_refuse, refuse_together
from zbpp.job.world import world
from zbpp.runtime import AgreementError, CommunicationError, DeviceError


def complaint(rank, values):
    """The text of the AgreementError on this rank, None without."""
    try:
        check_agreement("configs", values[rank])
    except AgreementError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (
            [{"steps": 3, "seed": 0}, {"steps": 4, "seed": 0}, {"steps": 3, "seed": 0}],
            ["steps: 3 on rank 0, 2; 4 on rank 1"],
        ),
        (
            [{"a": 1, "b": "x"}, {"a": 1, "b": "x"}, {"a": 2, "b": None}],
            ["a: 1 on rank 0, 1; 2 on rank 2", "b: 'x' on rank 0, 1; None on rank 2"],
        ),
        ([{}, {}, {"dropout": None}], ["dropout: '(nothing)' on rank 0, 1; None on rank 2"]),
        (["cafe", "cafe", "babe"], ["'cafe' on rank 0, 1; 'babe' on rank 2"]),
    ],
)  # fmt: skip
def test_a_difference_is_told_on_every_rank_and_nothing_else(values, lines):
    expected = "\n  ".join(["the ranks of this job have different configs:", *lines])
    assert run_ranks(complaint, 3, values) == [expected] * 3


def test_equal_values_are_no_error():
    assert run_ranks(complaint, 3, [{"a": [1, None], "b": {"c": 2.0}}] * 3) == [None] * 3


def talk(rank):
    return gather({"rank": rank}), broadcast(f"from {rank}")


def test_gather_and_broadcast_say_the_same_on_every_rank():
    expected = ([{"rank": 0}, {"rank": 1}, {"rank": 2}], "from 0")
    assert run_ranks(talk, 3) == [expected] * 3


def refuse(rank, refusals):
    """What this rank returns or raises, the cause of its error, and the number of its gathers."""
    own = KeyError(rank) if refusals[rank] else None
    gathers = []

    def counted(value):
        gathers.append(value)
        return gather(value)

    try:
        values = gather_or_refuse(refusals[rank], 10 * rank, counted, LookupError, own)
        refuse_together(refusals[rank], counted)
    except LookupError as error:
        return str(error), type(error.__cause__), len(gathers)
    return values, type(own), len(gathers)


def test_a_refusal_of_one_rank_is_raised_on_all_and_else_all_values_come():
    nothing = type(None)
    expected = [("no", nothing, 1), ("no", KeyError, 1), ("no", KeyError, 1)]
    assert run_ranks(refuse, 3, ["", "no", "nor I"]) == expected
    assert run_ranks(refuse, 3, ["", "", ""]) == [([0, 10, 20], nothing, 2)] * 3


def leave_early(rank):
    gather(rank)  # both are connected by then
    if rank == 1:
        raise KeyError("gone")
    try:
        return gather(rank)
    except CommunicationError as error:
        return str(error)


def test_a_peer_that_left_is_a_communication_error():
    (succeeded, text), _ = outcomes(leave_early, 2)
    assert succeeded
    assert text.startswith("rank 0, gathering from all ranks: ")


# ---------------------------------------------------------------- one rank


def test_an_unknown_device_is_refused():
    with (
        pytest.raises(ValueError, match="device='tpu': write cpu, auto or what"),
        world(device="tpu"),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_refused():
    message = r"device=cuda: 1 process\(es\) here, but torch sees 0 CUDA device\(s\).*; write device=cpu$"
    with pytest.raises(DeviceError, match=message), world(device="cuda"):
        pass
