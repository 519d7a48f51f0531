"""What `zbpp memory` predicts is what a real job holds, action by action."""

from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from helpers.configs import FREE_COPIES, SLOW_LINKS, composed
from helpers.memory_record import last_step_of
from helpers.processes import run_ranks
from zbpp.autograd.storages import bytes_of
from zbpp.features.activation_offload.activation_offload import offload_plan_of
from zbpp.features.experts import experts
from zbpp.prediction.predictor import Predictor
from zbpp.prediction.programs import step_programs
from zbpp.run import app
from zbpp.run.plan import build_timetable, costs_of, slice_bounds_of
from zbpp.run.stages import build_mesh, prepare_stages
from zbpp.run.trainer import Plan, build_pipeline, build_trainer
from zbpp.schedule import lower
from zbpp.schedule.passes.posts import in_flight

TINY = ["model.num_layers=4", "model.hidden_size=32", "num_microbatches=4", "microbatch_size=2"]
GPT = ["schedule=zb_h1", "model=gpt_tiny", *TINY]
RELEASED = [*GPT, "optimizer.clip_norm=null"]
LATER = ["optimizer.validation=after", "optimizer.clip_norm=null"]
AT_ONCE = "memory.head_at_once=true"
OFFLOAD = ["memory.offload=auto", FREE_COPIES]
CASES = {
    "1f1b": ["schedule=1f1b", "model=gpt_tiny", *TINY],
    "zb_h1": ["schedule=zb_h1", "model=llama_tiny", *TINY],
    "v_half": ["schedule=v_half", "model=llama_tiny", *TINY],
    "recompute": [*GPT, "memory.recompute=block"],
    "masters": ["schedule=zb_h1", "model=llama_tiny", "precision=mixed_bfloat16", *TINY],
    "head": [
        "schedule=zb_h1",
        "model=llama_tiny",
        "precision=mixed_bfloat16",
        *TINY,
        AT_ONCE,
        "model.vocab_size=2000",
    ],
    "head again": [
        "schedule=zb_h1",
        "model=llama_tiny",
        "precision=mixed_bfloat16",
        *TINY,
        "model.head=recompute",
        "model.vocab_size=2000",
    ],
    "release": [*RELEASED, "memory.gradient_release=step"],
    "accumulate": [*RELEASED, "optimizer=optimi_adamw", "memory.gradient_release=accumulate"],
    "weights": ["schedule=zb_v", "model=llama_tiny", *TINY, "memory.offload_weights=true"],
    "weights in 1f1b": [
        "schedule=1f1b",
        "model=gpt_tiny",
        *TINY,
        "model.num_layers=16",
        "microbatch_size=16",
        "memory.recompute=block",
        "memory.offload_weights=true",
    ],
    "offload": ["schedule=zb_v", "model=gpt_tiny", *TINY, "microbatch_size=16", *OFFLOAD],
    "validation": [*GPT, *LATER],
    "messages": [
        "schedule=zb_v",
        "model=gpt_tiny",
        *TINY,
        "parallel.messages=8bit",
        SLOW_LINKS,
    ],
    "slices": ["schedule=zb_h1", "model=llama_tiny", *TINY, "schedule.slices=[0,26,46,64]"],
    "slices again": [*GPT, "schedule.slices=[0,32,64]", "memory.recompute=block", AT_ONCE],
    # Every update is redone: no rank's gradients are within the norm.
    "redone": [*GPT, *LATER, "optimizer.clip_norm=1.0e-3"],
}
PEAKS = {"weights": 0.05}  # of W an upper bound is predicted; else .001
# Gradients of a slice's keys and values pass through buffers of their own, which are freed one by one.
PEAKS |= {"slices": 0.01, "slices again": 0.01}
CURVES = {"slices": 0.05, "slices again": 0.05}
UPPER_BOUNDS = ("offload", "redone")
AT_NIGHT = ("1f1b", "masters", "head again", "slices again", "weights in 1f1b")
# Each token goes to all experts: a prediction takes equal numbers of rows on all processes.
EXPERTS = [
    "schedule=zb_h1", "model=llama_tiny", *TINY, "model.experts=4", "model.experts_per_token=4",
    "parallel.expert=2",
]  # fmt: skip
IN_MESH = {
    "experts": [*EXPERTS, "parallel.replicate=2"],
    "mixed": [*EXPERTS, "parallel.replicate=2", "precision=mixed_bfloat16"],
    "shards": [*EXPERTS, "parallel.shard=2"],
    "mixed shards": [*EXPERTS, "parallel.shard=2", "precision=mixed_bfloat16"],
}
RANKS, STEPS = 2, 4
REPORTED = [
    f"parallel.num_processes={RANKS}", f"steps={STEPS}", "evaluate_every=0",
    "measure_every=0",
]  # fmt: skip


