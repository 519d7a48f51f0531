"""The program of docs/from_scratch.md, which has no zbpp in it, trains as zbpp does."""

import re

import pytest
import torch

from helpers.pages import blocks, run_command
from helpers.processes import run_ranks
from zbpp import Pipeline, plan

MOST_LINES = 200
STEPS = 4
PROGRAM = "\n\n".join(blocks("docs/from_scratch.md", "python"))


def losses_of_zbpp(rank, num_ranks):
    """The mean loss of each step, on the last rank."""
    program = {"__name__": "from_scratch"}
    exec(PROGRAM, program)
    microbatches = program["MICROBATCHES"]
    stage = program["build"](rank)
    pipeline = Pipeline({rank: stage}, plan("zb_h1", num_ranks, microbatches), torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.parameters(), lr=30.0)
    x, target = (each.flatten(0, 1) for each in program["batch"]())
    found = []
    for _ in range(STEPS):
        losses = pipeline.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            found.append(sum(map(float, losses)) / microbatches)
    return found


@pytest.mark.parametrize("schedule, name", [("1f1b", "1F1B"), ("zb_h1", "ZB-H1")])
def test_the_programs_timetables_are_those_of_zbpp(schedule, name):
    program = {"__name__": "from_scratch"}
    exec(PROGRAM, program)
    rows = str(plan(schedule, 2, program["MICROBATCHES"])).splitlines()
    assert program["TIMETABLES"][name] == [re.sub(r"\b\d(?=[A-Z])", "", row) for row in rows]


def test_the_program_is_short_and_its_losses_are_those_of_zbpp(tmp_path):
    assert len(PROGRAM.splitlines()) <= MOST_LINES
    assert "zbpp" not in PROGRAM
    (tmp_path / "from_scratch.py").write_text(PROGRAM)
    printed = run_command(f"STEPS={STEPS} torchrun --nproc-per-node 2 from_scratch.py", tmp_path)
    assert len(re.findall(r"bubble -?\d", printed)) == 2
    expected = run_ranks(losses_of_zbpp, 2, 2)[1]
    for name in ("1F1B", "ZB-H1"):
        found = [float(each) for each in re.findall(rf"^{name} .* loss (\S+)", printed, flags=re.M)]
        assert found == pytest.approx(expected, rel=1e-12)
    assert expected[-1] < 0.95 * expected[0]
