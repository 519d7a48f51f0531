"""Who reads what: the ranks of the first and of the last stage, a batch each per step; the others nothing."""

import sys

import pytest
import torch

from helpers.processes import run_ranks
from zbpp import Pipeline, make_mesh, plan
from zbpp.config import ConfigError
from zbpp.data.source import Data
from zbpp.models.mlp import Mlp
from zbpp.run.data import build_data
from zbpp.training.trainer import Trainer

STEPS = 3


class Counted:
    """Batches whose numbers are written down when they are read."""

    def __init__(self):
        self.read = []

    def batch(self, step):
        self.read.append(step)
        return torch.full((4, 3), float(step)), torch.zeros(4, 2)


def numbers_read(rank, schedule, replicate):
    """The batches that this rank has read when it has trained and evaluated."""
    mesh = make_mesh(replicate=replicate)
    source = Counted()
    model = Mlp(in_features=3, hidden_size=4, out_features=2, num_layers=6)
    timetable = plan(schedule, mesh["pipeline"].size(), 2)
    own = timetable.stages_of(mesh.get_local_rank("pipeline"))
    stages = {index: model.build_stage(index, timetable.num_stages) for index in own}
    pipeline = Pipeline(stages, timetable, model.loss, mesh=mesh)
    trainer = Trainer(
        pipeline=pipeline,
        optimizer=torch.optim.SGD(pipeline.parameters(), lr=0.01),
        data=Data(source, source, 1, 4, ""),
        learning_rate=lambda step: 1.0,
        evaluate_every=STEPS,
    )
    list(trainer.run(STEPS))
    pipeline.close()
    return source.read


@pytest.mark.slow
def test_ranks_between_the_ends_read_nothing_and_each_replica_its_own_batches():
    ends, between = [*range(STEPS), 0], []
    assert run_ranks(numbers_read, 3, "zb_h1", 1) == [ends, between, ends]
    # In a V the first rank has both ends, and reads once.
    assert run_ranks(numbers_read, 2, "zb_v", 1) == [ends, between]
    # Ranks of two replicas, outermost first: pipeline, replicate.
    first, second = [0, 2, 4, 0], [1, 3, 5, 1]
    assert run_ranks(numbers_read, 4, "zb_h1", 2) == [first, second, first, second]


def test_a_users_dataset_is_not_even_tried_where_it_is_not_read(monkeypatch):
    class Untouchable(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, row):
            raise AssertionError("read")

    monkeypatch.setattr(sys.modules[__name__], "Untouchable", Untouchable, raising=False)
    data = build_data({"_target_": f"{__name__}.Untouchable"}, 4, 0, is_read=False)
    assert data.fingerprint is None
    assert data.items_per_batch == 4


@pytest.mark.parametrize("target", ["zbpp.data.text_data", "zbpp.data.chat.chat_data"])
def test_text_is_not_even_opened_where_it_is_not_read(target):
    """The ranks that read it tell the others what they need to know."""
    node = {"_target_": target, "path": "/no/such/file", "tokenizer": "/no/such/tokenizer.json"}
    node |= {"sequence_length": 8, "vocab_size": 256}
    data = build_data(node, 4, 0, is_read=False)
    with pytest.raises(RuntimeError, match="neither first nor last stage"):
        data.train.batch(0)
    read = Data(Counted(), Counted(), 7, 32, "known", "rows", 3, padding=0.25, notes=("cut",))
    told = data.with_facts_of(read)
    assert (told.train, told[2:]) == (data.train, read[2:])
    with pytest.raises(ConfigError, match="/no/such"):
        build_data(node, 4, 0)