def trainer_of(rank, config):
    timetable = build_timetable(config.schedule, RANKS, config.num_microbatches)
    bounds = slice_bounds_of(config, timetable)
    plan = Plan(timetable, costs_of(config.schedule, timetable), slice_bounds=bounds)
    mesh = build_mesh(config.parallel, "cpu")
    parts = app.build_parts(config, timetable, rank if mesh is None else mesh.get_local_rank("pipeline"))
    parts = prepare_stages(config, parts, timetable, mesh, torch.device("cpu"))
    pipeline = build_pipeline(config, plan, parts.model, parts.stages, mesh)
    trainer = build_trainer(config, parts, plan, pipeline)
    trainer.num_recorded = 0
    return trainer


def report_of(rank, overrides):
    """(this rank's report, what left the device, the program of its steps)."""
    trainer = trainer_of(rank, composed(*overrides, *REPORTED))
    with trainer.pipeline as pipeline:
        return last_step_of(trainer, STEPS), offload_plan_of(pipeline), program_of(pipeline)


def program_of(pipeline):
    """The text of what a step of this rank runs, with the extras that the trainer has given it."""
    return str(pipeline._rank.executors["step"].program)


def all_reports(rank, names):
    return {name: report_of(rank, CASES[name]) for name in names}


@pytest.fixture(scope="module")
def measured():
    """What the ranks measure in the daily cases."""
    return run_ranks(all_reports, RANKS, [name for name in CASES if name not in AT_NIGHT], timeout=400.0)


@pytest.fixture(scope="module")
def measured_at_night():
    return run_ranks(all_reports, RANKS, AT_NIGHT, timeout=400.0)


def predicted(name, reports, plan):
    """The prediction for a case, with the plan of offload that its run came to."""
    config = composed(*CASES[name], *REPORTED)
    timetable = build_timetable(config.schedule, RANKS, config.num_microbatches)
    is_later = config.optimizer.validation == "after"
    assert [each.is_validated_later for each in reports] == [is_later] * RANKS
    stages, _ = Predictor().measure(config, timetable)
    return stages.predicted(step_programs(config, timetable, plan))


def levels_of(report):
    return [report.spans[0].before, *(each.after for each in report.spans)]


