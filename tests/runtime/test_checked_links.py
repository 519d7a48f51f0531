"""Messages with checksums: a changed bit anywhere is an error that names the message; nothing else is.

One launch of two processes for all cases; each planted fault is planted where messages are received.
"""

import re
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, PostValidation, lower, plan
from zbpp.runtime import AgreementError
from zbpp.runtime.checked_links import CheckedInbox, CheckedOutbox, sealed, unsealed
from zbpp.runtime.layout import _DTYPES, layout_of
from zbpp.runtime.p2p import BufferPool, FreshBuffers, Inbox
from zbpp.schedule import Recv

CPU = torch.device("cpu")
M, ROWS, SIZE = 4, 16, 6
FAMILIES = ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b"]


class Flip:
    """Within it, bit number `bit` of tensor `place` of a received message flips; number: counted from 0."""

    def __init__(self, number, place=0, bit=0):
        self._number, self._place, self._bit, self._count = number, place, bit, 0

    def __enter__(self):
        original = self._original = Inbox.receive

        def receive(inbox):
            message = original(inbox)
            if self._count == self._number:
                message[self._place].detach().view(-1).view(torch.uint8)[self._bit // 8] ^= 1 << self._bit % 8
            self._count += 1
            return message

        Inbox.receive = receive

    def __exit__(self, *_):
        Inbox.receive = self._original


def error_of(function, *args):
    try:
        function(*args)
    except Exception as error:  # whatever it is: the test reads it
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------- links


def over_a_link(rank, messages, *, dynamic=False, is_late=False, swapped=False):
    """What rank 1 says of messages that rank 0 sends."""
    if rank == 0:
        outbox = CheckedOutbox(1, dist.group.WORLD, CPU, dynamic)
        for message in messages:
            outbox.send("x", message)
        outbox.finish()
        return None
    pool = FreshBuffers(CPU) if dynamic else BufferPool(CPU)
    names = [f"x(1,{number}) from rank 0 to rank 1" for number in range(len(messages))]
    options = {"names": names, "when": lambda: "in step 1", "is_late": is_late}
    inbox = CheckedInbox(0, dist.group.WORLD, pool, ["x"] * len(messages), 1, dynamic, **options)
    inbox.begin()
    errors = []
    for _ in messages:
        if swapped:
            inbox._number = 1 - inbox._number
        errors.append(error_of(inbox.receive))
    return [each for each in [*errors, error_of(inbox.verify)] if each]


def dtypes(rank):
    """Per dtype: what is said of two messages, and of two whose second one has a flipped bit."""
    found = {}
    for dtype in _DTYPES:
        messages = [(None, torch.arange(6).to(dtype).view(2, 3)), (torch.ones(2), torch.ones(3, dtype=dtype))]
        for is_late in (False, True):
            right = over_a_link(rank, messages[:1] * 2, is_late=is_late)
            with Flip(1, place=1, bit=16):
                wrong = over_a_link(rank, messages[:1] * 2, is_late=is_late)
            found[str(dtype), is_late] = right, wrong
        found[str(dtype), "dynamic"] = over_a_link(rank, messages, dynamic=True), ["changed"]
    return found


# ---------------------------------------------------------------- pipelines


def stages_of(rank, timetable):
    found = {}
    for index in timetable.stages_of(rank):
        torch.manual_seed(index)
        found[index] = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Dropout(0.2), nn.Tanh())
    return found


def batch(step, rows=ROWS):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, SIZE, generator=generator), torch.randn(rows, SIZE, generator=generator)


def num_receives(timetable, rank):
    return sum(isinstance(each, Recv) for each in lower(timetable)[rank].instructions)


def trained(rank, schedule, *, check_messages, dynamic_shapes=False):
    """Losses, weights and statistics after some steps, an evaluation and a prediction."""
    timetable = plan(schedule, 2, M)
    stages, found = stages_of(rank, timetable), []
    options = {"check_messages": check_messages, "dynamic_shapes": dynamic_shapes}
    with Pipeline(stages, timetable, F.mse_loss, **options) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            inputs, target = batch(step, ROWS if step < 2 or not dynamic_shapes else 2 * ROWS)
            found += pipeline.step(inputs, target=target)
            optimizer.step()
        found += pipeline.evaluate(batch(9, 8)[0], target=batch(9, 8)[1])
        output = pipeline.predict(batch(9, 3)[0])
        found += [] if output is None else [output]
        calls = [timetable] * 3 + [timetable.forward_only(), timetable.forward_of_one()]
        received = sum(num_receives(each, rank) for each in calls)
        assert pipeline.check_counts.messages == (received if check_messages else 0)
        return found + list(pipeline.state_dict().values())


