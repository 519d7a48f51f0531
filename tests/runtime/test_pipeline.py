"""Pipeline.step and evaluate on real processes, against one process with plain autograd.

The model is four layers of float64 [rows, 6]; the cut is the timetable's. What a rank does is a
module-level function, so that another process can import it.
"""

import random
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.processes import outcomes, run_ranks
from helpers.tensors import drawn
from helpers.timetables import random_timetable
from zbpp import Pipeline, Timetable, plan, replicate
from zbpp.runtime import CommunicationError
from zbpp.runtime.rank import METHODS

SIZE, ROWS, NUM_LAYERS = 6, 8, 4
ONE_PER_RANK = ["gpipe", "1f1b", "zb_h1", "zb_h2"]


class Layer(nn.Module):
    """tanh(linear(x) * scale + offset), then dropout: everything that a keyword may reach."""

    def __init__(self, number, dropout=0.0):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        with torch.no_grad():
            self.linear.weight.copy_(drawn(SIZE, SIZE, seed=number))
            self.linear.bias.copy_(drawn(SIZE, seed=100 + number))

    def forward(self, x, scale=1.0, offset=0.0, power=1):
        return self.dropout(torch.tanh(self.linear(x) * scale + offset)) ** power


class Stage(nn.Module):
    """Some of the layers; names carry the layer's global number."""

    def __init__(self, numbers, dropout=0.0):
        super().__init__()
        for number in numbers:
            self.add_module(f"layer_{number}", Layer(number, dropout))

    def forward(self, x, **keywords):
        for layer in self.children():
            x = layer(x, **keywords)
        return x


def stages_for(timetable, rank, dropout=0.0):
    bounds = [NUM_LAYERS * s // timetable.num_stages for s in range(timetable.num_stages + 1)]
    return {s: Stage(range(bounds[s], bounds[s + 1]), dropout) for s in timetable.stages_of(rank)}


def batch(step=0, rows=ROWS):
    return drawn(rows, SIZE, seed=1000 + step), drawn(rows, SIZE, seed=2000 + step)


def gradients(stages):
    return {
        name: p.grad.clone()
        for stage in stages.values()
        for name, p in stage.named_parameters()
        if p.grad is not None
    }


def merged(results):
    return {name: value for each in results for name, value in each.items()}


def piped(rank, timetable, keywords=None, dropout=0.0, num_steps=1, seed=0):
    """(losses of every step, gradients summed over the steps) of this rank."""
    stages = stages_for(timetable, rank, dropout)
    pipeline = Pipeline(stages, timetable, F.mse_loss, seed=seed)
    losses = []
    for step in range(num_steps):
        x, target = batch(step)
        losses.append([loss.item() for loss in pipeline.step(x, target=target, **(keywords or {}))])
    return losses, gradients(stages)


def plain(keywords=None, num_layers=NUM_LAYERS):
    """Gradients of ONE batch with a mean loss, no microbatches."""
    module = Stage(range(num_layers))
    x, target = batch()
    F.mse_loss(module(x, **(keywords or {})), target).backward()
    return gradients({0: module})


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-13 * largest, msg=name)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---------------------------------------------------------------- what a step computes


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_gradients_are_the_mean_over_microbatches_as_of_one_batch_with_a_mean_loss(num_microbatches):
    (losses,), found = piped(0, plan("zb_h1", 1, num_microbatches))
    assert len(losses) == num_microbatches
    x, target = batch()
    assert sum(losses) / len(losses) == pytest.approx(
        F.mse_loss(Stage(range(4))(x), target).item(), rel=1e-14
    )
    assert_close(found, plain())


KEYWORDS = {"scale": drawn(ROWS, 1, seed=7), "power": 3}
OFFSET = drawn(SIZE, seed=8)


def piped_with_keywords(rank, timetable):
    return piped(rank, timetable, {**KEYWORDS, "offset": replicate(OFFSET)})


def test_keywords_reach_every_stage_split_replicated_or_as_they_are():
    results = run_ranks(piped_with_keywords, 2, plan("zb_v", 2, 4))
    found = merged(grads for _, grads in results)
    assert_close(found, plain({**KEYWORDS, "offset": OFFSET}))


def delayed(method, rng):
    """A method of StageWorker that begins 0 to 3 ms late."""

    def late(worker, microbatch, message=()):
        time.sleep(rng.uniform(0, 0.003))
        return method(worker, microbatch, message)

    return late


def run_timetables(rank, texts, seed):
    rng = random.Random(100 * seed + rank)
    methods = {op: delayed(method, rng) for op, method in METHODS["step"].items()}
    with mock.patch.dict(METHODS, {"step": methods}):
        return [piped(rank, Timetable.parse(text)) for text in texts]


