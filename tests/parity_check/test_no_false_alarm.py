"""zbpp.parity finds nothing to complain about in right trainers: zbpp's Pipeline, torch's Schedules, a loop.

More random pipelines, other ones in each run:

    ZBPP_CASES=100 python -m pytest -n 0 --free-seeds tests/parity_check/test_no_false_alarm.py
"""

import functools
import os
import traceback

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from torch import nn
from torch.distributed import pipelining

import zbpp
from helpers.drawn_cases import cases
from helpers.drawn_models import Model, build_stages, recompute_marked
from helpers.hand_written import MICROBATCHES, HandWritten, Whole, loss_fn, tokens
from helpers.processes import run_ranks
from helpers.split import float64
from zbpp import torch_pipelining
from zbpp.autograd import recompute
from zbpp.stage_api import IGNORED, mean_over, mean_over_tokens, num_tokens

SGD = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
ADAMW = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
limit = pytest.mark.timeout(0 if "ZBPP_CASES" in os.environ else 240)


class Chain(nn.Module):
    """The stages of a drawn case as one module."""

    def __init__(self, case):
        super().__init__()
        self.stages = nn.ModuleList(build_stages(case.layers, case.boundaries, is_plain=True))

    def forward(self, *values):
        for stage in self.stages:
            values = stage(*values)
            values = values if isinstance(values, tuple) else (values,)
        return values[0]


def report_of_pipeline(rank, case):
    with float64():
        model = Model(case, is_plain=False)
        loss = model.loss
        timetable = case.timetable()
        part = rank % case.num_parts
        model.keep(timetable.stages_of(rank // case.num_parts))
        recompute_marked(model.stages.values())
        for stage in model.stages.values():
            if "recompute" in case.switches:
                recompute(stage)
        x, target, _ = model.batch(0, part)
        try:
            pipeline = zbpp.Pipeline(
                model.stages,
                timetable,
                model.loss,
                mesh=zbpp.make_mesh(**{case.parallel: 2}) if case.parallel else None,
                timeout=20,
            )
        except ValueError as error:
            return f"refused: {error}"
        with pipeline:
            report = zbpp.parity(
                lambda batch: pipeline.step(batch[0], target=batch[1]),
                pipeline,
                whole=lambda: Chain(case),
                batch=(x, target),
                loss_fn=loss,
                names=lambda stage, name: f"stages.{stage}.{name}",
                optimizer=SGD if case.optimizer == "sgd" else ADAMW,
                clip=0.05,
                evaluate=lambda batch: pipeline.evaluate(batch[0], target=batch[1]),
            )
        return "" if report.is_equal else str(report)


def text_of_pipeline(rank, case):
    try:
        return report_of_pipeline(rank, case)
    except Exception:
        return traceback.format_exc()


def judge(texts):
    assume(not all(text.startswith("refused") for text in texts))
    assert texts == [""] * len(texts), texts[0]


def plainer(case):
    """Without what the loop around the step does."""
    kept = tuple(each for each in case.switches if each == "recompute")
    return case._replace(update="clip", weights="", compiled="", switches=kept)


def draws(number):
    return settings(
        max_examples=int(os.environ.get("ZBPP_CASES", number)), suppress_health_check=[HealthCheck.too_slow]
    )


@limit
@draws(12)
@given(cases(1).map(plainer))
def test_random_pipelines_of_one_rank_are_equal(case):
    judge([text_of_pipeline(0, case)])


@limit
@draws(4)
@given(cases(2).map(plainer))
def test_random_pipelines_in_two_processes_are_equal(case):
    judge(run_ranks(text_of_pipeline, 2, case))


def mean_of(losses, target):
    """Over the tokens of both replicas."""
    counts = torch.stack([tokens(each) for each in target.chunk(MICROBATCHES)])
    sums = torch.stack([(torch.stack(losses) * counts).sum(), counts.sum()])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def reports_of_loops(rank, layout, number):
    found = []
    for seed in range(number):
        with float64():
            trainer = HandWritten(layout, rank, seed=seed)

            def step(batch, trainer=trainer, tells_mean=layout == "replicas" and seed % 2 == 1):
                losses = trainer.step(batch)
                return mean_of(losses, batch[1]) if tells_mean else losses

            report = zbpp.parity(
                step, trainer.stages, whole=Whole, batch=trainer.batch, loss_fn=loss_fn,
                num_microbatches=MICROBATCHES, tokens=tokens, optimizer=SGD, clip=0.05,
                clip_grad_norm=trainer.clip,
            )  # fmt: skip
        found.append("" if report.is_equal else str(report))
    return found


@limit
@pytest.mark.parametrize("layout", ["replicas", "pipeline"])
def test_hand_written_loops_are_equal(layout):
    number = int(os.environ.get("ZBPP_CASES", 3))
    assert run_ranks(reports_of_loops, 2, layout, number) == [[""] * number] * 2


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.second(self.first(x).relu())) + x


SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]