@pytest.mark.parametrize("name", [name for name in CASES if name not in {*AT_NIGHT, *UPPER_BOUNDS}])
def test_the_predicted_curve_is_the_measured_one(measured, name):
    assert_curves_are_predicted(measured, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", AT_NIGHT)
def test_more_predicted_curves_are_the_measured_ones(measured_at_night, name):
    assert_curves_are_predicted(measured_at_night, name)


def assert_curves_are_predicted(measured, name):
    """Within .1 % of the peak after every action, and for the peak itself: a few losses are not predicted.

    In slices within 5 % and 1 %.
    """
    reports, plans, _ = zip(*(found[name] for found in measured), strict=True)
    for rank, report in zip(predicted(name, reports, plans[0]), reports, strict=True):
        tolerance = CURVES.get(name, 0.001) * report.highest
        assert list(rank.totals) == pytest.approx(levels_of(report), abs=tolerance)
        assert max(rank.during) == pytest.approx(report.highest, rel=PEAKS.get(name, 0.001))


@pytest.mark.parametrize("name", [name for name in CASES if name not in AT_NIGHT])
def test_the_predicted_program_is_the_one_that_runs(measured, name):
    """Line by line, with the receives that a job on gloo starts ahead."""
    _, plans, programs = zip(*(found[name] for found in measured), strict=True)
    config = composed(*CASES[name], *REPORTED)
    timetable = build_timetable(config.schedule, RANKS, config.num_microbatches)
    found = [str(in_flight(each)) for each in step_programs(config, timetable, plans[0])]
    assert found == [*programs]


def test_with_offload_the_prediction_is_at_most_15_percent_too_high(measured):
    """And never too low: what passes between two stages of one rank is predicted to stay, and may leave."""
    reports, plans, _ = zip(*(found["offload"] for found in measured), strict=True)
    for rank, report in zip(predicted("offload", reports, plans[0]), reports, strict=True):
        above = [mine - found for mine, found in zip(rank.totals, levels_of(report), strict=True)]
        assert min(above) >= -0.001 * report.highest
        assert max(above) <= 0.15 * report.highest
        assert 0.999 * report.highest <= max(rank.during) <= 1.15 * report.highest


def test_where_updates_are_redone_the_run_holds_what_is_predicted_from_the_gate_on(measured):
    """And before the gate less: the pass that began again no longer holds the previous step's gradients."""
    reports, plans, _ = zip(*(found["redone"] for found in measured), strict=True)
    for rank, report in zip(predicted("redone", reports, plans[0]), reports, strict=True):
        tolerance, levels = 0.001 * report.highest, levels_of(report)
        assert (rank.totals >= [each - tolerance for each in levels]).all()
        assert list(rank.totals[-3:]) == pytest.approx(levels[-3:], abs=tolerance)
        assert max(rank.during) >= report.highest - tolerance


def test_activations_really_leave(measured):
    """Or else the case `offload` above would show nothing."""
    reports, plans, _ = zip(*(found["offload"] for found in measured), strict=True)
    assert all(plans[0])
    config = composed(*CASES["offload"], *REPORTED)
    timetable = build_timetable(config.schedule, RANKS, config.num_microbatches)
    without = Predictor().measure(config, timetable)[0].predicted(lower(timetable))
    assert all(found.highest < 0.9 * rank.peak for found, rank in zip(reports, without, strict=True))


def test_a_step_leaves_nothing_behind(measured):
    """Up to .1 % of the peak, as above."""
    reports = {
        (rank, name): report for rank, found in enumerate(measured) for name, (report, *_) in found.items()
    }
    left = {each: report.outliving / report.highest for each, report in reports.items()}
    assert {each: share for each, share in left.items() if share > 0.001} == {}


def report_in_mesh(rank, overrides):
    """(rank, report, at the end the bytes of weights, gradients and optimizer states, part, program)."""
    trainer = trainer_of(rank, composed(*overrides, *REPORTED))
    with trainer.pipeline as pipeline:
        report = last_step_of(trainer, STEPS)
        tensors = [
            [each for stage in pipeline.stages.values() for each in (*stage.parameters(), *stage.buffers())],
            [
                gradient
                for each in pipeline.parameters()
                if (gradient := getattr(each, "main_grad", each.grad)) is not None
            ],
            [*(() if trainer.masters is None else trainer.masters.parameters()), *states_of(trainer)],
        ]
        return (
            pipeline.rank,
            report,
            [*map(bytes_of, tensors)],
            pipeline.place.data_part,
            program_of(pipeline),
        )


def states_of(trainer):
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    return [each for each in states if isinstance(each, torch.Tensor)]


class Uncounted(experts.AllToAll):
    """Gives gloo copies that are not counted: its thread lets go of them only some ms after wait()."""

    def __call__(self, rows, send_counts, receive_counts):
        with _disable_current_modes():
            return Copied(super().__call__(rows.clone(), send_counts, receive_counts), rows)


class Copied:
    def __init__(self, pending, sent):
        self.is_done, self.pending, self.sent = pending.is_done, pending, sent

    def wait(self):
        return self.pending.wait().clone()


def all_in_mesh(rank, names):
    with patch.object(experts, "AllToAll", Uncounted):
        return {name: report_in_mesh(rank, IN_MESH[name]) for name in names}


@pytest.mark.parametrize(
    "names", [("experts", "mixed shards"), pytest.param(("mixed", "shards"), marks=pytest.mark.nightly)]
)
def test_bytes_of_spread_experts_are_those_of_a_process(names):
    """Within 1 % of what a process holds; without shards the whole curve, too."""
    everyone = run_ranks(all_in_mesh, 2 * RANKS, names, timeout=400.0)
    for name in names:
        assert_bytes_are_predicted([found[name] for found in everyone], name)


def assert_bytes_are_predicted(in_mesh, name):
    config = composed(*IN_MESH[name], *REPORTED)
    timetable = build_timetable(config.schedule, RANKS, config.num_microbatches)
    measured = Predictor().measure(config, timetable)[0]
    programs = step_programs(config, timetable)
    ranks = measured.predicted(programs)
    for rank, report, (weights, gradients, optimizer), part, program in in_mesh:
        assert str(in_flight(programs[rank])) == program
        stage = measured.stages[rank]
        assert stage.weights == pytest.approx(weights, rel=0.01)
        assert stage.optimizer == pytest.approx(optimizer, rel=0.01)
        if gradients:
            assert (stage.reduced or stage.gradients) == pytest.approx(gradients, rel=0.01)
        if "shards" not in name and part == 0:  # experts of other parts get other numbers of rows
            assert list(ranks[rank].totals) == pytest.approx(levels_of(report), abs=0.01 * report.highest)
            assert max(ranks[rank].during) == pytest.approx(report.highest, rel=0.01)
