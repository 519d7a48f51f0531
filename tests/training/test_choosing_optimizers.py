"""Any optimizer, learning rate and groups of parameters: as in torch's own loop in one process."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from helpers.processes import run_ranks
from zbpp import Pipeline, make_mesh, plan
from zbpp.config import ConfigError, OptimizerConfig
from zbpp.data import Data
from zbpp.run.optimizer import (
    build_optimizer,
    build_scheduler,
    learning_rate_factor,
    optimizer_of,
)
from zbpp.runtime.processes.dtensors import whole_of
from zbpp.training.optim.optimizer import is_for_muon
from zbpp.training.optim.parameter_groups import Named
from zbpp.training.trainer import Trainer

WIDTH, VOCAB, ROWS, M, STEPS = 6, 8, 8, 4, 6


class Model:
    """Embedding, layers and a head that shares the embedding's weight if it `is_tied`."""

    def __init__(self, is_tied=False):
        self.is_tied = is_tied

    def build_stage(self, index, num_stages):
        torch.manual_seed(0)
        parts = {"embed": nn.Embedding(VOCAB, WIDTH)}
        parts |= {f"layer{i}": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for i in range(4)}
        parts |= {"norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, VOCAB, bias=False)}
        parts = {name: part.double() for name, part in parts.items()}
        names = list(parts)[len(parts) * index // num_stages : len(parts) * (index + 1) // num_stages]
        stage = nn.Sequential()
        for name in names:
            stage.add_module(name, parts[name])
        return stage

    def tied(self):
        return {"head.weight": "embed.weight"} if self.is_tied else {}

    def parallelize(self, stage, mesh):
        """By columns and by rows in turn."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        columns = ColwiseParallel(output_layouts=Replicate())
        rows = RowwiseParallel(input_layouts=Replicate())
        styles = {f"layer{i}.0": (columns, rows)[i % 2] for i in range(4)}
        parallelize_module(stage, mesh, styles, src_data_rank=None)

    def loss(self, output, target):
        return F.cross_entropy(output, target)


class Tokens:
    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        return torch.randint(VOCAB, (ROWS,), generator=generator), torch.randint(
            VOCAB, (ROWS,), generator=generator
        )


DATA = Data(Tokens(), Tokens(), 0, ROWS, "", "rows")


def by_trainer(options, *, schedule="zb_v", clip_norm=None, **further):
    """(losses, weights, rates) of a run with two stages in one process."""
    timetable, model = plan(schedule, 1, M), Model()
    stages = {i: model.build_stage(i, timetable.num_stages) for i in range(timetable.num_stages)}
    with Pipeline(stages, timetable, model.loss) as pipeline:
        release = further.get("gradient_release", False)
        optimizer = optimizer_of(pipeline, options, None, release)
        trainer = Trainer(
            pipeline=pipeline,
            optimizer=optimizer,
            data=DATA,
            learning_rate=learning_rate_factor(options, STEPS),
            scheduler=build_scheduler(optimizer, options),
            clip_norm=clip_norm,
            **further,
        )
        history = list(trainer.run(STEPS))
        weights = {name: each.detach().clone() for name, each in pipeline.named_parameters()}
        return [m["loss"] for m in history], weights, [m["learning_rate"] for m in history]


def by_torch(make_optimizers, make_scheduler=None, clip_norm=None):
    """The same by torch's own loop over the whole model; several optimizers step one after the other."""
    module = Model().build_stage(0, 1)
    optimizers = make_optimizers(dict(module.named_parameters()))
    schedulers = [] if make_scheduler is None else [make_scheduler(each) for each in optimizers]
    losses, rates = [], []
    for step in range(STEPS):
        x, y = Tokens().batch(step)
        module.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        rates.append(optimizers[0].param_groups[0]["lr"])
        for each in [*optimizers, *schedulers]:
            each.step()
        losses.append(loss.item())
    return losses, dict(module.named_parameters()), rates


def same(found, expected, rel=1e-9):
    assert found[0] == pytest.approx(expected[0], rel=rel)
    assert found[2] == pytest.approx(expected[2], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight.detach(), rtol=rel, atol=rel, msg=name)


def custom(target, *, warmup_steps=0, lr_schedule="constant", **arguments):
    return OptimizerConfig(
        name="custom",
        build={"_target_": target, **arguments},
        warmup_steps=warmup_steps,
        lr_schedule=lr_schedule,
    )


# ---------------------------------------------------------------- any optimizer


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("NAdam", {"lr": 0.01, "weight_decay": 0.1}),
        ("Adafactor", {"lr": 0.01}),
    ],
)
def test_an_optimizer_by_its_name_is_torchs_own_loop(target, arguments):
    found = by_trainer(custom(f"torch.optim.{target}", **arguments))
    same(found, by_torch(lambda named: [getattr(torch.optim, target)(named.values(), **arguments)]))


