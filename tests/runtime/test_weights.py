"""Every target of a step weighs the same, however the targets are spread over microbatches and replicas.

The reference is plain autograd on one process: one batch, one mean over its targets.
"""

import functools
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from helpers.split import assert_close
from helpers.tensors import drawn
from zbpp import Pipeline, clip_grad_norm_, make_mesh, plan
from zbpp.models.llama import Llama
from zbpp.runtime import BoundaryError, CommunicationError
from zbpp.stage_api import IGNORED, mean_over, mean_over_tokens

WORDS, SIZE, TIME = 7, 6, 5
COUNTS = [[4, 4, 22, 22], [1, 30, 0, 9], [6, 6, 6, 6]]
"""Targets in each of four pairs of rows with 5 tokens, of which 0 to 10 are counted; larger ones take 10."""


def batch(counts, seed=0):
    """Eight rows; the number of labels that are not -100 is drawn by `counts` for each quarter."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (8, TIME), generator=generator)
    labels = torch.randint(0, WORDS, (8, TIME), generator=generator)
    for quarter, count in zip(labels.view(4, -1), counts, strict=True):
        quarter[min(count, 10) :] = IGNORED
    return tokens, labels


def stages(num_stages=2):
    torch.manual_seed(1)
    whole = [nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, WORDS)]
    whole = [each.double() for each in whole]
    return {0: nn.Sequential(*whole)} if num_stages == 1 else dict(enumerate(_halves(whole)))


def _halves(layers):
    return nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])


def entropies(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none")


@mean_over_tokens
def mean(output, target):
    return entropies(output, target).sum() / (target != IGNORED).sum().clamp(min=1)


@mean_over_tokens
def sum_and_count(output, target):
    return entropies(output, target).sum(), (target != IGNORED).sum()


@mean_over_tokens
def named(output, target):
    loss = mean(output, target)
    return {"entropy": 0.75 * loss, "more": 0.25 * loss}


@mean_over(lambda target: (target[0] != IGNORED).sum())
def mean_of_nested(output, target):
    return mean(output, target[0])


LOSSES = [mean, sum_and_count, named, mean_of_nested, functools.partial(mean)]


def plain(batches):
    """(loss, gradients) of one mean over all targets."""
    (module,) = stages(1).values()
    tokens, labels = (torch.cat(each) for each in zip(*batches, strict=True))
    loss = entropies(module(tokens), labels).sum() / (labels != IGNORED).sum()
    loss.backward()
    return loss.item(), [p.grad for p in module.parameters()]


def piped(loss_fn, timetable, given, rank=0, mesh=None):
    made = stages(timetable.num_stages)
    mine = {index: made[index] for index in timetable.stages_of(rank)}
    tokens, labels = given
    target = (labels, labels) if loss_fn is mean_of_nested else labels
    with Pipeline(mine, timetable, loss_fn, mesh=mesh) as pipeline:
        losses = pipeline.step(tokens, target=target)
        evaluated = pipeline.evaluate(tokens, target=target)
        assert evaluated == losses or mesh is not None
        return [float(each) for each in losses], [p.grad for p in pipeline.parameters()]


def assert_equals(found, expected):
    (losses, grads), (loss, wanted) = found, expected
    assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-12)
    assert_close(dict(enumerate(grads)), dict(enumerate(wanted)))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("chosen", ["zb_v 1", "zb_v 4", "gpipe 2", "gpipe 8"])
def test_a_step_equals_one_batch_whatever_the_split(counts, loss_fn, chosen):
    schedule, num_microbatches = chosen.split()
    given = batch(counts)
    assert_equals(piped(loss_fn, plan(schedule, 1, int(num_microbatches)), given), plain([given]))


def of_replica(rank, loss_fn_number, schedule):
    mesh, timetable = make_mesh(replicate=2), plan(schedule, 2, 4)
    part, place = rank % 2, rank // 2
    return piped(LOSSES[loss_fn_number], timetable, batch(COUNTS[part], seed=part), place, mesh)


@pytest.mark.parametrize("number", [0, 1])
def test_replicas_with_other_numbers_of_targets_equal_one_batch(number):
    """Two pipelines of two ranks."""
    results = run_ranks(of_replica, 4, number, "zb_h1")
    losses = [loss for found, _ in results for loss in found]
    expected = plain([batch(COUNTS[part], seed=part) for part in range(2)])
    for part in range(2):
        assert_equals((losses, results[part][1] + results[2 + part][1]), expected)


def with_a_bad_target(rank):
    """What this replica was told, and after how many seconds."""
    tokens, labels = batch(COUNTS[0])
    pipeline = Pipeline(stages(), plan("zb_v", 1, 4), mean, mesh=make_mesh(replicate=2), timeout=90.0)
    start = time.monotonic()
    with pytest.raises((ValueError, CommunicationError)) as told:
        pipeline.step(tokens, target=labels.double() if rank else labels)
    return str(told.value), time.monotonic() - start


def test_a_replica_whose_target_is_refused_lets_no_other_one_wait():
    (waiting, seconds), (refused, _) = run_ranks(with_a_bad_target, 2)
    assert "mean_over_tokens counts a tensor of whole numbers" in refused
    assert waiting.startswith("rank 0, summing the numbers of targets over replicate: ")
    assert seconds < 45


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_loss_and_norm_of_a_language_model_do_not_depend_on_the_number_of_microbatches(num_microbatches):
    sizes = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
    model = Llama(vocab_size=WORDS, sequence_length=TIME, **sizes)
    tokens, labels = batch(COUNTS[0])
    whole = model.build_stage(0, 1).double()
    plain_loss = F.cross_entropy(whole(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    plain_loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    mine = {i: model.build_stage(i, 2).double() for i in range(2)}
    pipeline = Pipeline(mine, plan("zb_v", 1, num_microbatches), model.loss)
    losses = pipeline.step(tokens, target=labels)
    assert sum(losses).item() / len(losses) == pytest.approx(plain_loss.item(), rel=1e-12)
    assert float(clip_grad_norm_(pipeline, 1e9)) == pytest.approx(float(expected), rel=1e-12)


def test_a_microbatch_without_targets_has_a_loss_of_zero():
    """cross_entropy's mean over no target is NaN; such a microbatch adds nothing to the step's loss."""
    given = batch([10, 0, 3, 7])

    @mean_over_tokens
    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    losses, grads = piped(loss_fn, plan("zb_h1", 1, 4), given)
    assert losses[1] == 0
    assert_equals((losses, grads), plain([given]))


def test_without_a_mark_each_microbatch_weighs_the_same():
    def unmarked(output, target):
        return mean(output, target)

    given = batch(COUNTS[0])
    losses, _ = piped(unmarked, plan("zb_v", 1, 4), given)
    own = [plain([part])[0] for part in zip(*(each.split(2) for each in given), strict=True)]
    assert losses == pytest.approx(own, rel=1e-12)


@mean_over_tokens
def wrong_count(output, target):
    return entropies(output, target).sum(), target.numel()


@mean_over_tokens
def of_floats(output, target):
    return F.mse_loss(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "target", "words"),
    [
        (lambda output, target: (output.sum(), 3), batch(COUNTS[0])[1], "mean_over_tokens"),
        (wrong_count, batch(COUNTS[0])[1], "over 10 targets, and microbatch 0 has 4"),
        (of_floats, drawn(8, TIME, WORDS, seed=1), "mean_over\\(count\\)"),
        (lambda output, target: output, batch(COUNTS[0])[1], "scalar tensor.*float64\\[2, 5, 7\\].*mean"),
    ],
)
def test_what_can_not_be_counted_is_refused_in_a_line(loss_fn, target, words):
    with pytest.raises(ValueError, match=words) as caught:
        Pipeline(stages(), plan("zb_v", 1, 4), loss_fn).step(batch(COUNTS[0])[0], target=target)
    assert loss_fn is of_floats or isinstance(caught.value, BoundaryError)