def validated(rank, *, check_messages):
    """A loop whose updates are redone: F's before the gate run again, and their messages are dropped."""
    timetable = plan("zb_h1", 2, M)
    with Pipeline(
        stages_of(rank, timetable), timetable, F.mse_loss, check_messages=check_messages
    ) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
        loop = PostValidation(pipeline, optimizer, clip_norm=1e-3)
        for step in range(3):
            loop.step(batch(step)[0], target=batch(step)[1])
        loop.settle()
        return loop.num_redone, [value.clone() for value in pipeline.state_dict().values()]


def planted(rank, schedule, call, number):
    """This rank's error when the message with that number, of those that rank 1 receives, has changed."""
    timetable, error = plan(schedule, 2, M), ""
    pipeline = Pipeline(stages_of(rank, timetable), timetable, F.mse_loss, check_messages=True)
    # A rank that only sends ends an evaluation without an error: nobody waits for it in `close`.
    with suppress(KeyError), pipeline, Flip(number if rank == 1 else -1, bit=7):
        inputs, target = batch(0)
        if call == "evaluate":
            pipeline.step(inputs, target=target)
        error = error_of(lambda: getattr(pipeline, call)(inputs, target=target))
        raise KeyError
    return error


def unequal(rank):
    timetable = plan("zb_h1", 2, M)
    return error_of(lambda: Pipeline(stages_of(rank, timetable), timetable, check_messages=rank == 0))


def everything(rank):
    found = {"dtypes": dtypes(rank), "swapped": over_a_link(rank, [(torch.ones(2),)] * 2, swapped=True)}
    for schedule in FAMILIES:
        found[schedule] = [trained(rank, schedule, check_messages=on) for on in (False, True)]
        found[schedule] += [trained(rank, schedule, check_messages=True, dynamic_shapes=True)]
        found[schedule, "step"] = planted(rank, schedule, "step", 2)
        in_step = num_receives(plan(schedule, 2, M), 1)
        found[schedule, "evaluate"] = planted(rank, schedule, "evaluate", in_step + 1)
    found["validated"] = [validated(rank, check_messages=on) for on in (False, True)]
    found["unequal"] = unequal(rank)
    return found


@pytest.fixture(scope="module")
def both():
    return run_ranks(everything, 2)


def test_a_flipped_bit_is_seen_in_every_dtype_at_once_or_at_the_end_of_the_pass(both):
    for case, (right, wrong) in both[1]["dtypes"].items():
        assert right == [], case
        assert len(wrong) == 1, case
        if case[1] != "dynamic":
            assert wrong[0].startswith(
                "CorruptionError: x(1,1) from rank 0 to rank 1 has changed on its way, in step 1"
            )


def test_a_message_out_of_order_is_seen(both):
    assert len(both[1]["swapped"]) == 2


def test_any_changed_bit_of_a_header_is_seen():
    """Before buffers of the sizes in it are made: gloo ends the process if they are wrong."""
    layout = layout_of((torch.ones(2, 3), None, torch.ones(4, dtype=torch.bool)))
    assert unsealed(sealed(layout)) == layout
    for place in (0, 1, 4, 100, 255):
        for bit in (0, 3, 63):
            header = sealed(layout)
            header.view(torch.uint8)[8 * place + bit // 8] ^= 1 << bit % 8
            assert unsealed(header) is None
    with pytest.raises(ValueError, match="too many for a header"):
        sealed(layout_of([torch.ones(1, 1)] * 51))


@pytest.mark.parametrize("schedule", FAMILIES)
def test_checks_change_nothing_and_see_nothing_where_nothing_is_wrong(both, schedule):
    for found in both:
        plain, checked, dynamic = found[schedule]
        assert len(plain) == len(checked)
        assert all(map(torch.equal, plain, checked))
        assert len(dynamic) == len(plain)


def test_messages_of_a_step_that_begins_again_are_right(both):
    for found in both:
        (redone, plain), (again, checked) = found["validated"]
        assert redone == again > 0
        assert all(map(torch.equal, plain, checked))


@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_the_error_names_message_link_and_step(both, schedule, call):
    error, other = both[1][schedule, call], both[0][schedule, call]
    where = "in step 1" if call == "step" else "in evaluate() after 1 steps"
    value = r"x\([13],\d\)|g\([02],\d\)"
    assert re.match(
        rf"CorruptionError: ({value}) from rank 0 to rank 1 has changed on its way, {re.escape(where)}:",
        error,
    )
    assert other.startswith("CommunicationError: rank 0") or (other == "" and call == "evaluate")


def test_all_ranks_check_or_none(both):
    for found in both:
        assert found["unequal"].startswith(AgreementError.__name__)
        assert "check_messages: True on rank 0; False on rank 1" in found["unequal"]
