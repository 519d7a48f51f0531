"""Mixed and pure 16-bit training: equal under all plans, within 16 bits of float32, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from helpers.processes import run_ranks
from zbpp import Costs, LossScale, MasterWeights, Pipeline, plan
from zbpp import config as configs
from zbpp.data import regression_data, text_data
from zbpp.models.gpt import Gpt
from zbpp.run import app
from zbpp.run.optimizer import build_masters
from zbpp.run.stages import build_mesh, move_stages, recompute_stages
from zbpp.run.trainer import Plan, build_pipeline
from zbpp.training.batches import batch_for
from zbpp.training.optim.optimizer import adamw
from zbpp.training.optim.precision import PRECISIONS
from zbpp.training.replan import Replan
from zbpp.training.trainer import Trainer

M, STEPS = 4, 6
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return str(path)


class CheckedGpt(Gpt):
    """Its loss and metrics want float32."""

    def __init__(self, num_layers):
        super().__init__(num_layers=num_layers, hidden_size=16, num_heads=2, sequence_length=8)

    def loss(self, output, target):
        assert output.dtype in (torch.float32, torch.float64)
        return super().loss(output, target)


def optimizer_over(parameters):
    return adamw(parameters, learning_rate=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def trainer_of(
    rank, corpus, precision, schedule, num_ranks, *, recomputed="none", planned=None, num_layers=4
):
    chosen, model, timetable = PRECISIONS[precision], CheckedGpt(num_layers), plan(schedule, num_ranks, M)
    stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
    move_stages(stages, CPU, chosen)
    recompute_stages(stages, recomputed)
    loss_fn = chosen.widened(model.loss)
    pipeline = Pipeline(stages, timetable, loss_fn)
    masters = build_masters(pipeline, chosen)
    again = Replan(
        plan=lambda costs, limits: plan(planned, num_ranks, M), loss_fn=loss_fn, stages=stages, num_measured=2
    )
    return Trainer(
        pipeline=pipeline,
        optimizer=optimizer_over((masters or pipeline).parameters()),
        data=text_data(path=corpus, sequence_length=8, vocab_size=256, batch_size=2 * M, seed=0),
        learning_rate=lambda step: 1.0,
        clip_norm=0.5,
        replan=again if planned else None,
        masters=masters,
        loss_scale=LossScale() if chosen.is_scaled else None,
    )


def run(rank, corpus, *arguments, **options):
    """(losses and norms, optimized weights of this rank by name) of a short run."""
    trainer = trainer_of(rank, corpus, *arguments, **options)
    history = [(metrics["loss"], metrics["grad_norm"]) for metrics in trainer.run(STEPS)]
    named = trainer.pipeline.named_parameters()
    of = trainer.masters.of if trainer.masters else lambda parameter: parameter
    return history, {name: of(p).detach().clone() for name, p in named}


CASES = {
    ("mixed_bfloat16", "zb_v"): {},
    ("mixed_bfloat16", "zb_h1"): {"planned": "1f1b"},
    ("mixed_bfloat16", "1f1b"): {"recomputed": "block"},
    ("mixed_float16", "zb_h1"): {"recomputed": "block"},
}


def every_case(rank, corpus):
    return {case: run(rank, corpus, *case, 2, **options) for case, options in CASES.items()}


def test_mixed_runs_are_equal_to_the_last_bit_under_all_plans_and_near_those_in_float32(corpus):
    """Recomputed and replanned, too; and to a run in one process."""
    first, second = run_ranks(every_case, 2, corpus)
    expected, weights = run(0, corpus, "float32", "1f1b", 1)
    for precision, tolerance in (("mixed_bfloat16", 0.02), ("mixed_float16", 0.004)):
        alone, alone_weights = run(0, corpus, precision, "1f1b", 1)
        for case in (each for each in CASES if each[0] == precision):
            (history, mine), (same, others) = first[case], second[case]
            assert history == same == alone, case
            merged = mine | others
            assert merged.keys() == alone_weights.keys() == weights.keys()
            assert all(torch.equal(merged[each], alone_weights[each]) for each in merged), case
        assert alone != expected
        for (loss, norm), (wanted_loss, wanted_norm) in zip(alone, expected, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=tolerance)
            assert norm == pytest.approx(wanted_norm, rel=5 * tolerance)


class Normed:
    """A BatchNorm inside of each of two stages; one is the first layer."""

    def build_stage(self, index, num_stages):
        torch.manual_seed(index)
        if index:
            return nn.Sequential(
                nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 4)
            )
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8))

    def loss(self, output, target):
        return F.mse_loss(output, target)


def normed(rank, name, degrees):
    """(gradients, statistics) of a step, and what plain torch finds."""
    chosen, model, timetable = PRECISIONS[name], Normed(), plan("zb_v", 1, M)
    x, target = torch.randn(2, 4 * M, 4, generator=torch.Generator().manual_seed(0))
    plain = nn.Sequential(*(model.build_stage(s, 2) for s in range(2)))
    for rows, wanted in zip(x.split(4), target.split(4), strict=True):
        with torch.autocast("cpu", chosen.compute):
            output = plain(rows)
        (F.mse_loss(output.float(), wanted) / M).backward()

    config = configs.TrainConfig(precision=name, parallel=configs.ParallelConfig(**degrees))
    mesh = None if rank is None else build_mesh(config.parallel, "cpu")
    stages = {s: model.build_stage(s, 2) for s in range(2)}
    move_stages(stages, CPU, chosen)
    pipeline = build_pipeline(config, Plan(timetable, Costs()), model, stages, mesh)
    masters = build_masters(pipeline, chosen)
    (x,), target = batch_for(stages, 2, Batch(x, target), 0, CPU, target_dtype=torch.float32)
    pipeline.step(x, target=target)
    found = [p.grad if masters is None else p.main_grad for p in pipeline.parameters()]
    found = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
    wanted = [p.grad.float() for p in plain.parameters()]
    statistics = [b for s in stages.values() for b in s.buffers()]
    return found, wanted, statistics, [*plain.buffers()]


class Batch:
    def __init__(self, *batch):
        self.given = batch

    def batch(self, number):
        return self.given


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("degrees", [{}, {"replicate": 2}, {"shard": 2}], ids=str)
def test_batch_norm_computes_with_float32_weights_as_under_autocast(name, degrees):
    """It raised 'expected scalar type BFloat16 but found Float'."""
    for found, wanted, *statistics in (
        run_ranks(normed, 2, name, degrees) if degrees else [normed(None, name, degrees)]
    ):
        assert all(each.dtype == torch.float32 for each in found)
        for mine, plain in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, plain, rtol=0, atol=0.01 * float(plain.abs().max()) + 1e-6)
        torch.testing.assert_close(*statistics)


# ---------------------------------------------------------------- float16


class Amplifying:
    """Two stages; the gradient that stage 1 sends back is 256 times that of its own layer's input."""

    def build_stage(self, index, num_stages):
        torch.manual_seed(index)
        layer = nn.Linear(4, 4)
        return layer if index == 0 else Amplified(layer)

    def loss(self, output, target):
        return F.mse_loss(output, target)


