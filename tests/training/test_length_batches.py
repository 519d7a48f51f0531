"""Training on batches of so many tokens: against plain autograd on each sequence alone; going on."""

import pytest
import torch
import torch.nn.functional as F

from helpers.processes import run_ranks
from zbpp import Pipeline, make_mesh, plan
from zbpp.data.source import Data
from zbpp.data.token_batches import TokenBatches
from zbpp.data.windows import Windows
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama
from zbpp.runtime.tensor_parallel import parallelize
from zbpp.schedule import Costs
from zbpp.training.checkpoints import Checkpoints
from zbpp.training.leaving import StopAfter
from zbpp.training.length_plans import LengthPlanner, Lengths
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


def trainer_of(rank, num_ranks, schedule, num_microbatches, *, mesh=None, kind="llama", **options):
    batches = token_batches(**options)
    timetable, model = plan(schedule, num_ranks, num_microbatches), model_of(kind)
    stages = {
        index: model.build_stage(index, timetable.num_stages).double()
        for index in timetable.stages_of(rank % num_ranks)
    }
    parallelize(model, stages, mesh)
    pipeline = Pipeline(stages, timetable, model.loss, mesh=mesh, dynamic_shapes=True)
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
    mesh = None if degrees is None else make_mesh(**degrees)
    trainer = trainer_of(rank, num_ranks, schedule, num_microbatches, mesh=mesh, **options)
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


@pytest.mark.parametrize("degrees", [{"replicate": 2}, {"shard": 2}, {"replicate": 2, "tensor": 2}])
def test_replicas_and_tensor_parallel_parts_train_on_the_same_batch(degrees):
    size = torch.tensor([*degrees.values()]).prod().item()
    ranks = run_ranks(trained, size, 1, "zb_h1", 4, {}, degrees)
    losses, _ = plainly("llama")
    for own, _ in ranks:
        assert own == pytest.approx(losses, rel=1e-12)