def test_an_optimizer_of_optimi_by_its_name_also_where_gradients_are_released():
    pytest.importorskip("optimi")
    options = custom("optimi.Adan", lr=0.01)
    from optimi import Adan

    expected = by_torch(lambda named: [Adan(named.values(), lr=0.01)])
    same(by_trainer(options), expected)
    same(by_trainer(options, gradient_release=True), expected)


def _muon(named, decay=0.1, lr=0.01):
    hidden = [name for name in named if name.startswith("layer") and name.endswith("weight")]
    rest = [name for name in named if name not in hidden]
    matrices = [named[name] for name in rest if named[name].dim() == 2]
    others = [named[name] for name in rest if named[name].dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(
            [named[name] for name in hidden], lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95)),
    ]


MUON = OptimizerConfig(name="muon", learning_rate=0.01, warmup_steps=0, lr_schedule="constant")


@pytest.mark.parametrize(
    "further",
    [{"clip_norm": 0.4}, {"clip_norm": 0.4, "post_validation": True}, {"gradient_release": True}],
)
def test_muon_has_the_matrices_of_hidden_layers_and_adamw_the_rest(further):
    """Muon multiplies in bfloat16: another order of sums of microbatches may round otherwise there."""
    expected = by_torch(_muon, clip_norm=further.get("clip_norm"))
    same(by_trainer(MUON, **further), expected, rel=2e-3)
    assert by_trainer(MUON, **further)[0] == by_trainer(MUON, schedule="1f1b", **further)[0]


def test_stacked_biases_of_experts_are_not_for_muon():
    """gpt-oss has them: matrices, one row per expert."""
    stacked = nn.Parameter(torch.zeros(4, 6))
    assert is_for_muon(Named(("layers.0.mlp.up.weight",), stacked), None)
    assert not is_for_muon(Named(("layers.0.mlp.experts.down_proj_bias",), stacked), None)