class Amplified(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(256 * x)


def amplifying_trainer(rank, num_ranks, **options):
    model, timetable = Amplifying(), plan("zb_h1" if num_ranks == 2 else "zb_v", num_ranks, M)
    stages = {s: model.build_stage(s, 2) for s in timetable.stages_of(rank)}
    chosen = PRECISIONS["mixed_float16"]
    move_stages(stages, CPU, chosen)
    pipeline = Pipeline(stages, timetable, chosen.widened(model.loss))
    masters = build_masters(pipeline, chosen)
    return Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(masters.parameters(), lr=1e-6),
        data=regression_data(in_features=4, out_features=4, batch_size=2 * M, seed=0),
        learning_rate=lambda step: 1.0,
        masters=masters,
        **options,
    )


def overflowing(rank):
    """Per step: metrics, whether this rank's own gradients were finite, whether its weights moved."""
    trainer = amplifying_trainer(rank, 2, loss_scale=LossScale(start=2.0**11, growth_interval=3))
    masters, found = list(trainer.masters.parameters()), []
    before = [master.detach().clone() for master in masters]
    for metrics in trainer.run(8):
        is_finite = all(master.grad.isfinite().all().item() for master in masters)
        moved = not all(map(torch.equal, before, masters))
        before = [master.detach().clone() for master in masters]
        found.append((metrics["loss_scale"], metrics["skipped"], is_finite, moved))
    return found


