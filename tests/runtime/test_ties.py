"""A parameter that stages share: trained and counted once on one rank, refused on several."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.models.gpt import Gpt
from zbpp.runtime.ties import check_ties, shared_parameters
from zbpp.training.data import Data
from zbpp.training.optimizer import adamw
from zbpp.training.trainer import Trainer

VOCAB, HIDDEN, M, STEPS = 11, 6, 4, 5


class TiedLm:
    """Embedding, two layers, and a head with the embedding's weight: as many stages as you like up to 4."""

    def __init__(self):
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = [nn.Linear(HIDDEN, HIDDEN) for _ in range(2)]
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def build_stage(self, index, num_stages):
        parts = [self.embedding, *self.layers, self.head]
        names = ["embedding", "layer_0", "layer_1", "head"]
        mine = range(len(parts) * index // num_stages, len(parts) * (index + 1) // num_stages)
        stage = nn.Sequential()
        for i in mine:
            stage.add_module(names[i], parts[i])
        return stage

    def loss(self, output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Tokens:
    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (2 * M, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


def test_a_parameter_shared_by_two_stages_of_a_rank_is_updated_clipped_and_counted_once():
    """In a V: AdamW stepped twice over it, its gradient was scaled twice and stood twice in the norm."""
    torch.set_default_dtype(torch.float64)
    try:
        model, timetable = TiedLm(), plan("zb_v", 1, M)
        stages = {index: model.build_stage(index, 2) for index in range(2)}
        pipeline = Pipeline(stages, timetable, model.loss)
        trainer = Trainer(
            pipeline=pipeline,
            optimizer=adamw(
                pipeline.parameters(), learning_rate=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
            ),
            data=Data(Tokens(), Tokens(), 0, 1, fingerprint=""),
            learning_rate=lambda step: 1.0,
            clip_norm=0.5,
        )
        plain = TiedLm().build_stage(0, 1)
        parameters = list(plain.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
        for metrics in trainer.run(STEPS):
            inputs, target = Tokens().batch(metrics["step"] - 1)
            optimizer.zero_grad()
            loss = model.loss(plain(inputs), target)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            assert norm > 0.5
            optimizer.step()
            assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
            assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        merged = {name: p for stage in stages.values() for name, p in stage.state_dict().items()}
        for name, expected in plain.state_dict().items():
            torch.testing.assert_close(merged[name], expected, rtol=1e-5, atol=1e-7, msg=name)
    finally:
        torch.set_default_dtype(torch.float32)


def refusals(rank):
    """What is said for each placement (rank_of), on each rank."""
    said = []
    for rank_of in ((0, 1), (0, 1, 1, 0)):
        try:
            check_ties(TiedLm().build_stage, rank_of, is_rank_0=rank == 0)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_parameter_shared_across_ranks_is_refused_on_every_rank_and_in_a_v_is_not():
    first, second = run_ranks(refusals, 2)
    assert first == second
    assert first[0].startswith(
        "embedding.weight of stage 0 and head.weight of stage 1 are one parameter, but ranks 0 and 1 would "
        "train a copy each: choose a schedule that puts both stages on one rank"
    )
    assert first[1] == ""


class Lazy(TiedLm):
    """What is shared is made by the first stage that needs it."""

    def __init__(self):
        self.kept = {}

    def build_stage(self, index, num_stages):
        if not self.kept:
            super().__init__()
            self.kept["x"] = 1
        return super().build_stage(index, num_stages)


def test_what_stages_share_is_found_without_memory_for_them():
    class Huge(TiedLm):
        def build_stage(self, index, num_stages):
            layer = nn.Linear(10**6, 10**6, bias=index > 0, device="cpu")  # 4 TB
            if index:
                layer.bias = self.embedding.weight
            return layer

    begin = time.perf_counter()
    assert shared_parameters(Huge().build_stage, 3) == [((1, "bias"), (2, "bias"))]
    assert time.perf_counter() - begin < 30
    assert shared_parameters(Lazy().build_stage, 4) == [((0, "embedding.weight"), (3, "head.weight"))]


def test_a_model_that_shares_nothing_is_not_refused_and_no_random_number_is_drawn():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    gpt = Gpt(num_layers=4, hidden_size=8, num_heads=2, sequence_length=8)
    assert shared_parameters(gpt.build_stage, 4) == []
    assert shared_parameters(lambda index, num_stages: nn.Linear(2, 2), 4) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_main_grad_is_refused_since_the_trainer_reads_grad():
    """The norm was 0 and nothing was trained, without a word."""
    stage = nn.Linear(2, 2)
    stage.bias.main_grad = torch.zeros(2)
    with pytest.raises(ValueError, match=r"bias has a main_grad, .*leave main_grad out"):
        Trainer(
            pipeline=Pipeline({0: stage}, plan("1f1b", 1, M), F.mse_loss),
            optimizer=torch.optim.SGD(stage.parameters()),
            data=Data(Tokens(), Tokens(), 0, 1, fingerprint=""),
            learning_rate=lambda step: 1.0,
        )
