"""What a Pipeline may be given: stages or a model that builds them, a timetable or a schedule's name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.models.mlp import Mlp
from zbpp.runtime import AgreementError, CommunicationError
from zbpp.runtime.arguments import device_of

M, SIZE = 4, 6


def mlp():
    return Mlp(in_features=SIZE, hidden_size=SIZE, out_features=SIZE, num_layers=4)


def module():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def batch():
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(2 * M, SIZE, generator=generator) for _ in range(2))
    return x, target


def trained(pipeline):
    """Losses of one step, and the gradients by name."""
    x, target = batch()
    losses = [loss.item() for loss in pipeline.step(x, target=target)]
    return losses, {name: parameter.grad for name, parameter in pipeline.named_parameters()}


# ---------------------------------------------------------------- a model in place of stages


def by_model_and_by_hand(rank, num_ranks, schedules):
    """Per schedule, what a step gives with a model, and with the stages that the timetable says."""
    found = []
    for schedule in schedules:
        model, timetable = mlp(), plan(schedule, num_ranks, M)
        stages = {s: model.build_stage(s, timetable.num_stages) for s in timetable.stages_of(rank)}
        with Pipeline(stages, timetable, model.loss) as by_hand:
            expected = trained(by_hand)
        with Pipeline(mlp(), schedule, num_microbatches=M) as by_model:
            found.append((trained(by_model), expected))
            assert list(by_model.stages) == timetable.stages_of(rank)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_trains_as_the_stages_that_it_builds_given_by_hand(num_ranks):
    schedules = ["zb_h1", "zb_v", "interleaved_1f1b"]
    for of_rank in run_ranks(by_model_and_by_hand, num_ranks, num_ranks, schedules):
        for (losses, grads), (expected_losses, expected_grads) in of_rank:
            assert losses == expected_losses
            assert grads.keys() == expected_grads.keys()
            assert len(grads) > 0
            assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)


class TwoLayers:
    """Can't be cut into more than two stages, as stage 2 finds out."""

    loss = staticmethod(F.mse_loss)

    def build_stage(self, index, num_stages):
        return [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)][index]


def told(rank, schedule, models):
    """What making a Pipeline of each model says on this rank."""
    texts = []
    for model in models:
        try:
            Pipeline(model(), schedule, num_microbatches=M)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_a_stage_that_one_rank_cannot_build_is_an_error_on_every_rank():
    text = "rank 2: build_stage(2, 3) of TwoLayers raised IndexError: list index out of range"
    assert run_ranks(told, 3, "1f1b", [TwoLayers]) == [[text]] * 3


# ---------------------------------------------------------------- what ranks must share

DIFFERENT = [  # what rank 0 and rank 1 are given, and what both are told
    ({}, {"timetable": "1f1b"}, "timetable: 'zb_h1' on rank 0; '1f1b' on rank 1"),
    ({"num_microbatches": 2}, {}, "num_microbatches: 2 on rank 0; 4 on rank 1"),
    ({}, {"timetable": plan("zb_h1", 2, 4)}, "on rank 0; 'a Timetable with the hash "),
    ({"reshard": "microbatch"}, {}, "reshard: 'microbatch' on rank 0; 'step' on rank 1"),
    ({"seed": 1}, {"seed": 2}, "seed: 1 on rank 0; 2 on rank 1"),
]


def given_others(rank):
    """What this rank is told of each pair of DIFFERENT; then of loss scales that differ in a step."""
    said, module = [], {rank: nn.Linear(SIZE, SIZE)}
    common = {"timetable": "zb_h1", "num_microbatches": M, "loss_fn": F.mse_loss}
    for *given, _ in DIFFERENT:
        with pytest.raises(AgreementError) as caught:
            Pipeline(module, **common | given[rank])
        said.append(str(caught.value))
    pipeline, x = Pipeline(module, **common), torch.ones(M, SIZE)
    pipeline.loss_scale = 4.0
    pipeline.step(x, target=x)
    pipeline.loss_scale = 4.0 / (1 + rank)
    with pytest.raises((AgreementError, CommunicationError)) as caught:
        pipeline.step(x, target=x)
    return [*said, str(caught.value)]


def test_arguments_and_loss_scales_that_differ_between_ranks_are_told_with_who_has_which():
    first, second = run_ranks(given_others, 2)
    assert first[:-1] == second[:-1]
    for told, (*_, expected) in zip(first, DIFFERENT, strict=False):
        assert expected in told
    assert second[-1].startswith("pipeline.loss_scale is 4 on rank 0 and 2 on rank 1: set the same on all")


# ---------------------------------------------------------------- a schedule's name in place of a timetable


def test_a_schedules_name_is_planned():
    x = torch.ones(8, 4)
    pipeline = Pipeline({0: module()}, "zb_h1", num_microbatches=4, loss_fn=F.mse_loss)
    assert pipeline.timetable == plan("zb_h1", 1, 4)
    assert len(pipeline.step(x, target=x)) == 4


