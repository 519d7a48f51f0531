"""Microbatches of different lengths, some of them empty, in any order, under any timetable.

The reference is plain autograd on one process: one microbatch after another, one mean over all targets.
"""

import random
import re
from contextlib import suppress
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import assert_close
from helpers.timetables import random_order, random_placement
from zbpp import (
    ActivationOffload,
    Costs,
    Pipeline,
    PlanError,
    Timetable,
    make_mesh,
    per_microbatch,
    plan,
    replicate,
)
from zbpp.planning import SCHEDULES
from zbpp.runtime import AgreementError, CommunicationError
from zbpp.runtime.call.sizes import Announcer, Size, Sizes
from zbpp.seeding import seed_of
from zbpp.stage_api import IGNORED, mean_over_tokens

WORDS, SIZE = 7, 6
CPU = torch.device("cpu")


class Stage(nn.Module):
    """Each token sees those before it."""

    def __init__(self, index, num_stages, dropout=0.0):
        super().__init__()
        torch.manual_seed(index)
        self.first = nn.Embedding(WORDS, SIZE) if index == 0 else nn.Identity()
        self.layer, self.dropout = nn.Linear(SIZE, SIZE), nn.Dropout(dropout)
        self.last = nn.Linear(SIZE, WORDS) if index == num_stages - 1 else nn.Identity()
        self.double()

    def forward(self, x):
        x = self.dropout(torch.tanh(self.layer(self.first(x))))
        before = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.last(x + x.cumsum(1) / before)


