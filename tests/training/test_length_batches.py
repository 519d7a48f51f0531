"""Training on batches of so many tokens: against plain autograd on each sequence alone; going on."""

import json
import sys
from itertools import permutations
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from torch import nn

from helpers.configs import FOLDER
from helpers.processes import run_ranks
from helpers.runs import metrics_in
from zbpp import Pipeline, make_mesh, plan
from zbpp import config as configs
from zbpp.commands import command_line
from zbpp.data.source import Data
from zbpp.data.token_batches import MicrobatchShape, TokenBatches, replica_of
from zbpp.data.windows import Windows
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.run import app
from zbpp.runtime.extra import EMPTY_MICROBATCHES, Observer
from zbpp.runtime.processes.tensor_parallel import parallelize
from zbpp.schedule import Costs, simulate
from zbpp.stage_api import mean_over_tokens
from zbpp.training.length_plans import LengthPlanner, Lengths
from zbpp.training.measured_steps import measured_steps
from zbpp.training.trainer import Trainer

VOCAB, LENGTH, TOKENS, STEPS, RATE = 29, 24, 150, 4, 0.05
ENDS = torch.tensor([9, 12, 40, 41, 60, 95, 101, 130, 133, 160, 200, 204, 219, 260, 300]).numpy()


def sequences():
    """Documents of 1 to 40 tokens, in pieces of at most LENGTH."""
    tokens = torch.randint(VOCAB, (int(ENDS[-1]),), generator=torch.Generator().manual_seed(1)).numpy()
    return Windows(tokens, sequence_length=LENGTH, seed=0, ends=ENDS).sequences()


def model_of(kind):
    sizes = {"vocab_size": VOCAB, "num_layers": 4, "hidden_size": 16, "num_heads": 2}
    return {"llama": Llama, "gpt": Gpt}[kind](**sizes, sequence_length=LENGTH)


def token_batches(*, is_packed=True, tokens=TOKENS):
    return TokenBatches(sequences(), tokens_per_batch=tokens, is_packed=is_packed)


def trainer_of(rank, num_ranks, schedule, num_microbatches, options, **how):
    """options: kind of model, and those of the batches. how: of the pipeline."""
    options, mesh = dict(options), how.get("mesh")
    kind = options.pop("kind", "llama")
    batches = token_batches(**options)
    timetable, model = plan(schedule, num_ranks, num_microbatches), model_of(kind)
    stages = {
        index: model.build_stage(index, timetable.num_stages).double()
        for index in timetable.stages_of(rank % num_ranks)
    }
    parallelize(model, stages, mesh)
    pipeline = Pipeline(stages, timetable, model.loss, **how)
    place = pipeline.place
    costs = Costs(f=3, b=3, w=2, quadratic=Costs(f=1, b=2, w=0))
    parts = {"part": place.data_part, "num_parts": place.num_data_parts}
    return Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(pipeline.parameters(), lr=RATE),
        data=Data(batches, batches, 0, batches.tokens_per_batch, fingerprint="", is_shared=True),
        learning_rate=lambda step: 1.0,
        planner=LengthPlanner(batches, timetable, costs, (1, LENGTH), **parts),
        num_recorded=2,
    )


def trained(rank, num_ranks, schedule, num_microbatches, options, degrees=None):
    degrees = dict(degrees or {})
    how = {"reshard": degrees.pop("reshard", "step"), "mesh": make_mesh(**degrees) if degrees else None}
    trainer = trainer_of(rank, num_ranks, schedule, num_microbatches, options, **how)
    losses = [metrics["loss"] for metrics in trainer.run(STEPS)]
    weights = {
        name: each.detach().clone()
        for stage in trainer.pipeline.stages.values()
        for name, each in stage.named_parameters()
    }
    assert trainer.planner._thread is None
    trainer.pipeline.close()
    return losses, weights