def test_a_name_without_a_process_group_is_refused_under_torchrun(monkeypatch):
    """Each process would train the whole model by itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun started 2 processes, but there is no process group"):
        Pipeline(mlp(), "zb_h1", num_microbatches=4)
    timetable = plan("zb_h1", 1, 4)
    assert Pipeline({0: module()}, timetable, F.mse_loss).timetable == timetable


# ---------------------------------------------------------------- refusals


class NoLoss:
    def build_stage(self, index, num_stages):
        return nn.Linear(SIZE, SIZE)


class Forgetful(NoLoss):
    loss = staticmethod(F.mse_loss)

    def build_stage(self, index, num_stages):
        super().build_stage(index, num_stages)


class Unmade(Forgetful):
    def build_stage(self, index, num_stages):
        return nn.Linear(SIZE, SIZE, device="meta")


class AList(Forgetful):
    def build_stage(self, index, num_stages):
        return [nn.Linear(SIZE, SIZE)]


class OneArgument(Forgetful):
    def build_stage(self, index):
        return nn.Linear(SIZE, SIZE)


class Checked(Mlp):
    def check_pipeline(self, pipeline):
        if len([*pipeline.parameters()]) != 3:
            raise ValueError("not three parameters")


FOUR = plan("zb_h1", 1, 4)
REFUSED = [
    ((Mlp, FOUR), {}, ValueError, r"the class Mlp: give an instance of it, Mlp\(\)"),
    (
        (NoLoss(), FOUR),
        {},
        ValueError,
        r"stages is a NoLoss, a model that lacks loss\(self, output, target\): write",
    ),
    (
        (Forgetful(), FOUR),
        {},
        ValueError,
        r"build_stage\(0, 1\) of Forgetful returned a NoneType, not a .*is a return",
    ),
    (
        ({0: nn.Linear(SIZE, SIZE, device="meta")}, FOUR),
        {},
        ValueError,
        r"stage 0 has weight on the meta device, where tensors have no values: call stage.to_empty\(",
    ),
    ((Unmade(), FOUR), {}, ValueError, r"stage 0 has weight on the meta device"),
    ((AList(), FOUR), {}, ValueError, r"returned a list, not a torch.nn.Module: return the one stage"),
    (
        (OneArgument(), FOUR),
        {},
        ValueError,
        r"build_stage of OneArgument: too many .*; write def build_stage\(self",
    ),
    (
        (Checked(in_features=SIZE, hidden_size=SIZE, out_features=SIZE, num_layers=2), FOUR),
        {},
        ValueError,
        "^not three parameters$",
    ),
    (
        (module(), FOUR),
        {},
        ValueError,
        r"a Sequential, a whole .*trace_stages cuts .*HuggingFace\(path=.*\{0: ",
    ),
    (([module()], FOUR), {}, ValueError, r"stages is a list: write .*, or give a model"),
    (({0: module()}, FOUR), {"device": "cuda"}, ValueError, "is for the stages that a model builds: move"),
    ((module(),), {}, TypeError, "needs a timetable, no timetable was given: write Pipeline"),
    (({0: module()}, 4), {}, TypeError, "needs a timetable, got int"),
    (({0: module()}, "zb_h1"), {}, ValueError, "does not say num_microbatches: add num_microbatches=8"),
    (({0: module()}, FOUR), {"num_microbatches": 8}, ValueError, "but the timetable has 4: leave"),
]


@pytest.mark.parametrize(("given", "keywords", "error", "said"), REFUSED)
def test_arguments_that_make_no_pipeline_are_refused(given, keywords, error, said):
    with pytest.raises(error, match=said) as caught:
        Pipeline(*given, **keywords)
    assert caught.value.__cause__ is None  # else its traceback, and Python's frames in it, come first


# ---------------------------------------------------------------- wrapped stages


def wrapped(rank):
    """What is said of each wrapper, on a rank whose own stage is a plain one, too."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    inner = module()
    fully_shard(inner[0], mesh=mesh)
    stages = {
        "DistributedDataParallel": DistributedDataParallel(module()),
        "FSDP2 (fully_shard)": fully_shard(module(), mesh=mesh),
        "FSDP2 (fully_shard), a part": inner,
        "FullyShardedDataParallel": FullyShardedDataParallel(module(), device_id=torch.device("cpu")),
    }
    told = {}
    for name, stage in stages.items():
        try:
            Pipeline({rank: stage if rank == 1 else module()}, plan("zb_h1", 2, 2), F.mse_loss)
        except ValueError as error:
            told[name] = str(error)
    return told


@pytest.mark.filterwarnings("ignore")
def test_wrapped_stages_are_refused_on_every_rank():
    for told in run_ranks(wrapped, 2):
        assert len(told) == 4
        for name, text in told.items():
            wrapper = name.partition(", ")[0]
            assert text.startswith(f"rank 1: stage 1 is wrapped in {wrapper}")
            assert "Pipeline(..., mesh=zbpp.make_mesh(" in text


def test_stages_without_tensors_have_their_messages_on_the_device_that_was_given():
    """In a job on gloo, where stages may be on GPUs, it was the CPU."""
    assert device_of([nn.Identity()], None, "meta") == torch.device("meta")
    # A stage without tensors goes where the other ranks' stages are: "meta" stands for a GPU.
    assert device_of([nn.Identity()], None, None, {"meta"}) == torch.device("meta")
    assert device_of([nn.Identity()], None, None, {"meta", "cpu"}) == torch.device("cpu")
    assert device_of([nn.Linear(1, 1)], None, "meta") == torch.device("cpu")  # a module's own place counts