def reports_of_torch(rank, sources):
    found = {}
    for source in sources:
        for name in SCHEDULES:
            kind = getattr(torch_pipelining if source == "zbpp" else pipelining, f"Schedule{name}")
            mine = [rank] if name in SCHEDULES[:2] else [rank, rank + 2]
            count = 2 * len(mine)
            stages = [pipelining.PipelineStage(Block(i), i, count, torch.device("cpu")) for i in mine]
            schedule = kind(stages if len(mine) > 1 else stages[0], 4, loss_fn=nn.functional.mse_loss)

            def step(batch, schedule=schedule):
                losses = []
                x = [batch[0]] if rank == 0 else []
                schedule.step(*x, target=batch[1] if rank == 1 else None, losses=losses)
                return losses

            report = zbpp.parity(
                step,
                stages,
                whole=lambda count=count: nn.Sequential(*map(Block, range(count))),
                names=lambda stage, name: f"{stage}.{name}",
                batch=tuple(torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))),
                loss_fn=nn.functional.mse_loss,
                num_microbatches=4,
                optimizer=ADAMW,
            )
            found[source, name] = report.verdict if not report.is_equal else report.notes
    return found


@limit
def test_torchs_schedules_are_equal_in_float32_with_dropout_off():
    found = run_ranks(reports_of_torch, 2, ["torch", "zbpp"])
    note = ["dropout is off: the trainer's random numbers are not known"]
    assert all(notes == note for each in found for notes in each.values()), found[0]


# ---- Pipelines with a loss that is marked by `mean_over` or `mean_over_tokens`


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 1)

    def forward(self, x):
        zbpp.auxiliary_loss("balance", 0.1 * self.router(x).square().mean())
        return x.tanh()


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Auxiliary(), nn.Linear(6, 6), nn.Linear(6, 5))


def mean_loss(output, target):
    return nn.functional.cross_entropy(output, target)


def sum_and_count(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum"), num_tokens(target)


def as_entries(output, target):
    loss = mean_loss(output, target)
    return {"near": 0.75 * loss, "far": 0.25 * loss}


def unequal_targets(part):
    """8 labels, some of them ignored: microbatches and parts have other numbers of targets."""
    generator = torch.Generator().manual_seed(part)
    target = torch.randint(5, (8,), generator=generator)
    target[[1, 4, 7] if part else [2]] = IGNORED
    return torch.randn(8, 6, generator=generator), target


def reports_of_marked(rank, layout, num_microbatches):
    found = []
    for loss in (mean_loss, sum_and_count, as_entries):
        for mark in (mean_over_tokens, mean_over(lambda target: (target != IGNORED).sum())):
            with float64():
                parts = 1 if layout == "pipeline" else 2
                timetable = zbpp.plan("1f1b", 2 // parts, num_microbatches=num_microbatches)
                stages = zbpp.split_sequential(classifier(), timetable.num_stages)
                mine = {index: stages[index] for index in timetable.stages_of(rank // parts)}
                mesh = zbpp.make_mesh(replicate=2) if parts > 1 else None
                marked = mark(functools.partial(loss))
                with zbpp.Pipeline(mine, timetable, marked, mesh=mesh, timeout=20) as pipeline:
                    report = zbpp.parity(
                        lambda batch, pipeline=pipeline: pipeline.step(batch[0], target=batch[1]),
                        pipeline,
                        whole=classifier,
                        batch=unequal_targets(rank % parts),
                        loss_fn=marked,
                        optimizer=ADAMW,
                        clip=0.05,
                        evaluate=lambda batch, pipeline=pipeline: pipeline.evaluate(
                            batch[0], target=batch[1]
                        ),
                    )
            found.append("" if report.is_equal else str(report))
    return found


@limit
@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    [
        ("pipeline", 4),
        ("replicas", 1),
        pytest.param("pipeline", 1, marks=pytest.mark.nightly),
        pytest.param("replicas", 4, marks=pytest.mark.nightly),
    ],
)
def test_pipelines_with_a_marked_loss_are_equal_with_unequal_counts(layout, num_microbatches):
    assert run_ranks(reports_of_marked, 2, layout, num_microbatches) == [[""] * 6] * 2
