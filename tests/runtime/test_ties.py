"""Tied parameters: one gradient and one value in all their places, as one Parameter in one process has."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.configs import composed
from helpers.processes import run_ranks
from helpers.split import assert_close
from zbpp import Pipeline, check_replicas, clip_grad_norm_, plan
from zbpp.autograd import recompute
from zbpp.models.gpt import Gpt
from zbpp.run import app
from zbpp.run.stages import prepare_stages
from zbpp.run.trainer import Plan, build_pipeline
from zbpp.runtime import AgreementError
from zbpp.runtime.processes import ties
from zbpp.runtime.processes.ties import check_ties, report_of, shared_parameters, ties_of
from zbpp.schedule import Costs
from zbpp.training.weights import save_weights

VOCAB, HIDDEN, M, STEPS = 11, 6, 4, 5
SCHEDULES = ("1f1b", "zb_h1", "zb_v", "interleaved_zb")


# ---------------------------------------------------------------- four ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Probe(nn.Module):
    """Mixes in tokens that fit: uses an embedding's weight twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, HIDDEN))

    def forward(self, x):
        return x + (x @ self.weight.t()).softmax(-1) @ self.weight


# In several places: a weight that three places have, one that two layers have, one that is frozen.
TIED = {
    "head.weight": "embedding.weight",
    "probe.weight": "head.weight",
    "layer_5.linear.weight": "layer_1.linear.weight",
    "layer_2.linear.weight": "layer_6.linear.weight",
}