def plainly(kind, tokens=TOKENS):
    """One process, one sequence after the other; the loss is the mean over all targets of the batch."""
    stage, batches = model_of(kind).build_stage(0, 1).double(), token_batches(tokens=tokens)
    optimizer = torch.optim.SGD(stage.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        found = [batches.sequences.sequence(each) for each in batches.members(batches.first_of(step))[0]]
        count = sum(len(labels) for _, labels in found)
        loss = sum(F.cross_entropy(stage(x[None])[0], y, reduction="sum") for x, y in found) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(stage.named_parameters())


def assert_plain(ranks, expected):
    losses, weights = expected
    for own_losses, own in ranks:
        assert own_losses == pytest.approx(losses, rel=1e-12)
        for name, each in own.items():
            torch.testing.assert_close(each, weights[name], rtol=1e-11, atol=1e-12)


CASES = [
    (1, ("zb_h1", 4), {}),
    (2, ("zb_h1", 4), {}),
    (2, ("zb_v", 6), {"is_packed": False}),
    (2, ("1f1b", 4), {"kind": "gpt", "is_packed": False}),
    (2, ("zb_h1", 3), {"kind": "gpt"}),
    (2, ("zb_h1", 12), {"tokens": 40}),  # fewer sequences than microbatches
    (2, ("zb_h1", 12), {"tokens": 40, "is_packed": False}),
]


@pytest.mark.parametrize(("num_ranks", "how", "options"), CASES)
def test_losses_and_weights_are_those_of_plain_autograd(num_ranks, how, options):
    ranks = run_ranks(trained, num_ranks, num_ranks, *how, options)
    expected = plainly(options.get("kind", "llama"), options.get("tokens", TOKENS))
    assert_plain(ranks, expected)


FEW = {"tokens": 40}  # fewer sequences than microbatches
FEWEST = {"tokens": LENGTH}  # in some steps a single sequence: one replica has none


def run_microbatches(rank, num_ranks, options, extras=()):
    """(losses, how many microbatches each of the last two steps ran, which must be the planned ones)."""
    trainer = trainer_of(rank, num_ranks, "zb_h1", 12, options, extras=extras)
    losses = [metrics["loss"] for metrics in trainer.run(STEPS)]
    found = [timeline.timetable.num_microbatches for timeline in trainer.timelines.values()]
    assert found == [len(each) for each in trainer.lengths.values()]
    figures = measured_steps(trainer.timelines, [], trainer.lengths).figures
    assert 0 <= figures["predicted_bubble_rate"] < 1
    trainer.pipeline.close()
    assert trainer.planner.plan(0).padding == 0 or not trainer.planner.batches.is_packed
    return losses, found


@pytest.mark.parametrize("options", [FEW, FEW | {"is_packed": False}, FEWEST])
def test_microbatches_without_sequences_are_left_out_and_send_no_message(options):
    batches = token_batches(**options)
    numbers = [len(batches.members(batches.first_of(step))[0]) for step in range(STEPS)]
    for losses, found in run_ranks(run_microbatches, 2, 2, options):
        assert losses == pytest.approx(plainly("llama", options["tokens"])[0], rel=1e-12)
        assert found == numbers[-2:]


class MadeForOneTimetable(Observer):
    name = "made_for_one_timetable"
    excludes = MappingProxyType({EMPTY_MICROBATCHES: "leave it out"})


def test_beside_an_extra_for_one_timetable_they_run_with_a_token_that_has_no_label():
    for losses, found in run_ranks(run_microbatches, 2, 2, FEW, [MadeForOneTimetable()]):
        assert losses == pytest.approx(plainly("llama", FEW["tokens"])[0], rel=1e-12)
        assert found == [12, 12]


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"replicate": 2}, FEW),
        ({"replicate": 2}, FEWEST),
        ({"shard": 2}, FEWEST),
        ({"shard": 2, "reshard": "microbatch"}, FEWEST),
        ({"tensor": 2}, FEWEST),
    ],
)
def test_replicas_may_have_fewer_sequences_than_microbatches_or_none(degrees, options):
    ranks = run_ranks(trained, 2, 1, "zb_h1", 3, options, degrees)
    losses, _ = plainly("llama", options["tokens"])
    for own, _ in ranks:
        assert own == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(
    "degrees",
    [
        {"replicate": 2},
        {"shard": 2},
        pytest.param({"replicate": 2, "tensor": 2}, marks=pytest.mark.nightly),
    ],
)
def test_replicas_and_tensor_parallel_parts_train_on_the_same_batch(degrees):
    size = torch.tensor([*degrees.values()]).prod().item()
    ranks = run_ranks(trained, size, 1, "zb_h1", 4, {}, degrees)
    losses, _ = plainly("llama")
    for own, _ in ranks:
        assert own == pytest.approx(losses, rel=1e-12)


# ---------------------------------------------------------------- plans


