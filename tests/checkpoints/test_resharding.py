"""A run that is saved under one cut goes on under any other, as if it had never stopped."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

import zbpp
from helpers.processes import run_ranks
from zbpp.models.llama import Llama
from zbpp.runtime.processes.mesh import MeshPosition
from zbpp.runtime.processes.tensor_parallel import parallelize
from zbpp.runtime.processes.ties import agree_on_ties
from zbpp.training.optim.optimizer import adamw

ROWS, TIME, VOCAB, STEPS, SAVED = 8, 6, 13, 3, 1
SHAPES = {  # schedule, number of microbatches of each data part, mesh
    "pp4 zb_h1": ("zb_h1", 4, {}),
    "pp2 zb_v": ("zb_v", 4, {}),
    "pp1": ("1f1b", 4, {}),
    "pp2 x replicate2": ("zb_h1", 2, {"replicate": 2}),
    "pp2 x shard2": ("zb_h1", 2, {"shard": 2}),
    "pp2 x tensor2": ("zb_v", 4, {"tensor": 2}),
    "shard2 x tensor2": ("1f1b", 2, {"shard": 2, "tensor": 2}),
    "experts pp2 x expert2": ("zb_h1", 2, {"replicate": 2, "expert": 2}),
    "experts expert4": ("1f1b", 1, {"replicate": 4, "expert": 4}),
    "experts shard4 x expert2": ("1f1b", 1, {"shard": 4, "expert": 2}),
    "experts pp1": ("1f1b", 4, {}),
}


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCAB, (ROWS, TIME + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


class Run:
    """Everything of a run under one of the shapes."""

    def __init__(self, shape):
        schedule, num_microbatches, degrees = SHAPES[shape]
        mesh = zbpp.make_mesh(**degrees) if degrees else None
        model = Llama(
            vocab_size=VOCAB,
            num_layers=4,
            hidden_size=8,
            num_heads=2,
            sequence_length=TIME,
            tie_embeddings=True,
            experts=4 if "experts" in shape else None,
        )
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        rank = torch.distributed.get_rank() if ranks > 1 else 0
        for name, degree in degrees.items():
            ranks //= 1 if name == "expert" else degree
        rank = mesh.get_local_rank("pipeline") if mesh else rank
        timetable = zbpp.plan(schedule, ranks, num_microbatches)
        stages = {
            index: model.build_stage(index, timetable.num_stages) for index in timetable.stages_of(rank)
        }
        for stage in stages.values():
            for name, parameter in stage.named_parameters():
                parameter.requires_grad_("mlp_norm" not in name)
        parallelize(model, stages, mesh)
        place = MeshPosition(mesh)
        agree_on_ties(stages, timetable.rank_of, place, model)
        self.pipeline = zbpp.Pipeline(stages, timetable, model.loss, mesh=mesh)
        self.optimizer = adamw(
            self.pipeline.parameters(), learning_rate=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def losses(self, first, last):
        place, found = self.pipeline.place, []
        for step in range(first, last):
            rows = ROWS // place.num_data_parts
            mine = slice(place.data_part * rows, (place.data_part + 1) * rows)
            x, y = (each[mine] for each in tokens(step))
            losses = self.pipeline.step(x, target=y)
            zbpp.clip_grad_norm_(self.pipeline, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            parts = [float(sum(each) / len(each)) for each in place.gather(losses) if each]
            found.append(sum(parts) / len(parts))
        return found

    def save(self, folder, step):
        states = {"scheduler": self.scheduler}
        zbpp.save(folder, self.pipeline, self.optimizer, step=step, background=True, **states).wait()

    def load(self, folder):
        return zbpp.load(folder, self.pipeline, self.optimizer, scheduler=self.scheduler)


def saved_run(folder, shape):
    """The losses of a whole run, saved after a few steps into a folder named after the shape."""
    run = Run(shape)
    begin = run.losses(0, SAVED)
    before = groups()
    run.save(folder / shape, SAVED)
    made = groups() - before
    found = begin + run.losses(SAVED, STEPS)
    run.pipeline.close()
    assert made
    assert not made & groups()
    return found


def groups():
    """The names of all process groups that are open."""
    return {*dist.distributed_c10d._world.pg_names.values()}


def resumed_runs(rank, folder, pairs):
    """Per shape that was saved and shape that goes on: the losses after the checkpoint."""
    found = {}
    for origin, shape in pairs:
        run = Run(shape)
        assert run.load(folder / origin) == SAVED
        assert run.pipeline.num_steps == SAVED
        found[origin, shape] = run.losses(SAVED, STEPS)
        run.pipeline.close()
    return found


def saved_and_resumed_runs(rank, folder, origins, pairs):
    """Both in one launch of processes; the runs that go on read everything from the files."""
    whole = {origin: saved_run(folder, origin) for origin in origins}
    return whole, resumed_runs(rank, folder, pairs)


PIPELINE, PARTS = ORIGINS = ["pp4 zb_h1", "shard2 x tensor2"]
FOUR = ["pp4 zb_h1", "pp2 x replicate2", "pp2 x shard2", "pp2 x tensor2", "shard2 x tensor2"]
BY_DAY = [
    (PIPELINE, PIPELINE),
    (PIPELINE, "pp2 x shard2"),
    (PARTS, "pp2 x replicate2"),
    (PARTS, PARTS),
]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(BY_DAY, id="some"),
        pytest.param([*product(ORIGINS, FOUR)], id="all", marks=pytest.mark.nightly),
    ],
)
def test_a_run_goes_on_under_any_other_shape(tmp_path, pairs):
    """On four ranks, two and one."""
    whole, found = run_ranks(saved_and_resumed_runs, 4, tmp_path, ORIGINS, pairs)[0]
    found |= run_ranks(resumed_runs, 2, tmp_path, [*product(ORIGINS, ["pp2 zb_v"])])[0]
    found |= resumed_runs(0, tmp_path, [*product(ORIGINS, ["pp1"])])
    assert len(found) == len(pairs) + 2 * len(ORIGINS)
    for origin, shape in found:
        assert found[origin, shape] == pytest.approx(whole[origin][SAVED:], rel=1e-6), (origin, shape)
        if shape == origin:
            assert found[origin, shape] == whole[origin][SAVED:]


EXPERTS = ["experts pp2 x expert2", "experts expert4", "experts shard4 x expert2"]
IN_A_CIRCLE = [*zip(EXPERTS, [*EXPERTS[1:], EXPERTS[0]], strict=True)]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(IN_A_CIRCLE, id="in a circle"),
        pytest.param([*product(EXPERTS, EXPERTS)], id="all", marks=pytest.mark.nightly),
    ],
)
def test_experts_go_on_on_another_number_of_processes(tmp_path, pairs):
    """Saved by two, which hold half of them each, by four, and in shards; loaded by another and by one."""
    whole, found = run_ranks(saved_and_resumed_runs, 4, tmp_path, EXPERTS, pairs)[0]
    found |= resumed_runs(0, tmp_path, [*product(EXPERTS, ["experts pp1"])])
    assert len(found) == len(pairs) + len(EXPERTS)
    for origin, shape in found:
        assert found[origin, shape] == pytest.approx(whole[origin][SAVED:], rel=1e-6)