def test_any_timetable_and_placement_gives_the_same_bits(first_seed):
    """Random ones, of 3 ranks and 4 or fewer stages (a stage has a layer), on real processes.

    Each action begins with a random delay, so messages arrive in other orders than without.
    """
    rng, timetables = random.Random(first_seed), []
    while len(timetables) < 12:
        timetable = random_timetable(rng)
        fits = timetable.num_ranks == 3 and timetable.num_stages <= NUM_LAYERS
        if fits and timetable.num_microbatches in (1, 2, 4):
            timetables.append(timetable)
    results = run_ranks(run_timetables, 3, [str(timetable) for timetable in timetables], first_seed)
    for number, timetable in enumerate(timetables):
        expected_losses, expected = piped(0, plan("gpipe", 1, timetable.num_microbatches))
        losses = [rank[number][0] for rank in results if rank[number][0] != [[]]]
        assert losses == [expected_losses], str(timetable)
        assert_equal(merged(rank[number][1] for rank in results), expected)


def in_a_subgroup(rank, timetable):
    """Of three processes the last two are the pipeline."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return {}
    stages = stages_for(timetable, rank - 1)
    x, target = batch()
    Pipeline(stages, timetable, F.mse_loss, group).step(x, target=target)
    return gradients(stages)


def test_a_pipeline_may_be_a_part_of_the_job():
    assert_close(merged(run_ranks(in_a_subgroup, 3, plan("zb_h1", 2, 4))), plain())


# ---------------------------------------------------------------- random numbers


def test_dropout_is_the_same_under_every_schedule_of_one_cut():
    expected_losses, expected = None, None
    for schedule in ONE_PER_RANK:
        results = run_ranks(piped, 2, plan(schedule, 2, 4), None, 0.5, 2)
        losses, grads = results[1][0], merged(grads for _, grads in results)
        expected_losses, expected = expected_losses or losses, expected or grads
        assert losses == expected_losses
        assert_equal(grads, expected)


def test_dropout_depends_on_seed_step_stage_and_microbatch():
    same_rows = torch.ones(ROWS, SIZE, dtype=torch.float64)
    timetable = plan("zb_v", 1, 4)
    masks = []

    class Watched(nn.Dropout):
        def forward(self, x, **_):
            y = super().forward(x)
            masks.append(tuple((y != 0).flatten().tolist()))
            return torch.ones_like(y).requires_grad_()

    def run(seed):
        pipeline = Pipeline({0: Watched(), 1: Watched()}, timetable, F.mse_loss, seed=seed)
        for _ in range(2):
            pipeline.step(same_rows, target=same_rows)
        return [masks.pop() for _ in list(masks)]

    first, again, other = run(0), run(0), run(1)
    assert first == again
    assert len({*first, *other}) == 2 * (2 * 2 * 4)  # every mask is another one


# ---------------------------------------------------------------- evaluation


def step_and_evaluate(rank, timetable, evaluates):
    """Two steps, with evaluations of other shapes before, between and after, or without any."""
    stages = stages_for(timetable, rank, dropout=0.5)
    next(iter(stages.values())).eval()  # a mixed state, to be restored as it was
    pipeline = Pipeline(stages, timetable, F.mse_loss)
    modes = [module.training for stage in stages.values() for module in stage.modules()]
    evaluated, losses = [], []
    for step in range(3):
        if evaluates:
            rows, before = 4 * (step + 1), gradients(stages)
            x, target = batch(10 + step, rows)
            evaluated.append([loss.item() for loss in pipeline.evaluate(x, target=target)])
            assert_equal(gradients(stages), before)
            assert modes == [module.training for stage in stages.values() for module in stage.modules()]
        if step < 2:
            x, target = batch(step)
            losses.append([loss.item() for loss in pipeline.step(x, target=target)])
    return evaluated, losses, gradients(stages)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_evaluation_of_any_shape_leaves_training_as_it_was(schedule):
    timetable = plan(schedule, 2, 4)
    owner = timetable.rank_of[-1]
    with_it = run_ranks(step_and_evaluate, 2, timetable, True)
    without = run_ranks(step_and_evaluate, 2, timetable, False)
    for (_, losses, grads), (_, expected_losses, expected) in zip(with_it, without, strict=True):
        assert losses == expected_losses
        assert_equal(grads, expected)
    module = Stage(range(NUM_LAYERS), dropout=0.5).eval()
    for step, losses in enumerate(with_it[owner][0]):
        x, target = batch(10 + step, 4 * (step + 1))
        expected_losses = [
            F.mse_loss(module(a), b).item() for a, b in zip(x.chunk(4), target.chunk(4), strict=True)
        ]
        assert losses == pytest.approx(expected_losses, rel=1e-13)


# ---------------------------------------------------------------- what is refused


def failures(function, num_ranks, *args):
    """The last line of each rank's error; all of them must fail."""
    results = outcomes(function, num_ranks, *args)
    assert [succeeded for succeeded, _ in results] == [False] * num_ranks
    note = re.compile(r"in \d+(F|B|W|BW)\d+ ")  # follows an error: where the rank was
    of_ranks = [text.strip().splitlines() for _, text in results]
    return [[line for line in lines if not note.match(line)][-1] for lines in of_ranks]