def test_the_order_of_each_batch_is_within_the_memory_limit_if_one_is_and_never_worse_than_the_given_one():
    """Brute force says whether any order fits."""
    batches, timetable = token_batches(is_packed=False), plan("zb_h1", 3, 5)
    costs, limit = Costs(f=3, b=3, w=2, quadratic=Costs(f=1, b=2, w=0)), 3.3
    free, limited = (
        LengthPlanner(batches, timetable, costs, memory_limit=each, num_parts=2) for each in (None, limit)
    )
    lengths, outcomes, first = Lengths(costs, (1, TOKENS // 10)), set(), 0
    for _ in range(12):
        shapes = dict(replica_of(batches.cut(first, 10), 0, 2))
        plans = free.plan(first), limited.plan(first)

        def timeline(groups, of=lengths.of, shapes=shapes):
            own = [of(shapes[group]) for group in groups]
            return simulate(timetable, Costs.of_lengths(own, costs))

        def peak(groups, timeline=timeline):
            return max(timeline(groups, lengths.size_of).peak_memory)

        given, found = [*shapes], plans[1].groups
        least = min(map(peak, permutations(given)))
        assert peak(found) <= max(limit, least) * (1 + 1e-9)
        assert bool(plans[1].over_limit) == (least > limit * (1 + 1e-9))
        if peak(given) <= limit:
            assert timeline(found).makespan <= timeline(given).makespan
        outcomes.add((peak(plans[0].groups) > limit, least > limit))
        first = plans[0].next_first
    assert {(True, False), (True, True)} <= outcomes


def test_a_plan_depends_on_the_batch_alone_and_is_made_ahead():
    made = [LengthPlanner(token_batches(), plan("zb_h1", 2, 6)) for _ in range(2)]
    try:
        ahead = [made[0].of_step(step) for step in range(6)]
        again = [made[1].of_step(step) for step in (3, 0, 5)]
    finally:
        for each in made:
            each.close()
    assert again == [ahead[step] for step in (3, 0, 5)]
    assert [each.next_first for each in ahead[:-1]] == [token_batches().first_of(n) for n in range(1, 6)]


def test_the_length_of_several_rows_is_that_of_one_row_that_takes_as_long():
    costs = Costs(f=3, b=3, w=2, quadratic=Costs(f=1, b=2, w=0))
    lengths = Lengths(costs, (2, 100))
    assert lengths.of(MicrobatchShape(2, 100, 200)) == pytest.approx(1)
    assert lengths.of(MicrobatchShape(1, 1, 0)) == 0
    shape = MicrobatchShape(3, 40, 120)
    work = 8 * 120 / 200 + 3 * 3 * 40**2 / (2 * 100**2)
    length = lengths.of(shape)
    assert 8 * length + 3 * length**2 == pytest.approx(work)
    assert Lengths(Costs(), (1, 10)).of(MicrobatchShape(2, 10, 15)) == pytest.approx(2)


# ---------------------------------------------------------------- the whole run


DATA = f"""
import torch

class Documents(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, row):
        generator = torch.Generator().manual_seed(row)
        tokens = torch.randint({VOCAB}, (4 + row % 10,), generator=generator).tolist()
        return {{"input_ids": tokens[:-1], "labels": tokens[1:]}}

def documents():
    return Documents(), Documents()

def batches(batch_size):
    return [(torch.zeros(batch_size, 4, dtype=torch.int64),) * 2]
"""
RUN = [
    "model=llama_tiny", f"model.vocab_size={VOCAB}", "model.num_layers=4", "model.hidden_size=16",
    "model.sequence_length=16", "data._target_=lists.documents", "data.batching=tokens",
    "data.tokens_per_batch=90", "num_microbatches=4", "microbatch_size=1", "precision=float64",
    "evaluate_every=3", "parallel.device=cpu", "save_weights=false", "measure_every=2",
]  # fmt: skip


def train(warm, folder, name, *more):
    """`zbpp train` in a folder with the data; returns the metrics of all steps."""
    (folder / "lists.py").write_text(DATA)
    done = warm.start(folder, warm.zbpp("train", *RUN, f"run_dir={name}", *more))
    assert done.rc == 0, done.text
    return metrics_in(folder / name)


def goes_on_to_the_last_bit(tmp_path, warm, num_ranks):
    """The metrics of a whole run. The checkpoint says where the next batch begins."""
    whole = train(warm, tmp_path, "whole", "-n", num_ranks, "steps=8")
    train(warm, tmp_path, "parts", "-n", num_ranks, "steps=8", "stop_after=3")
    (state,) = (tmp_path / "parts" / "checkpoints").glob("step-3/state.json")
    assert '"first"' in state.read_text()
    parts = train(warm, tmp_path, "parts", "-n", num_ranks, "steps=8")
    for name in ("step", "loss", "padding", "evaluation_loss"):
        assert [each.get(name) for each in parts] == [each.get(name) for each in whole]
    assert all(each["padding"] == 0 for each in whole)  # packed
    assert {"measured_bubble_rate", "predicted_bubble_rate"} <= whole[-1].keys()
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert 80 * 8 < summary["tokens"] <= 90 * 8
    return whole


@pytest.mark.slow
def test_a_run_goes_on_to_the_last_bit(tmp_path, warm):
    goes_on_to_the_last_bit(tmp_path, warm, "1")


@pytest.mark.nightly
def test_two_ranks_go_on_to_the_last_bit_and_one_process_has_the_same_losses(tmp_path, warm):
    whole = goes_on_to_the_last_bit(tmp_path, warm, "2")
    alone = train(warm, tmp_path, "alone", "steps=8", "data.packing=false")
    assert [each["loss"] for each in alone] == pytest.approx([each["loss"] for each in whole], rel=1e-11)
    assert min(each["padding"] for each in alone) > 0


@pytest.mark.slow
def test_all_ways_to_cut_a_batch_have_the_gradients_of_one_process(tmp_path, warm):
    """The benchmark's own check, at a tiny size: rows filled up, neighbours in length, packed rows."""
    script = Path(__file__).parents[2] / "scripts" / "bench_lengths.py"
    sizes = ["--mean=8", "--hidden=16", "--repeats=1", "--rows=3", "--microbatches=4", "--check"]
    done = warm.start(tmp_path, [str(warm.python), str(script), *sizes])
    assert done.rc == 0, done.text
    names = [line.split()[0] for line in done.text.splitlines()[2:6]]
    assert names == ["longest", "own", "ordered", "packed"]


class Unmarked:
    def build_stage(self, index, num_stages):
        return nn.Sequential(nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB))

    def loss(self, output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


class WithBatchNorm(Unmarked):
    def build_stage(self, index, num_stages):
        stage = super().build_stage(index, num_stages)
        stage.norm = nn.BatchNorm1d(4)
        stage.forward = lambda x: stage[1](stage[0](x))
        return stage

    @mean_over_tokens
    def loss(self, output, target):
        return super().loss(output, target)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.tokens_per_batch=8"], "data: tokens_per_batch=8, and the longest sequence has 12 tokens"),
        (["data.packing=true", "model.sequence_parallel=true"], "data.packing=true needs a model that keeps"),
        ([f"model._target_={__name__}.WithBatchNorm"], "BatchNorm, which stage 0 has"),
        ([f"model._target_={__name__}.Unmarked"], "how many targets .* and the loss of Unmarked does not"),
        (["data._target_=lists.batches"], "needs sequences by number, and IteratedBatches has none"),
        (["schedule.replan=zb_auto"], "data.batching=tokens doesn't go with schedule.replan=zb_auto"),
        (["schedule.timetable=slices.txt", "num_microbatches=null"], "a plan that cuts sequences in slices"),
        (["cuda_graphs=true"], "cuda_graphs=true doesn't go with data.batching=tokens"),
        (["data.tokens_per_batch=null"], "data.batching=tokens needs a number of tokens"),
    ],
)
def test_what_does_not_go_with_batches_of_tokens_is_refused_before_the_first_step(
    monkeypatch, tmp_path, more, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lists.py").write_text(DATA)
    (tmp_path / "slices.txt").write_text(str(plan("zb_h1", 1, 2, num_slices=2)))
    sys.modules.pop("lists", None)
    kept = [each for each in RUN if each.split("=")[0] not in {one.split("=")[0] for one in more}]
    if any(each.startswith("model._target_") for each in more):
        kept = [each for each in kept if not each.startswith("model")]
    with pytest.raises(configs.ConfigError, match=message):
        app.train(composed_of(*kept, *more, "run_dir=run", "steps=1"))
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("metrics*"))


def composed_of(*given):
    configs.register()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        overrides = command_line.arguments(list(given), "train")
        return configs.Composed.of(compose("train", overrides=overrides))