def test_an_overflow_on_one_rank_is_skipped_on_every_rank_and_halves_the_scale():
    first, second = run_ranks(overflowing, 2)
    assert [each[:2] for each in first] == [each[:2] for each in second]
    skipped = [number for number, each in enumerate(first) if each[1]]
    assert skipped
    assert not any(first[number][2] for number in skipped)  # overflowed on rank 0,
    assert all(second[number][2] for number in skipped)  # not on rank 1
    for found in (first, second):
        assert [not each[1] for each in found] == [each[3] for each in found]  # moved unless skipped
    expected, num_good = [2.0**11], 0
    for _, is_skipped, *_ in first[:-1]:
        num_good = 0 if is_skipped else num_good + 1
        expected.append(expected[-1] * (0.5 if is_skipped else 2.0 if num_good % 3 == 0 else 1.0))
    assert [each[0] for each in first] == expected
    assert max(expected[1:]) > min(expected)  # it also grew


def small_loss(output, target):
    return 1e-7 * F.mse_loss(output.float(), target)


def gradient_of_a_small_loss(x, scale):
    """Of the weight of a linear layer in float16; the scale divided out."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.eye_(layer.weight)
    masters = MasterWeights(layer.parameters(), torch.float16)
    pipeline = Pipeline({0: layer}, plan("zb_h1", 1, 2), small_loss)
    pipeline.loss_scale = scale
    pipeline.step(x.half(), target=2 * x)
    (master,) = masters.parameters()
    return master.grad / scale


def test_gradients_that_vanish_in_float16_are_there_with_a_loss_scale():
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    weight = torch.eye(4, requires_grad=True)
    small_loss(F.linear(x, weight), 2 * x).backward()
    torch.testing.assert_close(gradient_of_a_small_loss(x, 65536.0), weight.grad, rtol=2e-3, atol=0)
    assert gradient_of_a_small_loss(x, 1.0).abs().max() < 0.5 * weight.grad.abs().max()


def test_a_loss_scale_that_the_user_set_is_divided_out_of_norm_and_gradients(corpus):
    plain, scaled = (trainer_of(0, corpus, "float32", "zb_h1", 1) for _ in range(2))
    scaled.pipeline.loss_scale = 1024.0  # a power of two scales exactly
    for one, other in zip(plain.run(3), scaled.run(3), strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])


# ---------------------------------------------------------------- a whole run


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_a_run_of_the_trainer_writes_its_float32_weights(tmp_path, precision):
    sizes = ("num_layers=2", "hidden_size=16", "num_heads=2", "sequence_length=8")
    overrides = [f"precision={precision}", "steps=2", "num_microbatches=2", f"run_dir={tmp_path}/run"]
    configs.register()
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(configs.config_folder()), version_base="1.3"):
        config = compose("train", [*overrides, "parallel.device=cpu", *(f"model.{each}" for each in sizes)])
    figures = app.train(configs.Composed.of(config))
    assert figures["evaluation_loss"] == pytest.approx(5.5, abs=0.2)  # log 256, and a little
    (file,) = (tmp_path / "run").glob("*.safetensors")
    weights = load_file(file)
    model = Gpt(num_layers=2, hidden_size=16, num_heads=2, sequence_length=8)
    assert weights.keys() == model.build_stage(0, 1).state_dict().keys()
    compute = PRECISIONS[precision].compute
    assert {each.dtype for each in weights.values()} == {torch.float32}
    assert not all(torch.equal(each.to(compute).float(), each) for each in weights.values())
    assert ("loss_scale" in (tmp_path / "run/metrics.jsonl").read_text()) == (precision == "mixed_float16")


def test_targets_of_a_mixed_run_are_not_rounded_to_16_bits():
    seen = []

    class Noting(Amplifying):
        def loss(self, output, target):
            seen.append((output.dtype, target.dtype))
            return super().loss(output, target)

    model, chosen, timetable = Noting(), PRECISIONS["mixed_bfloat16"], plan("zb_v", 1, M)
    stages = {s: model.build_stage(s, 2) for s in range(2)}
    move_stages(stages, CPU, chosen)
    pipeline = Pipeline(stages, timetable, chosen.widened(model.loss))
    masters = build_masters(pipeline, chosen)
    trainer = Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(masters.parameters(), lr=0.0),
        data=regression_data(in_features=4, out_features=4, batch_size=2 * M, seed=0),
        learning_rate=lambda step: 1.0,
        masters=masters,
        metrics=chosen.widened(
            lambda output, target: {"dtypes": seen.append((output.dtype, target.dtype)) or 0.0}
        ),
        evaluate_every=1,
    )
    list(trainer.run(1))
    assert len(seen) > 2 * M
    assert set(seen) == {(torch.float32, torch.float32)}
