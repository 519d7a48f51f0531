"""Planning anew in the middle of a run: no loss shows it, on two processes with dropout and batch norm."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.processes import open_things, run_ranks
from helpers.trainers import small_trainer
from zbpp import FewerBytes, Links, MessagesAhead, Pipeline, PlanError, lower, plan, simulate
from zbpp.benchmark.delayed_links import delayed_links
from zbpp.data import regression_data, text_data
from zbpp.features.post_validation.validation import validation_of
from zbpp.measure import link_times
from zbpp.models.emulated import Emulated
from zbpp.models.gpt import Gpt
from zbpp.planning import messages_ahead
from zbpp.training import replan
from zbpp.training.checkpoints import Checkpoints
from zbpp.training.leaving import StopAfter
from zbpp.training.measured_steps import figures_of
from zbpp.training.optim.optimizer import adamw
from zbpp.training.replan import Replan
from zbpp.training.trainer import Trainer

P, M, STEPS = 2, 4, 8
MEASURED = 2


class NormedGpt(Gpt):
    """Every stage also counts its microbatches."""

    def build_stage(self, index, num_stages):
        stage = super().build_stage(index, num_stages)
        return stage if index == num_stages - 1 else nn.Sequential(stage, nn.BatchNorm1d(8, affine=False))


def trainer_of(rank, corpus, started, planned, extras=(), **options):
    """A Trainer that begins with `started`; planned(costs, limits) is its replan, None for none."""
    torch.manual_seed(0)
    model = NormedGpt(num_layers=4, hidden_size=16, num_heads=2, sequence_length=8, dropout=0.1)
    timetable = plan(started, P, M)
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    more = {"loss_fn": model.loss, "stages": stages, "num_measured": MEASURED, **options}
    pipeline = Pipeline(stages, timetable, model.loss, seed=3, extras=extras)
    return Trainer(
        pipeline=pipeline,
        optimizer=adamw(
            pipeline.parameters(), learning_rate=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        ),
        data=text_data(path=corpus, sequence_length=8, vocab_size=256, batch_size=2 * M, seed=0),
        learning_rate=lambda step: 1.0,
        num_recorded=1,
        replan=None if planned is None else Replan(plan=planned, **more),
    )


def run(rank, corpus, started, planned):
    """Metrics by step, the orders it ran, the costs and limits it planned with, its whole state."""
    asked = []

    def spying(costs, limits):
        asked.append((costs, list(limits)))
        return plan(planned, P, M)

    trainer = trainer_of(rank, corpus, started, planned and spying)
    orders, history = [], []
    for metrics in trainer.run(STEPS):
        orders.append(str(trainer.pipeline.timetable))
        history.append(metrics)
    state = [each for stage in trainer.pipeline.stages.values() for each in stage.state_dict().values()]
    return history, orders, asked, [each.tolist() for each in state], len(trainer.timelines)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return str(path)


@pytest.fixture(scope="module")
def runs(corpus):
    """By what is planned anew, each rank's run."""
    return {planned: run_ranks(run, P, corpus, "zb_h1", planned) for planned in (None, "1f1b", "zb_h1")}


@pytest.mark.parametrize("planned", ["1f1b", "zb_h1"])
def test_losses_weights_and_buffers_are_those_of_a_run_that_never_changed_its_plan(runs, planned):
    for (history, *_, state, _), (plain, *_, plain_state, _) in zip(runs[planned], runs[None], strict=True):
        assert [each["loss"] for each in history] == [each["loss"] for each in plain]
        assert [each["grad_norm"] for each in history] == [each["grad_norm"] for each in plain]
        assert state == plain_state
    assert len({each["loss"] for each in runs[None][0][0]}) == STEPS


def test_the_new_plan_runs_from_the_step_after_the_measured_ones(runs):
    for _, orders, _, _, num_timelines in runs["1f1b"]:
        assert num_timelines == MEASURED + 1  # those of the old plan are dropped
        # What is seen is the plan of the NEXT step: the first and two measured ones are zb_h1's.
        assert orders == [str(plan("zb_h1", P, M))] * 2 + [str(plan("1f1b", P, M))] * 6


