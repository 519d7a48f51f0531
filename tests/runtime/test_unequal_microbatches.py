"""Microbatches of different lengths, some of them empty, in any order, under any timetable.

The reference is plain autograd on one process: one microbatch after another, one mean over all targets.
"""

import random
from contextlib import suppress
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import assert_close
from helpers.timetables import random_order, random_placement
from zbpp import Pipeline, PlanError, Timetable, make_mesh, per_microbatch, plan
from zbpp.planning import SCHEDULES
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


def at_the_peak(rank):
    """(bytes live at the peak of a step over those before it, of the plan's costs) in steps of any lengths."""
    pipeline = pipeline_on(rank, "1f1b", 4, 16)
    found = []
    for number in range(4):
        rng = random.Random(number)
        lengths = [rng.randint(1, 4000) for _ in range(16)]
        live = live_bytes(lambda lengths=lengths: step_of_lengths(pipeline, lengths), CPU)
        found.append((lengths, live.highest))
    return found