def build_wrongly(rank):
    """What is said on this rank of three about each wrong pipeline."""
    said, three = [], plan("1f1b", 3, 4)
    wrong = {0: stages_for(three, 1)[1]} if rank == 1 else stages_for(three, rank)
    other = plan("zb_h1" if rank == 2 else "1f1b", 3, 4)
    alone, four = plan("zb_h1", 1, 4), plan("1f1b", 4, 4)
    for stages, timetable in (
        (wrong, three),
        (stages_for(other, rank), other),
        (stages_for(alone, 0), alone),
        (stages_for(four, rank), four),
    ):
        with pytest.raises(Exception, match="rank") as caught:
            Pipeline(stages, timetable, F.mse_loss, dist.group.WORLD)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_stages_timetables_and_groups_that_do_not_fit_are_an_error_on_every_rank():
    first, *others = run_ranks(build_wrongly, 3)
    assert others == [first, first]
    stages, timetables, alone, four = first
    assert stages == "ValueError: rank 1 owns stages [1] of this timetable, got modules for [0]"
    assert " on rank 0, 1; " in timetables
    assert timetables.startswith("AgreementError: ")
    assert timetables.endswith(" on rank 2")
    assert alone == "ValueError: the timetable is for 1 ranks, the process group has 3"
    assert four == "ValueError: the timetable is for 4 ranks, the process group has 3"


def test_more_ranks_than_one_need_a_process_group():
    timetable = plan("1f1b", 2, 4)
    stages = stages_for(timetable, 0)
    with pytest.raises(ValueError, match="for 2 ranks, but there is no process group: start the job with t"):
        Pipeline(stages, timetable, F.mse_loss)


def step_with_misfits(rank):
    timetable = plan("1f1b", 2, 4)
    module = nn.Linear(SIZE, SIZE + 1).double() if rank == 0 else nn.Linear(SIZE + 2, 1).double()
    x, target = batch()
    Pipeline({rank: module}, timetable, F.mse_loss).step(x, target=target)


def test_stages_that_do_not_chain_are_named_with_their_shapes():
    lines = failures(step_with_misfits, 2)
    assert lines[1] == "the forward was given what stage 0 returned, (float64[2, 7])"
    assert lines[0].startswith("zbpp.job.errors.CommunicationError: rank 0, instruction ")


class Sleeper(Stage):
    def forward(self, x):
        time.sleep(4.0)
        return super().forward(x)


def step_with_a_sleeper(rank):
    timetable = plan("zb_h1", 2, 4)
    stages = {1: Sleeper(range(2, 4))} if rank == 1 else stages_for(timetable, rank)
    x, target = batch()
    Pipeline(stages, timetable, F.mse_loss, timeout=2.0).step(x, target=target)


def test_a_wait_past_its_timeout_names_rank_step_value_and_peer():
    line = failures(step_with_a_sleeper, 2)[0]
    # rank 0's program: Post 0F0 Send 0F1 Send Post Recv ...
    assert line.startswith(
        "zbpp.job.errors.CommunicationError: rank 0, instruction 6 of its program (Recv g(0,0) from 1): "
    )
    assert "imed out" in line or "imeout" in line


@pytest.mark.parametrize(
    ("args", "keywords", "message"),
    [
        ((), {"target": drawn(8, SIZE)}, "this rank owns stage 0: pass the batch's inputs"),
        ((drawn(8, SIZE),), {}, "the last stage needs target="),
        (
            (drawn(7, SIZE),),
            {"target": drawn(7, SIZE)},
            "argument 0 has 7 rows, which don't split into num_m",
        ),
        ((drawn(8, SIZE),), {"target": drawn(6, SIZE)}, "target has 6 rows"),
        ((drawn(8, SIZE),), {"target": drawn(8, SIZE), "scale": drawn(3, 1)}, "scale has 3 rows"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_words(args, keywords, message):
    timetable = plan("1f1b", 1, 4)
    pipeline = Pipeline(stages_for(timetable, 0), timetable, F.mse_loss)
    with pytest.raises(ValueError, match=message):
        pipeline.step(*args, **keywords)


class Compiles:
    """A forward that is slow the first time, as that of a compiled stage is."""

    compiles = True

    def __init__(self, forward, *seconds):
        self.forward, self.seconds = forward, iter(seconds)

    def __call__(self, x):
        time.sleep(next(self.seconds, 0.0))
        return self.forward(x)


def steps_of_a_stage_that_compiles(rank, *seconds):
    """Two steps; what they say, and how long ranks waited at most in each."""
    timetable = plan("1f1b", 2, 1)
    stages = stages_for(timetable, rank)
    if rank == 1:
        stages[1].forward = Compiles(stages[1].forward, *seconds)
    pipeline = Pipeline(stages, timetable, F.mse_loss, timeout=2.0)
    x, target = batch()
    found = []
    for _ in range(2):
        try:
            pipeline.step(x, target=target)
            found.append((pipeline._rank.wait_limit, ""))
        except CommunicationError as error:
            found.append((pipeline._rank.wait_limit, str(error)))
            break
    return found


def test_ranks_wait_longer_for_a_step_that_compiles_and_not_for_the_next():
    first, second = run_ranks(steps_of_a_stage_that_compiles, 2, 4.0, 4.0, fresh=True)[0]
    assert first == (1800.0, "")
    assert second[0] == 2.0
    assert "Recv g(0,0) from 1" in second[1]