class SumOfAll(torch.optim.SGD):
    """Each update depends on the norm over all parameters that the optimizer has."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([each.norm() for each in gradients]).norm() if gradients else 1.0
        for each in gradients:
            each.div_(total)
        super().step()


# ---------------------------------------------------------------- groups


def test_groups_give_options_to_names_and_the_first_match_wins():
    options = replace(
        custom("torch.optim.AdamW", lr=0.01, weight_decay=0.3),
        groups=[
            {"match": ["*.bias", "norm.*"], "weight_decay": 0.0},
            {"match": "*head*", "learning_rate": 0.002},
            {"match": "*", "weight_decay": 0.2},
        ],
    )

    def expected(named):
        def which(name):
            if name.endswith(".bias") or name.startswith("norm."):
                return {"weight_decay": 0.0}
            return {"lr": 0.002} if "head" in name else {"weight_decay": 0.2}

        groups = [{"params": [each], **which(name)} for name, each in named.items()]
        return [torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3)]

    losses, weights, _ = by_trainer(options)
    plain = by_torch(expected)
    same((losses, weights, plain[2]), plain)


def test_the_named_optimizers_still_spare_vectors_the_decay_where_an_entry_says_nothing_of_it():
    module = Model().build_stage(0, 1)
    named = [Named((name,), each) for name, each in module.named_parameters()]
    options = OptimizerConfig(groups=[{"match": "layer0*", "lr": 1e-4}])
    groups = build_optimizer(named, options).param_groups
    found = [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups]
    assert found == [(5, 1e-3, 0.1), (5, 1e-3, 0.0), (1, 1e-4, 0.1), (1, 1e-4, 0.0)]


# ---------------------------------------------------------------- the learning rate


def factors(options, num_steps):
    factor = learning_rate_factor(options, num_steps)
    return [factor(step) for step in range(num_steps)]


def by_scheduler(make, num_steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def behind_warm_up(make, warmup_steps=4):
    def made(optimizer):
        first = lr_scheduler.LinearLR(optimizer, 1 / warmup_steps, total_iters=warmup_steps - 1)
        return lr_scheduler.SequentialLR(optimizer, [first, make(optimizer)], [warmup_steps])

    return made


@pytest.mark.parametrize(
    ("given", "make"),
    [
        ({"lr_schedule": "constant"}, lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        (
            {"lr_schedule": "cosine", "min_ratio": 0.2},
            lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=15, eta_min=0.2),
        ),
        (
            {"lr_schedule": "linear", "min_ratio": 0.2},
            lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=15),
        ),
        (
            {"lr_schedule": "wsd", "min_ratio": 0.2},
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.ConstantLR(o, 1.0), lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=3)],
                [12],
            ),
        ),
    ],
)
def test_schedules_are_those_of_torchs_schedulers(given, make):
    with_warm_up = factors(OptimizerConfig(warmup_steps=4, **given), 20)
    assert with_warm_up[:4] == [0.25, 0.5, 0.75, 1.0]
    assert with_warm_up[-1] == pytest.approx(given.get("min_ratio", 1.0))
    without = factors(OptimizerConfig(warmup_steps=0, **given), 16)
    assert without == pytest.approx(by_scheduler(make, 16), rel=1e-12)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("CosineAnnealingLR", {"T_max": 5}),
        ("OneCycleLR", {"max_lr": 0.3, "total_steps": 12}),
    ],
)
@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
def test_a_scheduler_of_torch_by_its_name_behind_the_warm_up(target, arguments, warmup_steps):
    options = OptimizerConfig(
        lr_scheduler={"_target_": f"torch.optim.lr_scheduler.{target}", **arguments},
        warmup_steps=warmup_steps,
    )

    def make(optimizer):
        return getattr(lr_scheduler, target)(optimizer, **arguments)

    expected = by_scheduler(behind_warm_up(make) if warmup_steps == 4 else make, 11)
    assert by_scheduler(lambda o: build_scheduler(o, options), 11) == pytest.approx(expected, rel=1e-12)


def test_the_trainer_steps_a_scheduler_and_its_state_goes_on_where_it_was():
    options = replace(
        custom("torch.optim.SGD", lr=0.1, warmup_steps=2, lr_schedule="cosine"),
        lr_scheduler={"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5},
    )

    def make(optimizer):
        return lr_scheduler.StepLR(optimizer, 2, 0.5)

    expected = by_torch(
        lambda named: [torch.optim.SGD(named.values(), lr=0.1)], behind_warm_up(make, 2), clip_norm=0.3
    )
    found = by_trainer(options, clip_norm=0.3)
    same(found, expected)
    same(by_trainer(options, clip_norm=0.3, post_validation=True), found, rel=0)


# ---------------------------------------------------------------- several ranks


def on_two_ranks(rank):
    """Refusals, and Muon on shards."""
    found = {}
    torch.manual_seed(0)

    def refused(options, **mesh):
        made = make_mesh(**mesh) if mesh else None
        with Pipeline(Model(is_tied=not mesh), "1f1b", num_microbatches=2, mesh=made) as pipeline:
            try:
                optimizer = optimizer_of(pipeline, options)
            except ConfigError as error:
                return str(error)
        return [[len(group["params"]), group["lr"]] for group in optimizer.param_groups]

    here = __name__
    found["all"] = refused(custom(f"{here}.SumOfAll", lr=0.1))
    found["each"] = refused(replace(custom(f"{here}.SumOfAll", lr=0.1), per_parameter=True))
    # the tied weight has the name embed.weight on rank 0, and head.weight on rank 1
    sgd = custom("torch.optim.SGD", lr=0.1)
    found["tied"] = refused(replace(sgd, groups=[{"match": "head*", "lr": 0.5}]))
    found["other"] = refused(replace(sgd, groups=[{"match": "norm*", "lr": 0.5}]))
    found["none"] = refused(replace(sgd, groups=[{"match": ["norm*", "nrom*"], "lr": 0.5}]))
    found["muon"] = refused(MUON, shard=2)
    for name, data in (("shard", replace_rows(DATA, rank)), ("tensor", DATA)):
        mesh = make_mesh(**{name: 2})
        with Pipeline(Model(), "1f1b", num_microbatches=2, mesh=mesh) as pipeline:
            trainer = Trainer(
                pipeline=pipeline,
                optimizer=optimizer_of(pipeline, MUON),
                data=data,
                learning_rate=lambda step: 1.0,
                clip_norm=0.4,
            )
            losses = [m["loss"] for m in trainer.run(STEPS)]
            weights = {n: whole_of(p.detach()) for n, p in pipeline.named_parameters()}
            found[f"run {name}"] = losses, weights
    return found


def replace_rows(data, rank):
    class Half:
        def batch(self, number):
            x, y = Tokens().batch(number // 2)
            half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
            return x[half], y[half]

    return data._replace(train=Half())


def test_several_ranks_and_shards():
    one, two = run_ranks(on_two_ranks, 2)
    assert one["all"] == two["all"]
    assert "SumOfAll is none of torch.optim's" in one["all"]
    assert "write optimizer.per_parameter=true" in one["all"]
    assert [one["each"], two["each"]] == [[[5, 0.1]], [[7, 0.1]]]
    assert [one["tied"][1], two["tied"][1]] == [[1, 0.5], [1, 0.5]]
    assert [one["other"][1], two["other"][1]] == [[0, 0.5], [2, 0.5]]
    assert one["none"] == two["none"]
    assert "groups: nrom* matches no parameter" in one["none"]
    assert [n for n, _ in one["muon"]] == [4, 2, 6]
    expected = by_torch(_muon, clip_norm=0.4)
    for losses, weights in (each[f"run {name}"] for each in (one, two) for name in ("shard", "tensor")):
        assert losses == pytest.approx(expected[0], rel=5e-3)
        for name, weight in expected[1].items():
            assert (weights[name] - weight).abs().max() < 3e-3 * math.sqrt(STEPS), name


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OptimizerConfig(name="custom"), "optimizer.build._target_=torch.optim.SGD"),
        (
            lambda: OptimizerConfig(build={"_target_": "torch.optim.SGD"}),
            "optimizer.build go together",
        ),
        (
            lambda: OptimizerConfig(name="custom", build={"_target_": "torch.optim.SGD"}, learning_rate=0.1),
            "optimizer.build.lr=",
        ),
        (lambda: OptimizerConfig(lr_scheduler={"step_size": 3}), "optimizer.lr_scheduler._target_"),
        (
            lambda: OptimizerConfig(lr_scheduler={"_target_": "a.B"}, lr_schedule="wsd"),
            "leave one out",
        ),
        (lambda: made(custom("torch.optim.SGD", lrate=0.1)), "lrate"),
        (lambda: made(custom("torch.optim.Muon")), "Muon only supports 2D parameters"),
        (lambda: made(custom("torch.nn.Linear", in_features=2, out_features=2)), "Linear"),
        (
            lambda: made(replace(custom("torch.optim.SGD", lr=0.1), groups=[{"match": "*", "decay": 1}])),
            "no option of SGD",
        ),
        (lambda: made(OptimizerConfig(groups=[{"lr": 1.0}])), "groups[0] has match=None"),
        (lambda: made(OptimizerConfig(groups=[{"match": "*"}])), "needs options"),
        (lambda: made(OptimizerConfig(groups=[{"match": "*", "lr": "1e-3x"}])), "groups[0] has lr='1e-3x'"),
        (lambda: made(OptimizerConfig(groups=[{"match": "*", "learning_rate": None}])), "has lr=None"),
        (
            lambda: made(replace(MUON, groups=[{"match": "*bias", "algorithm": "muon"}])),
            "Muon is for matrices",
        ),
    ],
)
def test_what_is_wrong_is_said(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def made(options):
    module = Model().build_stage(0, 1)
    return build_optimizer([Named((name,), each) for name, each in module.named_parameters()], options)