class Copies:
    """Eight parts. Every place of a tied parameter has a tensor of its own, with values of its own."""

    def build_stage(self, index, num_stages):
        makers = {"embedding": lambda: nn.Embedding(VOCAB, HIDDEN), "probe": Probe}
        makers["head"] = lambda: nn.Linear(HIDDEN, VOCAB, bias=False)
        names = ["embedding", "layer_1", "layer_2", "probe", "layer_4", "layer_5", "layer_6", "head"]
        stage = nn.Sequential()
        for name in names[8 * index // num_stages : 8 * (index + 1) // num_stages]:
            stage.add_module(name, makers.get(name, Block)().double())
        for name, parameter in stage.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            nn.init.normal_(parameter, std=0.5, generator=generator)
            parameter.requires_grad_(name not in ("layer_2.linear.weight", "layer_6.linear.weight"))
        return stage

    def tied(self):
        return TIED

    def loss(self, output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


def whole():
    """The model in one process, with one Parameter for all places of a tie: the first place's."""
    model = Copies().build_stage(0, 1)
    model.probe.weight = model.head.weight = model.embedding.weight
    model.layer_5.linear.weight = model.layer_1.linear.weight
    model.layer_6.linear.weight = model.layer_2.linear.weight
    return model


def batch(step):
    tokens = torch.randint(VOCAB, (2 * M, 6), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def optimizer_of(parameters):
    trained = [each for each in parameters if each.requires_grad]
    return torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)


def in_one_process():
    """Two steps without zero_grad, clipping, an update; a third step and an update; then evaluation."""
    model, losses = whole(), []
    optimizer = optimizer_of(model.parameters())
    for step in range(3):
        inputs, target = batch(step)
        loss = Copies().loss(model(inputs), target)
        loss.backward()
        losses.append(loss.item())
        if step == 1:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        if step > 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    with torch.no_grad():
        losses.append(Copies().loss(model(batch(3)[0]), batch(3)[1]).item())
    return losses, norm, model.state_dict()


def on_four_ranks(rank, schedules, folder):
    """Per schedule what `in_one_process` returns, as this rank has it, and what refuses to load."""
    found = {}
    for schedule in schedules:
        pipeline = Pipeline(Copies(), schedule, num_microbatches=M)
        if schedule == "zb_h1":
            for block in (each for stage in pipeline.stages.values() for each in stage.children()):
                recompute(block)
        optimizer, losses = optimizer_of(pipeline.parameters()), []
        for step in range(3):
            losses += [mean(pipeline.step(batch(step)[0], target=batch(step)[1]))]
            if step == 1:
                norm = clip_grad_norm_(pipeline, 0.1).item()
            if step > 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        losses.append(mean(pipeline.evaluate(batch(3)[0], target=batch(3)[1])))
        state = {name: value.clone() for name, value in pipeline.state_dict().items()}
        num_counted = sum(each.numel() for each in pipeline.counted_parameters())
        load_and_compare(pipeline)
        found[schedule] = losses, norm, state, num_counted
    save_weights(folder, pipeline)
    pipeline.close()
    return found


def mean(losses):
    return float(sum(losses) / len(losses)) if losses else None


def load_and_compare(pipeline):
    """Load a state in which copies differ: all get one value. Then load what fits."""
    model = whole()
    own = pipeline.state_dict()
    pipeline.load_state_dict({**model.state_dict(), "head.weight": torch.ones(VOCAB, HIDDEN).double()})
    assert check_replicas(pipeline) > 0
    pipeline.load_state_dict({name: value for name, value in model.state_dict().items() if name in own})
    loaded = pipeline.state_dict()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.items())
    pipeline.load_state_dict({}, strict=False)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return run_ranks(on_four_ranks, 4, SCHEDULES, folder, timeout=200), folder


@pytest.fixture(scope="module")
def expected():
    return in_one_process()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_on_four_ranks_are_trained_as_one_parameter_in_one_process(schedule, four_ranks, expected):
    """Three places of one weight, two layers with one, a frozen one; names of a chain, in any order."""
    losses, norm, state = expected
    merged, num_counted = {}, 0
    for found in four_ranks[0]:
        own_losses, own_norm, own_state, own_counted = found[schedule]
        assert own_norm == pytest.approx(norm, rel=1e-12)
        assert own_losses in ([None] * 4, pytest.approx(losses, rel=1e-12))
        assert_close(own_state, {name: state[name] for name in own_state}, tolerance=1e-11)
        merged |= own_state
        num_counted += own_counted
    assert merged.keys() == state.keys()
    assert_close(merged, state, tolerance=1e-11)
    # Copies are equal to the last bit.
    assert torch.equal(merged["probe.weight"], merged["embedding.weight"])
    assert torch.equal(merged["head.weight"], merged["embedding.weight"])
    assert num_counted == sum(each.numel() for each in whole().parameters())


def test_saved_weights_are_a_state_dict_of_the_whole_model(four_ranks):
    from safetensors.torch import load_file

    state = {name: value for each in four_ranks[1].iterdir() for name, value in load_file(each).items()}
    assert_close(state, whole().state_dict(), tolerance=0)


def with_groups_by_stage_names(rank):
    """Copies of one weight get other options on each rank: what check_replicas says, and a later step."""
    pipeline = Pipeline(Copies(), "zb_h1", num_microbatches=M)
    groups = [{"params": [], "weight_decay": 0.0}, {"params": [], "weight_decay": 0.1}]
    for name, parameter in pipeline.named_parameters():
        groups["head" in name]["params"].append(parameter)
    optimizer, said = torch.optim.AdamW(groups, lr=0.02), []
    for step in range(2):
        try:
            pipeline.step(batch(step)[0], target=batch(step)[1])
            optimizer.step()
            if step == 0:
                check_replicas(pipeline, optimizer)
        except AgreementError as error:
            said.append(str(error))
    return said


def test_copies_of_a_tied_weight_with_other_options_of_the_optimizer_are_told():
    first, second = run_ranks(with_groups_by_stage_names, 2)
    assert first[:2] == second[:2]
    assert "for embedding.weight, so that its copies drift apart: group parameters by" in first[0]
    assert "weight_decay: '0.0' on rank 0; '0.1' on rank 1" in first[0]
    assert first[1].startswith("embedding.weight of stage 0 and probe.weight of stage 0 and head.weight of")
    assert "differ before the update of step 2: the ranks' optimizers need the same options" in first[1]


def gradients_of_tied_gpt(rank, schedules):
    """Per schedule the gradients of one step of a gpt of four stages with a tied head."""
    found = {}
    for schedule in schedules:
        model = Gpt(
            vocab_size=VOCAB, num_layers=4, hidden_size=8, num_heads=2, sequence_length=5, tie_embeddings=True
        )
        with Pipeline(model, schedule, num_microbatches=M) as pipeline:
            pipeline.step(batch(0)[0], target=batch(0)[1])
            found[schedule] = {name: each.grad for name, each in pipeline.named_parameters()}
    return found


def test_a_tied_gradient_has_equal_bits_wherever_its_stages_are_on_different_ranks():
    """On one rank, as in a V, its W's add in the timetable's order; all other gradients have equal bits."""
    everywhere = [
        run_ranks(gradients_of_tied_gpt, num, schedules)
        for num, schedules in ((4, ("zb_h1", "1f1b")), (2, ("interleaved_zb", "zb_v")))
    ]
    expected, tied = {}, "embedding.token.weight"
    for found in everywhere[0]:
        expected |= found["zb_h1"]
    assert torch.equal(expected["head.weight"], expected[tied])
    for of_ranks in everywhere:
        for found in of_ranks:
            for schedule, gradients in found.items():
                different = [n for n, each in gradients.items() if not torch.equal(each, expected[n])]
                assert different == ([] if schedule != "zb_v" or tied not in gradients else [tied])
                torch.testing.assert_close(gradients, {name: expected[name] for name in gradients})


# ---------------------------------------------------------------- one process


def reports(*ranks):
    return [report_of(stages, rank) for rank, stages in enumerate(ranks)]


def refusal(*ranks, named=None):
    """What is said about the stages of some ranks."""
    with pytest.raises(ValueError, match="stage|tied") as refused:
        resolve(ranks, named)
    return str(refused.value)


def resolve(ranks, named):
    everyone = [each._replace(named=named or {}) for each in reports(*ranks)]
    rank_of = [
        rank for _, rank in sorted((stage, rank) for rank, stages in enumerate(ranks) for stage in stages)
    ]
    ties = ties_of(everyone)
    check_ties(ties, everyone, rank_of, is_sharded=False, is_built=False)
    return ties


def linear(declared=None, size=(2, 3), dtype=torch.float32, **modules):
    stage = nn.ModuleDict({"a": nn.Linear(*size, bias=False, dtype=dtype), **modules})
    if declared is not None:
        stage.tied_parameters = declared
    return stage


A_TO_FIRST = {"a.weight": (0, "a.weight")}


def test_ties_join_whatever_way_they_are_declared():
    stages = [linear() for _ in range(5)]
    stages[1].tied_parameters = A_TO_FIRST
    stages[2].tied_parameters = {"a.weight": (1, "a.weight")}  # a chain
    stages[3].b = nn.Linear(2, 3, bias=False)
    stages[3].tied_parameters = {"b.weight": (2, "a.weight")}
    stages[4].tied_parameters = {"a.weight": "b.weight"}
    stages[0].tied_parameters = {"a.weight": (1, "a.weight")}  # both ways
    everyone = reports({0: stages[0], 3: stages[3]}, {1: stages[1], 2: stages[2]}, {4: stages[4]})
    expected = [((0, "a.weight"), (1, "a.weight"), (2, "a.weight"), (3, "b.weight"), (4, "a.weight"))]
    assert ties_of(everyone) == expected
    ties = resolve([{0: linear()}, {1: linear()}], {"a.weight": "a.weight"})
    assert ties == [((0, "a.weight"), (1, "a.weight"))]


SPARSE = {"a": nn.Embedding(3, 2, sparse=True)}
REFUSED = [
    ([{0: linear()}, {1: linear({"b.weight": "a.weight"})}], "declares b.weight in tied_parameters, but"),
    (
        [{0: linear()}, {1: linear({"a.weight": "b.weight"})}],
        "to be tied to b.weight, which no other stage ha",
    ),
    (
        [{0: linear({"a.weight": (1, "b.weight")})}, {1: linear()}],
        "(1, 'b.weight'), which no other stage has",
    ),
    ([{0: linear(A_TO_FIRST)}], "to be tied to (0, 'a.weight'), which no other stage has"),
    (
        [{0: linear(), 1: linear()}, {2: linear({"a.weight": "a.weight"})}],
        "which stages 0, 1 have: write tied",
    ),
    ([{0: linear({"a.weight": 3})}], "write tied_parameters = {'a.weight': (stage, name)}"),
    ([{0: linear()}, {1: linear(A_TO_FIRST, size=(2, 4))}], "but one is [3, 2] torch.float32 trained"),
    (
        [{0: linear()}, {1: linear(A_TO_FIRST, dtype=torch.float64)}],
        "the other [3, 2] torch.float64 trained: ",
    ),
    ([{0: linear()}, {1: linear(A_TO_FIRST).requires_grad_(False)}], "the other [3, 2] torch.float32 frozen"),
    ([{0: nn.ModuleDict(SPARSE)}, {1: linear(A_TO_FIRST)}], "write sparse=False"),
    ([{0: linear(), 1: linear(A_TO_FIRST)}], "of stage 1 are tied and on one rank, but they are two tensors"),
    (  # by way of another rank's stage
        [{0: linear(), 2: linear({"a.weight": (1, "a.weight")})}, {1: linear(A_TO_FIRST)}],
        "a.weight of stage 0 and a.weight of stage 2 are tied and on one rank, but they are two tensors",
    ),
]


@pytest.mark.parametrize(("ranks", "message"), REFUSED)
def test_ties_that_are_impossible_are_refused(ranks, message):
    assert message in refusal(*ranks)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_rank_that_has_all_places_gets_one_parameter(num_stages):
    """In a V and inside of a stage: as many parameters as in one process, with the first place's values."""
    pipeline = Pipeline(Copies(), plan("interleaved_zb", 1, M, stages_per_rank=num_stages), seed=0)
    assert_close(pipeline.state_dict(), whole().state_dict(), tolerance=0)
    assert len(list(pipeline.parameters())) == len(list(whole().parameters()))
    inputs, target = batch(0)
    pipeline.step(inputs, target=target)
    model = whole()
    Copies().loss(model(inputs), target).backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    found = {name: each.grad for name, each in pipeline.named_parameters() if each.requires_grad}
    assert_close(found, expected)


def test_a_run_asks_for_the_ties_of_its_stages_once(monkeypatch):
    """The Pipeline asked again."""
    asked, report = [], ties._report
    monkeypatch.setattr(ties, "_report", lambda *given: asked.append(given) or report(*given))
    config = composed("schedule=zb_v", "model=llama_tiny", "model.tie_embeddings=true")
    timetable, device = plan("zb_v", 1, M), torch.device("cpu")
    parts = app.build_parts(config, timetable, 0)
    parts = prepare_stages(config, parts, timetable, None, device)
    pipeline = build_pipeline(config, Plan(timetable, Costs()), parts.model, parts.stages)
    found = {name for names, _ in pipeline.parameter_names() for name in names if len(names) > 1}
    assert found == {"embedding.weight", "head.weight"}
    assert len(asked) == 1


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


# ---------------------------------------------------------------- found by building on the meta device


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
    assert time.perf_counter() - begin < 150
    assert shared_parameters(Lazy().build_stage, 4) == [((0, "embedding.weight"), (3, "head.weight"))]