def test_it_is_planned_once_on_rank_0_for_measured_costs_and_what_the_first_plan_holds(runs):
    (_, _, asked, *_), (_, _, elsewhere, *_) = runs["1f1b"]
    assert elsewhere == []
    ((costs, limits),) = asked
    assert [len(getattr(costs, name)) for name in ("f", "b", "w", "bw", "comm", "saved", "deferred")] == [
        P
    ] * 7
    assert min(*costs.f, *costs.b, *costs.w, *costs.saved, *costs.deferred) > 0
    assert limits == list(simulate(plan("zb_h1", P, M), costs).peak_memory)


def test_what_is_expected_and_what_came_of_it_is_logged(runs):
    for history, *_ in runs["1f1b"]:
        told = {each["step"]: each for each in history if "expected_makespan_ms" in each}
        assert sorted(told) == [MEASURED + 1, 2 * MEASURED + 2]
        first, second = told.values()
        assert first["expected_makespan_ms"] == second["expected_makespan_ms"] > 0
        assert first["measured_makespan_ms"] != second["measured_makespan_ms"]


def replanned_again_and_again(rank, corpus):
    """After each of four changes of plan: open groups, open files."""
    trainer = trainer_of(rank, corpus, "zb_h1", None)
    model = NormedGpt(num_layers=4, hidden_size=16, num_heads=2, sequence_length=8)
    stages, found = trainer.pipeline.stages, []
    for name in ("1f1b", "zb_h1", "1f1b", "zb_h1"):
        trainer.timelines.clear()
        trainer.replan = Replan(
            plan=lambda costs, limits, name=name: plan(name, P, M),
            loss_fn=model.loss,
            stages=stages,
            num_measured=1,
        )
        assert len(list(trainer.run(trainer.next_step + 4))) == 4
        assert str(trainer.pipeline.timetable) == str(plan(name, P, M))
        found.append(open_things())
    dist.barrier()  # a rank that ends takes the other's sockets with it
    return found


def test_changes_of_plan_leave_neither_groups_nor_files_open(corpus):
    for found in run_ranks(replanned_again_and_again, P, corpus):
        assert found == found[:1] * 4
        assert found[0][0] == 1 + 2  # the job's, and a link in each direction


def refused(rank, corpus):
    def refuse(costs, limits):
        raise PlanError(f"{limits} can't hold one microbatch")

    trainer = trainer_of(rank, corpus, "1f1b", refuse, memory_limits=[7.0] * P)
    with pytest.raises(PlanError, match=r"\[7.0, 7.0\] can't hold one microbatch"):
        list(trainer.run(STEPS))
    return trainer.pipeline.num_steps


def test_a_limit_that_holds_no_plan_ends_the_run_on_all_ranks(corpus):
    assert run_ranks(refused, P, corpus) == [MEASURED + 1] * P


def left_and_continued(rank, corpus, folder):
    """(losses without a stop, losses of two starts, plan and measurements of the second start)."""

    def better(costs, limits):
        return plan("zb_h1", P, M)

    whole = [each["loss"] for each in trainer_of(rank, corpus, "1f1b", better).run(STEPS)]
    found = []
    for _ in range(2):
        ahead = MessagesAhead(0)
        trainer = trainer_of(rank, corpus, "1f1b", better, [ahead], ahead=ahead)
        saving = Checkpoints(folder, every=100, keep=1, background=True, config={})
        trainer.callbacks = [saving, StopAfter(MEASURED + 2)]
        if found:
            saving.resume(trainer, folder, STEPS)
            assert trainer.is_replanned
            assert ahead.number == 3
        with patch.object(replan, "messages_ahead", lambda timetable, costs: 3):
            rows = list(trainer.run(STEPS))
        found += [each["loss"] for each in rows]
    measured = [each for each in rows if "measured_makespan_ms" in each]
    return whole[: len(found)], found, str(trainer.pipeline.timetable), measured


def test_a_run_that_goes_on_keeps_the_plan_that_was_made_for_its_costs(corpus, tmp_path):
    for whole, found, timetable, measured in run_ranks(left_and_continued, P, corpus, tmp_path):
        assert found == whole
        assert timetable == str(plan("zb_h1", P, M))
        assert measured == []