def sum_of(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")


@mean_over_tokens
def marked(output, target):
    return sum_of(output, target), (target != IGNORED).sum()


def unmarked(output, target):
    return sum_of(output, target) / target.numel()


class Step(NamedTuple):
    """One step of a case. batches: by part of the data, then by microbatch: (tokens, labels) or None."""

    timetable: Timetable
    order: list[int] | None
    batches: list[list[tuple[torch.Tensor, torch.Tensor] | None]]


class Case(NamedTuple):
    num_parts: int
    dropout: float
    is_marked: bool
    steps: list[Step]

    @property
    def loss_fn(self):
        return marked if self.is_marked else unmarked


def drawn_case(seed, num_processes):
    rng = random.Random(f"{seed} {num_processes}")
    num_parts = rng.choice([each for each in (1, 2) if num_processes % each == 0])
    num_ranks = num_processes // num_parts
    rank_of = random_placement(rng, num_ranks, rng.randint(num_ranks, num_ranks + 3))
    first = random_order(rng, rank_of, rng.randint(2, 6))
    if rng.random() < 0.5:
        with suppress(PlanError):
            first = plan(rng.choice(sorted({*SCHEDULES} - {"zb_auto"})), num_ranks, rng.randint(2, 9))
    follows_others, dropout = rng.random() < 0.5, rng.choice((0.0, 0.3))
    steps = []
    for _ in range(3):
        timetable = first
        if follows_others and rng.random() < 0.7:
            timetable = random_order(rng, first.rank_of, rng.randint(1, 6))
        steps.append(_drawn_step(rng, timetable, num_parts))
    return Case(num_parts, dropout, rng.random() < 0.7, steps)


def _drawn_step(rng, timetable, num_parts):
    number, rows, is_even = timetable.num_microbatches, rng.randint(1, 3), rng.random() < 0.2
    order = rng.choice((None, rng.sample(range(number), number)))
    batches = []
    for _ in range(num_parts):
        lengths = [3 if is_even else rng.choice((0, 1, 2, 5, 9, 14)) for _ in range(number)]
        lengths[rng.randrange(number)] = 4  # not all are empty
        batches.append([_drawn_batch(rng, rows, length) for length in lengths])
    return Step(timetable, order, batches)


def _drawn_batch(rng, rows, length):
    if not length:
        return None
    rows = rng.choice((rows, rows, rng.randint(1, 3)))
    tokens, labels = (torch.tensor(_words(rng, rows, length)) for _ in range(2))
    labels[:, rng.randint(0, length) :] = IGNORED
    return tokens, labels


def _words(rng, rows, length):
    return [[rng.randrange(WORDS) for _ in range(length)] for _ in range(rows)]


def modules(case, chosen=None):
    num_stages = case.steps[0].timetable.num_stages
    return {
        index: Stage(index, num_stages, case.dropout)
        for index in (range(num_stages) if chosen is None else chosen)
    }


def gradients(stages):
    return {f"{i}.{name}": p.grad for i, stage in stages.items() for name, p in stage.named_parameters()}


def plain(case):
    """Per step, (losses by part, gradients)."""
    stages, found = modules(case), []
    for number, step in enumerate(case.steps):
        counted = [each[1] != IGNORED for part in step.batches for each in part if each is not None]
        scale = 1 / max(1, sum(int(each.sum()) for each in counted))
        losses = [
            [_plain_loss(case, stages, number, part, place, batch) for place, batch in enumerate(batches)]
            for part, batches in enumerate(step.batches)
        ]
        everything = [loss for part in losses for loss in part]
        total = sum(everything) * scale if case.is_marked else sum(everything) / len(everything)
        for stage in stages.values():
            stage.zero_grad()
        total.backward()
        factor = scale * len(everything) if case.is_marked else 1.0
        grads = {name: each.clone() for name, each in gradients(stages).items()}
        found.append(([[loss.item() * factor for loss in part] for part in losses], grads))
    return found


def _plain_loss(case, stages, number, part, place, batch):
    """The sum over a microbatch's targets, of a marked loss; else the mean; 0 for an empty one."""
    if batch is None:
        return torch.zeros((), dtype=torch.float64, requires_grad=True) * 1
    x, target = batch
    for index, stage in stages.items():
        torch.manual_seed(seed_of(0, number, index, *([part] if part else [])) + place)
        x = stage(x)
    return sum_of(x, target) if case.is_marked else unmarked(x, target)


def piped(case, rank):
    """Per step, (this rank's losses, its gradients)."""
    part, place = rank % case.num_parts, rank // case.num_parts
    first = case.steps[0].timetable
    stages = modules(case, first.stages_of(place))
    mesh = make_mesh(replicate=case.num_parts) if case.num_parts > 1 else None
    found = []
    with Pipeline(stages, first, case.loss_fn, mesh=mesh, timeout=60) as pipeline:
        for step in case.steps:
            pipeline.use_timetable(str(step.timetable))
            for stage in stages.values():
                stage.zero_grad()
            x, target = (_column(step.batches[part], place) for place in range(2))
            is_first, is_last = 0 in stages, first.num_stages - 1 in stages
            given = (per_microbatch(x, step.order),) if is_first else ()
            losses = pipeline.step(*given, target=per_microbatch(target) if is_last else None)
            grads = {name: each.clone() for name, each in gradients(stages).items()}
            found.append(([loss.item() for loss in losses], grads))
    return found


def _column(batches, place):
    return [None if each is None else each[place] for each in batches]


def run_cases(rank, seeds, num_processes):
    return [piped(drawn_case(seed, num_processes), rank) for seed in seeds]


def check_cases(seeds, num_processes):
    if num_processes == 1:
        results = [run_cases(0, seeds, 1)]
    else:
        results = run_ranks(run_cases, num_processes, seeds, num_processes)
    for place, seed in enumerate(seeds):
        case = drawn_case(seed, num_processes)
        for number, (losses, expected) in enumerate(plain(case)):
            for rank, found in enumerate(results):
                own, grads = found[place][number]
                where = f"case {seed} of {num_processes} processes, step {number}, rank {rank}"
                if own:
                    assert own == pytest.approx(losses[rank % case.num_parts], rel=1e-12, abs=1e-14), where
                assert_close(grads, {name: expected[name] for name in grads})


SHARES = {1: 0.15, 2: 0.45, 4: 0.4}


@pytest.mark.parametrize("num_processes", SHARES)
def test_losses_and_gradients_equal_plain_autograd(num_processes, first_seed):
    check_cases([first_seed + each for each in range(6)], num_processes)


@pytest.mark.nightly
@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize("num_processes", SHARES)
def test_300_cases_equal_plain_autograd(num_processes, tenth, first_seed):
    number = round(30 * SHARES[num_processes])
    check_cases([first_seed + 100 + number * tenth + each for each in range(number)], num_processes)


# ---------------------------------------------------------------- headers, and memory

M, LONGEST = 8, 60


def pipeline_on(rank, name, num_ranks, num_microbatches=M, loss_fn=marked, **options):
    timetable = plan(name, num_ranks, num_microbatches)
    stages = {index: Stage(index, timetable.num_stages) for index in timetable.stages_of(rank)}
    return Pipeline(stages, timetable, loss_fn, timeout=60, **options)


def step_of_lengths(pipeline, lengths, order=None):
    """One row of these lengths in each microbatch."""
    x = [torch.ones(1, each, dtype=torch.long) for each in lengths]
    return pipeline.step(per_microbatch(x, order), target=per_microbatch(x))


def some_lengths(number):
    rng = random.Random(number)
    return [rng.randint(1, LONGEST) for _ in range(M)]


def changing_lengths(rank, name, num_steps):
    """Per step: (messages, messages with a header, bytes of receive buffers), and how much is kept."""
    pipeline, found, kept = pipeline_on(rank, name, 2), [], []
    executor = pipeline._rank.executors["step"]
    learn, headers = executor.layouts.learn, []
    executor.layouts.learn = lambda *known: (headers.append(known), learn(*known))
    for number in range(num_steps):
        headers.clear()
        lengths = some_lengths(number)
        step_of_lengths(pipeline, lengths)
        num_bytes = sum(map(len, executor.pool.buffers()))
        found.append((lengths, len(headers), num_bytes))
        kept.append(len(executor.layouts._known))
    at_once = 1 + sum(executor.given.in_flight.values()) if name == "1f1b" else M
    return found, kept, at_once


@pytest.fixture(scope="module")
def two_hundred_steps():
    return run_ranks(changing_lengths, 2, "1f1b", 200)


def test_messages_of_new_sizes_have_no_headers(two_hundred_steps):
    """Those of the first step have, to learn the layouts."""
    for found, _, _ in two_hundred_steps:
        assert found[0][1] == 2 * len({*found[0][0]})  # the x's and g's of one link each
        assert not any(headers for _, headers, _ in found[1:])


def test_memory_is_flat_over_steps_of_changing_lengths(two_hundred_steps):
    """On each rank a buffer lives from its receive until BW; so a few microbatches in a row have one."""
    for found, kept, at_once in two_hundred_steps:
        assert len({*kept}) == 1
        for lengths, _, num_bytes in found:
            windows = (lengths[begin : begin + at_once] for begin in range(M))
            assert num_bytes <= 1.1 * 8 * SIZE * max(map(sum, windows))


# ---------------------------------------------------------------- sizes and timetables of all ranks


def sizes_told(rank, rank_of, sizes):
    links = dict.fromkeys([(0, 1)], dist.group.WORLD)
    announcer = Announcer(rank_of, rank, links)
    mine = sizes if rank == rank_of[0] else [Sizes("step", 5, (), ())] * len(sizes)
    found = [announcer.told(each) for each in mine]
    dist.barrier()  # another rank may still read
    announcer.close()
    return found


def test_all_ranks_are_told_the_sizes_of_few_and_of_many_microbatches():
    many = [Size("int64[,]", (1, number)) for number in range(700)]
    sizes = [Sizes("step", 5, tuple(many[:number]), (*range(number),)) for number in (1, 700, 3, 699)]
    assert run_ranks(sizes_told, 2, [0, 1, 0], sizes) == [sizes, sizes]


def other_timetables(rank):
    """What a rank is told that follows another timetable, or another order, than the rank with the inputs."""
    told = []
    for what in ("timetable", "order"):
        pipeline = pipeline_on(rank, "1f1b", 2, 4)
        if what == "timetable" and rank == 1:
            pipeline.use_timetable(plan("zb_h1", 2, 4))
        x = per_microbatch(
            [torch.ones(1, each, dtype=torch.long) for each in (1, 2, 3, 4)],
            None if what == "timetable" else [0, 1, 2, 3] if rank else [3, 2, 1, 0],
        )
        try:
            pipeline.step(x, target=x)
        except (AgreementError, CommunicationError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_ranks_with_other_timetables_or_orders_are_told():
    first, second = run_ranks(other_timetables, 2)
    assert [each.partition(":")[0] for each in first] == ["CommunicationError"] * 2
    assert second[0].startswith("AgreementError: rank 0 follows another timetable than rank 1: call use_tim")
    assert second[1].startswith(
        "AgreementError: per_microbatch has the order [0, 1, 2, 3] on rank 1, and [3,"
    )


def test_a_pipeline_follows_a_timetable_of_more_microbatches():
    x = torch.ones(6, 3, dtype=torch.long)
    expected = []
    for name, number in (("zb_v", 3), ("gpipe", 6)):
        expected += pipeline_on(0, name, 1, number).step(x, target=x)
    stages = {0: Stage(0, 2), 1: Stage(1, 2)}
    pipeline, other = Pipeline(stages, plan("zb_v", 1, 3), marked), plan("zb_v", 1, 6)
    found = pipeline.step(x, target=x)
    pipeline.use_timetable(str(other))
    found += pipeline.step(x, target=x)
    assert len(found) == 9
    assert pipeline.timetable == other
    assert len(pipeline.evaluate(x, target=x)) == 6


# ---------------------------------------------------------------- refusals


def on_one_rank(loss_fn=marked, stages=None, **options):
    stages = stages or {0: Stage(0, 2), 1: Stage(1, 2)}
    return Pipeline(stages, plan("zb_v", 1, 3), loss_fn, **options)


class Padded(Stage):
    """Lengths become multiples of 4."""

    def forward(self, x):
        return super().forward(F.pad(x, (0, -x.shape[1] % 4)))


class Normed(Stage):
    def __init__(self, *args):
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(WORDS).double()

    def forward(self, x):
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


def rows(*lengths):
    return per_microbatch(
        [None if each is None else torch.ones(2, each, dtype=torch.long) for each in lengths]
    )


OFFLOAD = [ActivationOffload(Costs(host=1.0))]
REFUSED = {
    "too many": (on_one_rank, rows(1, 2, 3, 4), rows(1, 2, 3, 4), "4 values.*=3: plan for 4 microbatches"),
    "too few": (on_one_rank, rows(1, 2), rows(1, 2), "2 values.*=3: write None for a microbatch that is"),
    "all empty": (on_one_rank, rows(None, 0, 0), rows(0, 0, 0), "all 3 microbatches are empty"),
    "a target too many": (on_one_rank, rows(1, None, 3), rows(1, 2, 3), "microbatch 1 has a target and no"),
    "a target too few": (on_one_rank, rows(1, 2, 3), rows(1, None, 3), "has inputs, and its target is None"),
    "a target too few, no mark": (
        lambda: on_one_rank(unmarked),
        rows(1, 2, 3), rows(1, None, 3), "microbatch 1 has inputs, and its target is None: give it a target",
    ),
    "norm": (
        lambda: on_one_rank(stages={0: Stage(0, 2), 1: Normed(1, 2)}),
        rows(1, 2, 3), rows(1, 2, 3), "BatchNorm in training mode, and the microbatches of",
    ),
    "planned": (
        lambda: on_one_rank(extras=OFFLOAD),
        rows(1, None, 3), rows(1, None, 3), "activation_offload doesn't go with empty microbatches",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_a_step_is_refused_in_a_line(name):
    make, x, target, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        make().step(x, target=target)


def test_an_order_that_is_none_is_refused_where_it_is_given():
    with pytest.raises(ValueError, match=r"order=\[0, 0\] is no order of 2 microbatches: write each of 0..1"):
        per_microbatch([1, 2], [0, 0])
    x = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="argument 1 has another order than an argument before it"):
        on_one_rank().step(per_microbatch([x] * 3, [0, 1, 2]), per_microbatch([x] * 3, [2, 1, 0]), target=x)


@pytest.mark.parametrize("order", [numpy.array([2, 0, 1]), torch.tensor([2, 0, 1])])
def test_an_order_may_come_from_numpy_or_torch(order):
    """A set finds no entry of a tensor by an int, and JSON has none of NumPy's ints."""
    assert str(per_microbatch([4, 5, 6], order).order) == "(2, 0, 1)"
    losses = on_one_rank().step(per_microbatch(rows(1, 2, 3).values, order), target=rows(1, 2, 3))
    assert losses == on_one_rank().step(rows(1, 2, 3), target=rows(1, 2, 3))


@pytest.mark.parametrize("order", [[0.0, 1.0], [0, None], torch.tensor([0.0, 1.0])])
def test_an_order_of_other_things_than_whole_numbers_is_refused(order):
    with pytest.raises(ValueError, match="is no order of 2 microbatches"):
        per_microbatch([1, 2], order)


def test_values_of_one_microbatch_have_no_marks():
    with pytest.raises(ValueError, match="per_microbatch.. has a value in replicate.. or per_microbatch"):
        per_microbatch([{"x": replicate(torch.ones(2, 3))}, None])


class Scaled(Stage):
    def forward(self, x, table, scale=1.0):
        return super().forward(x) * scale + table


@pytest.mark.parametrize("how", ["arguments", "keywords"])
def test_a_microbatch_is_empty_whatever_all_microbatches_get(how):
    """A table or a number that every microbatch gets does not make a microbatch of None run."""
    table = replicate(torch.ones(SIZE, dtype=torch.float64))
    x, target = rows(2, None, 3), rows(2, None, 3)

    def losses(x, target):
        pipeline = Pipeline({0: Scaled(0, 2), 1: Stage(1, 2)}, plan("zb_v", 1, len(x.values)), marked)
        if how == "arguments":
            return pipeline.step(x, table, 2.0, target=target)
        chain = nn.ModuleDict({"first": Scaled(0, 2), "last": Stage(1, 2)})
        chain.forward = lambda x, table, scale: chain["last"](chain["first"](x, table, scale))
        pipeline = Pipeline({0: chain}, plan("zb_h1", 1, len(x.values)), marked)
        return pipeline.step(x=x, table=table, scale=2.0, target=target)

    first, empty, last = losses(x, target)
    assert not empty
    expected = losses(rows(2, 3), rows(2, 3))
    # The weight of a mean over targets holds the number of microbatches, here 3 and 2.
    assert torch.allclose(torch.stack([first, last]) * 2, torch.stack(expected) * 3, rtol=1e-12)


def test_a_timetable_on_other_ranks_is_refused():
    with pytest.raises(ValueError, match="on other ranks than this pipeline's: rank_of"):
        on_one_rank().use_timetable(plan("zb_v", 2, 3))


def padded_lengths(rank):
    """What each rank is told where lengths that fit a line are followed by one that does not."""
    stages = {rank: Padded(rank, 2)}
    pipeline = Pipeline(stages, plan("1f1b", 2, 3), lambda y, _: y.sum(), timeout=60)
    try:
        for lengths in ((4, 8, 12), (16, 20, 24), (16, 17, 24)):
            x = rows(*lengths)
            pipeline.step(x, target=x)
    except (ValueError, CommunicationError) as error:
        return str(error)


def test_a_layout_that_does_not_follow_from_the_others_is_refused_at_the_sender():
    sender, receiver = run_ranks(padded_lengths, 2)
    assert sender.startswith(
        "x(1,1) from rank 0 to rank 1: the stage gave (float64[2, 20, 6]) for a microbatch of the size"
    )
    assert "the messages before promised (float64[2, 17," in sender
    assert "dynamic_shapes=True" in sender
    # Where the receiver is when the sender leaves is up to the machine: in any wait for it.
    assert re.search(r"^rank 1, .*(Post|Recv) (x\(1,\d\)|sizes) from 0", receiver)