def test_a_replanner_with_nothing_left_to_do_finishes_no_more_updates_early():
    """Every step of the run waited for the verdict on its own update."""
    trainer = small_trainer("zb_v", post_validation=True, num_recorded=1, clip_norm=1e9)
    stages = dict(trainer.pipeline.stages)
    trainer.replan = Replan(
        plan=lambda costs, limits: plan("zb_v", 1, trainer.pipeline.timetable.num_microbatches),
        loss_fn=trainer.pipeline._loss_fn,
        stages=stages,
        num_measured=1,
    )
    pending = [validation_of(trainer.pipeline).pending is not None for _ in trainer.run(20)]
    assert trainer.replan.is_over
    assert any(pending[12:-1])


SLOW, STAGE_MS = {(0, 1): (90.0, 20.0), (1, 0): (40.0, 20.0)}, 50.0


def over_links(rank, pairs, extras):
    """What was asked for with links so slow: the costs; and losses, makespans, the sizes of a message."""
    asked = []

    def searched(costs, limits):
        asked.append(costs)
        return plan("zb_auto", P, 2, costs=costs, memory_limit=list(limits), time_limit=0.5)

    model = Emulated(num_layers=2, f=STAGE_MS, b=STAGE_MS, w=STAGE_MS)
    timetable = plan("1f1b", P, 2)
    stages = {rank: model.build_stage(rank, P)}
    share = 0.3  # so that no noise of a busy machine counts as a slow link
    with delayed_links(Links(pairs=pairs), nbytes=2**16), patch.object(link_times, "NEGLIGIBLE", share):
        ahead = MessagesAhead(0)
        pipeline = Pipeline(stages, timetable, model.loss, extras=[*extras, ahead])
        rates = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        trainer = Trainer(
            pipeline=pipeline,
            optimizer=adamw(pipeline.parameters(), learning_rate=0.01, **rates),
            data=regression_data(in_features=8, out_features=8, batch_size=4, seed=0),
            learning_rate=lambda step: 1.0,
            num_recorded=1,
            replan=Replan(plan=searched, loss_fn=model.loss, stages=stages, num_measured=1, ahead=ahead),
        )
        history = list(trainer.run(3))
        held = pipeline._rank.executors["step"].program.in_flight
        pipeline.close()
    planned = lower(pipeline.timetable)[rank].in_flight
    assert held == {peer: number + ahead.number for peer, number in planned.items()}
    if asked:
        assert ahead.number == messages_ahead(pipeline.timetable, asked[0])
    assert trainer.links == (asked[0].links if asked else figures_of(trainer).costs.links)
    return asked, [each["loss"] for each in history], history[1]["expected_makespan_ms"], ahead.number


@pytest.mark.nightly
def test_links_are_measured_and_slow_ones_are_in_the_costs_of_the_new_plan():
    """Fast ones leave the costs as they are, and no bit of a loss depends on either."""
    fast, slow, rounded = (
        run_ranks(over_links, P, *each) for each in (({}, ()), (SLOW, ()), (SLOW, (FewerBytes("8bit"),)))
    )
    ((unchanged,), losses, _, no_more), _ = fast
    assert unchanged.links is None
    ((costs,), with_slow, expected, more), (nothing, _, elsewhere, same) = slow
    assert no_more == 0 < more == same
    assert with_slow == losses
    assert nothing == []
    assert costs.comm == [0.0] * P
    for pair, (latency, busy) in SLOW.items():
        found_latency, per_byte = costs.links.pairs[pair]
        assert 0.5 < found_latency / latency < 2
        assert 0.5 < per_byte * 2**16 / busy < 2
    assert expected == elsewhere >= max(latency for latency, _ in SLOW.values()) + 4 * STAGE_MS
    # Two rows of eight numbers, in float32, and in 8 bits with a scale a row.
    assert (costs.links.x, costs.links.g) == (64, 64)
    coded = rounded[0][0][0].links
    assert (coded.x, coded.g) == (16 + 8, 16 + 8)
