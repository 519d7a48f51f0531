"""`zbpp train`, `bench` and `measure` as they are started: what a job writes, and how it refuses or ends.

Few real starts, of zbpp as a wheel installs it; several tests look at each. The jobs' ranks are forks of a
process that has imported torch; those of test_wheel.py are new ones. What is refused before ranks join is
tried in this process.
"""

import importlib
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from torch import nn

from helpers.processes import run_ranks
from helpers.runs import losses_in, metrics_in
from zbpp import config as configs
from zbpp import launch
from zbpp.checkpoints import CheckpointError
from zbpp.commands import command_line, compare
from zbpp.commands import train as commands_train
from zbpp.data import text_data
from zbpp.job.world import DeviceError, world
from zbpp.launch import RankDeath, RankError, Refusal, on_ranks
from zbpp.models.gpt import Gpt
from zbpp.planning import SCHEDULES, plan
from zbpp.render.style import headline
from zbpp.run import app, results
from zbpp.run import plan as plans
from zbpp.run import trainer as trainer_parts
from zbpp.schedule import PlanError, to_csv

ROOT = Path(__file__).parent.parent
TINY = ["steps=3", "num_microbatches=4", "microbatch_size=2", "parallel.device=cpu", "parallel.timeout=100"]
GPT = ["model=gpt_tiny", "model.num_layers=4", "model.hidden_size=16", "model.sequence_length=16"]
KNOWN = ", ".join(SCHEDULES)
MLP = ["model=mlp", "model.num_layers=4", "data=regression"]

configs.register()


def train(overrides):
    """app.train in this process, from overrides as `zbpp train` gets them."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("train", overrides=overrides)
    return app.train(configs.Composed.of(config))


# ---------------------------------------------------------------- a job that succeeds


@pytest.fixture(scope="module")
def job(tmp_path_factory, warm):
    """Two ranks train a tiny GPT on a text file, with wandb offline beside metrics.jsonl."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    overrides = [
        "schedule=zb_h1", *GPT, *TINY, "data=text", "data.path=corpus.txt", "logger=wandb",
        "evaluate_every=2", "run_dir=runs/first",
    ]  # fmt: skip
    done = warm.start(folder, warm.torchrun("-m", "zbpp.train", *overrides), WANDB_MODE="offline")
    assert done.rc == 0, done.text
    return SimpleNamespace(folder=folder, run=folder / "runs/first", text=done.text)


@pytest.mark.slow
def test_a_step_is_a_line_of_metrics(job):
    lines = metrics_in(job.run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert {"step", "loss", "grad_norm", "tokens_per_second"} <= line.keys()
        assert 0 < line["loss"] < 6
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
    assert ["evaluation_loss" in line for line in lines] == [False, True, True]


@pytest.mark.slow
def test_the_summary_says_what_ran_and_how(job):
    summary = json.loads((job.run / "summary.json").read_text())
    assert (summary["schedule"], summary["num_ranks"], summary["num_microbatches"]) == ("zb_h1", 2, 4)
    assert 0 <= summary["predicted_bubble_rate"] < 1
    assert 0 <= summary["measured_bubble_rate"] < 1
    assert summary["tokens_per_second"] > 0
    assert len(summary["peak_memory_bytes"]) == 2
    assert all(isinstance(peak, int) and peak > 2**20 for peak in summary["peak_memory_bytes"])


@pytest.mark.slow
def test_the_timeline_is_a_picture_and_a_trace(job):
    assert (job.run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((job.run / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    names = [event["name"] for event in events if event.get("ph") == "X"]
    # Predicted and measured: 2 stages, 4 microbatches, F, B and W; 4 x's and 4 g's, each sent and received.
    assert len(names) == 2 * (2 * 4 * 3 + 8 * 2)
    assert {"0F0", "1B3", "1W3"} <= set(names)


@pytest.mark.slow
def test_the_weights_of_all_stages_make_the_uncut_model_in_one_process(job):
    files = sorted(job.run.glob("*.safetensors"))
    assert [file.name for file in files] == ["stage-0-of-2.safetensors", "stage-1-of-2.safetensors"]
    model = Gpt(num_layers=4, hidden_size=16, num_heads=4, sequence_length=16)
    whole = model.build_stage(0, 1)
    untrained = {name: weight.clone() for name, weight in whole.state_dict().items()}
    whole.load_state_dict({name: weight for file in files for name, weight in load_file(file).items()})
    assert not any(torch.equal(weight, untrained[name]) for name, weight in whole.state_dict().items())
    data = text_data(path=job.folder / "corpus.txt", sequence_length=16, vocab_size=256, batch_size=8, seed=0)
    batches = [data.evaluation.batch(number) for number in range(2)]
    losses = [model.loss(whole(inputs), target).item() for inputs, target in batches]
    summary = json.loads((job.run / "summary.json").read_text())
    assert summary["evaluation_loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


@pytest.mark.slow
def test_the_job_writes_one_run_folder_and_nothing_beside_it(job):
    assert sorted(path.name for path in job.folder.iterdir() if path.name != "private") == [
        "corpus.txt",
        "runs",
    ]
    assert [path.name for path in (job.folder / "runs").iterdir()] == ["first"]
    assert {path.name for path in job.run.iterdir()} == {
        "config.yaml", "job.json", "metrics.jsonl", "summary.json", "timeline.png", "trace.json", "wandb",
        "checkpoints",
        "stage-0-of-2.safetensors", "stage-1-of-2.safetensors",
    }  # fmt: skip
    assert "${" not in (job.run / "config.yaml").read_text()
    assert len(list((job.run / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert job.text.count("step 3/3") == 1  # rank 0 alone shows progress


# ---------------------------------------------------------------- a job of a user's own files

OWN = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from zbpp.models.mlp import Mlp

class Classifier(Mlp):
    def loss(self, output, target):
        return F.cross_entropy(output, target)

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(1) == target).float().mean()}

def points(batch_size):
    x = torch.linspace(-1, 1, 40 * 8).view(8, 40).T.contiguous()
    y = (x[:, 0] > -0.9).long()
    parts = [TensorDataset(x[part], y[part]) for part in (slice(24), slice(24, None))]
    return tuple(DataLoader(part, batch_size, drop_last=True) for part in parts)
"""
OWN_CHOICES = [
    "model=mlp", "model.num_layers=4", "model._target_=own.Classifier", "model.in_features=8", *TINY,
    "model.out_features=2", "data=custom", "data._target_=own.points", "run_dir=run",
]  # fmt: skip


@pytest.fixture(scope="module")
def own_job(tmp_path_factory, warm):
    """Two ranks train a model of the user's on a DataLoader of the user's, by a plan in a file."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    (folder / "by_hand.csv").write_text(to_csv(plan("v_half", 2, 4)))
    overrides = [*OWN_CHOICES, "schedule=1f1b", "schedule.timetable=by_hand.csv", "num_microbatches=null"]
    done = warm.start(folder, warm.torchrun("-m", "zbpp.train", *overrides))
    assert done.rc == 0, done.text
    lines = metrics_in(folder / "run")
    return SimpleNamespace(folder=folder, lines=lines, text=done.text)


@pytest.mark.slow
def test_a_loader_feeds_the_trainer_and_a_models_own_metrics_are_logged(monkeypatch, own_job):
    monkeypatch.syspath_prepend(own_job.folder)
    own = importlib.import_module("own")
    model = own.Classifier(in_features=8, hidden_size=64, out_features=2, num_layers=4)
    whole = model.build_stage(0, 1)
    train, held_out = own.points(8)
    inputs, target = next(iter(train))
    assert own_job.lines[0]["loss"] == pytest.approx(F.cross_entropy(whole(inputs), target).item(), rel=1e-5)
    files = (own_job.folder / "run").glob("*.safetensors")
    whole.load_state_dict({name: each for file in files for name, each in load_file(file).items()})
    right = torch.cat([whole(inputs).argmax(1) == target for inputs, target in held_out])
    assert own_job.lines[-1]["evaluation_accuracy"] == pytest.approx(right.double().mean().item())
    summary = json.loads((own_job.folder / "run/summary.json").read_text())
    assert summary["evaluation_accuracy"] == own_job.lines[-1]["evaluation_accuracy"]
    assert f"accuracy {summary['evaluation_accuracy']:.4f}" in own_job.text


@pytest.mark.slow
def test_a_schedule_that_was_given_beside_a_plans_file_is_said_to_be_unused(own_job):
    assert "the plan is that of by_hand.csv: schedule=1f1b is not used\n" in own_job.text


@pytest.mark.slow
def test_what_are_no_tokens_are_rows(own_job):
    assert all(line["rows_per_second"] > 0 for line in own_job.lines)
    assert "tokens" not in own_job.text
    assert "tokens_per_second" not in (own_job.folder / "run/summary.json").read_text()


@pytest.mark.slow
def test_a_run_by_a_plan_in_a_file_executes_that_plan(own_job):
    summary = json.loads((own_job.folder / "run/summary.json").read_text())
    assert (summary["schedule"], summary["num_stages"], summary["num_microbatches"]) == ("by_hand", 4, 4)
    assert "by_hand  step 3/3" in own_job.text


@pytest.mark.slow
def test_a_rank_that_raises_brings_the_job_down_with_its_traceback_first(tmp_path, warm):
    (tmp_path / "failing.py").write_text(
        """
from torch import nn
from zbpp.models.mlp import Mlp

class Fails(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 4:
            raise ArithmeticError("planted on stage 1 at microbatch 3")
        return x

class FailingMlp(Mlp):
    def build_stage(self, index, num_stages):
        stage = super().build_stage(index, num_stages)
        if index == 1:
            stage.add_module("fails", Fails())
        return stage
"""
    )
    overrides = [
        *MLP,
        *TINY[:-1],
        "parallel.timeout=1000",
        "model._target_=failing.FailingMlp",
        "run_dir=run",
    ]
    # A wait of the other rank would outlast this test, and torchrun kills what outlasts its grace.
    done = warm.start(tmp_path, warm.torchrun("-m", "zbpp.train", *overrides))
    assert done.rc != 0
    assert "SIGKILL" not in done.text
    first = done.text.index("Traceback")
    planted = done.text.index("ArithmeticError: planted on stage 1 at microbatch 3")
    assert "[rank1]" in done.text[first - 20 : planted]
    assert "CommunicationError" not in done.text[:planted]
    assert done.text.count("Traceback", first, planted) == 1
    root_cause = done.text[done.text.index("Root Cause") :]
    assert "rank      : 1" in root_cause
    assert "ArithmeticError: planted" in root_cause


@pytest.mark.slow
def test_configs_that_differ_between_ranks_end_the_job_with_the_difference(tmp_path, warm):
    (tmp_path / "uneven.py").write_text(
        "import os, runpy, sys\n"
        'sys.argv += ["steps=4", "optimizer.eps=1e-6"] if os.environ["RANK"] == "1" else []\n'
        'runpy.run_module("zbpp.train", run_name="__main__")\n'
    )
    overrides = [*MLP, *TINY, "run_dir=run"]
    done = warm.start(tmp_path, warm.torchrun("uneven.py", *overrides))
    assert done.rc != 0
    assert "error: the ranks of this job have different configs:" in done.text
    assert (
        "  optimizer.eps: 1e-08 on rank 0; 1e-06 on rank 1\n  steps: 3 on rank 0; 4 on rank 1\n" in done.text
    )
    assert not list(tmp_path.rglob("metrics.jsonl"))


# ---------------------------------------------------------------- refused before any rank joins the others


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule=auto", "schedule.replan=2"], "schedule.replan: unknown schedule '2'"),
        (["schedule=zb_h2", "num_microbatches=2"], "zb_h2 needs num_microbatches >= 2 * num_ranks - 1 = 3"),
        (["schedule=zb_v", "model.num_layers=3"], "model: num_layers=3 is fewer than the 4 stages"),
        (
            ["parallel.num_processes=4"],
            "parallel.num_processes=4, but torchrun started 2: write torchrun --nproc-per-node 4 -m",
        ),
        (["schedule.memory_limit=12GiB"], "12GiB"),
        (
            ["schedule.costs=none.json"],
            "schedule.costs=none.json: No such file or directory; zbpp measure wr",
        ),
        (["schedule.costs=/"], "schedule.costs=/: Is a directory; zbpp measure writes such a file"),
        (["schedule.costs=/dev/null"], "schedule.costs: /dev/null: line 1, column 1 is no JSON"),
        (
            ["schedule.timetable=none.txt"],
            "schedule.timetable=none.txt: No such file or directory; zbpp plan",
        ),
        (["data=text", "data.path=nowhere"], "nowhere' does not exist"),
        (
            ["model._target_=collections.Counter"],
            "lacks build_stage(self, index, num_stages) and loss(self, output",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_work_starts(monkeypatch, tmp_path, overrides, message):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises((configs.ConfigError, PlanError)) as caught:
        train(["model=gpt_tiny", *overrides, f"run_dir={tmp_path}/run"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert not dist.is_initialized()


# ---------------------------------------------------------------- a user's own model, ranks without torchrun


TOWER = """
import torch
from torch import nn
from zbpp import split_layers

class Tower:
    def __init__(self, hidden_size):
        self.hidden_size = hidden_size

    def build_stage(self, index, num_stages):
        stage = nn.Sequential()
        for layer in split_layers(8, num_stages)[index]:
            torch.manual_seed(layer)
            stage.add_module(f"layer_{layer}", nn.Linear(self.hidden_size, self.hidden_size))
        return stage

    def loss(self, output, target):
        return nn.functional.mse_loss(output, target)
"""


@pytest.mark.slow
def test_a_model_in_the_current_folder_and_its_config_train_alike_on_one_and_two_ranks(
    monkeypatch, tmp_path, warm
):
    """The model is named in a config folder of the user's; -n starts the ranks."""
    (tmp_path / "my_file.py").write_text(TOWER)
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/tower.yaml").write_text("_target_: my_file.Tower\nhidden_size: 16\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = ["model._target_=my_file.Tower", "model.hidden_size=16", "data=regression", *TINY]
    train([*command_line.arguments(target), f"run_dir={tmp_path}/one"])
    chosen = ["--config-dir", "conf", "model=tower", "data=regression", *TINY]
    command = warm.zbpp("train", "-n", "2", *chosen, "schedule=zb_v", "run_dir=two")
    done = warm.start(tmp_path, command)
    assert done.rc == 0, done.text
    assert "written to two" in done.text
    losses = [losses_in(tmp_path / name) for name in ("one", "two")]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


@pytest.mark.slow
def test_a_job_whose_output_nobody_reads_ends_in_silence(tmp_path, warm):
    """`train.py ... | head` ended in the traceback of a BrokenPipeError."""
    command = warm.zbpp("train", "-n", "2", *MLP, *TINY, "print_every=1", "run_dir=run")
    done = warm.start(tmp_path, ["bash", "-c", 'set -o pipefail; "$@" | head -n 1', "bash", *command])
    (line,) = done.text.splitlines()
    assert line.startswith("layers per stage: ")
    assert done.rc == 141


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ["measure", "-n", "2", "model=gpt_tiny"],
            "error: the data do not fit the model: stage 0 was given float32 [4, 96]",
        ),
        (
            ["bench", "-n", "1", "model.num_layers=1", "device=cuda"],
            "error: device=cuda: 1 process(es) here, but torch sees 0 CUDA device(s)",
        ),
    ],
)
def test_a_mistake_that_a_rank_finds_is_one_line(tmp_path, warm, given, line):
    """57 to 175 lines of torchrun and gloo, before."""
    done = warm.start(tmp_path, warm.zbpp(*given, "run_dir=run"), CUDA_VISIBLE_DEVICES="")
    assert done.rc == 2
    (only,) = done.text.splitlines()
    assert only.startswith(line)
    assert list(tmp_path.iterdir()) == []


class Misfit:
    """Stage 1 takes other sizes than stage 0 returns, or the loss another dtype than the last stage's."""

    def __init__(self, wrong="shape"):
        self.wrong = wrong

    def build_stage(self, index, num_stages):
        if self.wrong == "dtype" and index:
            return nn.Embedding(4, 4)
        return nn.Linear(8, 8) if index == 0 or self.wrong == "loss" else nn.Linear(4, 4)

    def loss(self, output, target):
        return nn.functional.nll_loss(output, target)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            "shape",
            r"mat1 and mat2 .*; the forward was given what stage 0 returned, \(float32\[2, 8\]\); in 1F0 ",
        ),
        ("dtype", r"indices.*; the forward was given what stage 0 returned, \(float32\[2, 8\]\); in 1F0 "),
        ("loss", r"multi-target not supported; in the loss function; in 1F0 "),
    ],
)
def test_a_stage_that_does_not_take_what_the_stage_before_returns_is_one_line(tmp_path, wrong, words):
    """40 lines of traceback, before; of stage 0 alone it was a line."""
    model = ["model._target_=test_launch.Misfit", f"model.wrong={wrong}", "data=regression"]
    given = [*command_line.arguments(model), "data.in_features=8", "data.out_features=8"]
    with pytest.raises(configs.ConfigError, match=words) as caught:
        train([*given, "schedule=zb_v", *TINY, "microbatch_size=2", f"run_dir={tmp_path}/run"])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "given", "line"),
    [
        ("train", ["-n", "2", "steps=0"], "error: steps=0: write a whole number, 1 or more"),
        ("train", ["-n", "2", "stepz=3"], "error: stepz: there is no such key; did you mean steps?"),
        ("train", ["-n", "2", "schedule=zb_h9"], "error: schedule=zb_h9: there is no such choice"),
        ("train", ["-n", "2", "schedule.name=zb_h9"], f"error: unknown schedule 'zb_h9'; known: {KNOWN}"),
        ("train", ["-n", "2", "run_dir="], "error: run_dir=: write a folder, such as runs/first"),
        (
            "train",
            ["-n", "2", "schedule=interleaved_1f1b", "schedule.stages_per_rank=2000"],
            "error: model: num_layers=8 is fewer than the 4000 stages",
        ),
        ("train", ["-n", "100"], "error: model: num_layers=8 is fewer than the 100 stages"),
        ("measure", ["schedule.name=zb_h9"], f"error: unknown schedule 'zb_h9'; known: {KNOWN}"),
        ("bench", ["schedules=[zb_h9]"], f"error: unknown schedule 'zb_h9'; known: {KNOWN}"),
    ],
)
def test_a_mistake_is_found_before_ranks_are_started(monkeypatch, tmp_path, capsys, command, given, line):
    """10000 stages per rank were planned for minutes before the layers were counted."""
    monkeypatch.setattr(launch, "on_ranks", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zbpp"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the command sets it, and monkeypatch takes it back
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    run_dir = ["run_dir=run"] * ("run_dir=" not in given)
    with pytest.raises(SystemExit, match="^2$"):
        importlib.import_module(f"zbpp.commands.{command}").main([*given, *run_dir])
    (only,) = capsys.readouterr().err.splitlines()
    assert only.startswith(line)
    assert list(tmp_path.iterdir()) == []


def failing(_):
    """What a rank does in the test below; importable."""
    if os.environ["RANK"] == "1":
        raise ArithmeticError("planted")
    with world(device="cpu", timeout=30):
        pass


def test_a_bug_on_one_rank_is_told_with_its_traceback_and_nothing_else(capfd):
    """Rank 0 waits for rank 1 meanwhile; nothing of that, nor of torch's launcher, is shown."""
    with pytest.raises(RankError, match="^rank 1 failed\nTraceback") as caught:
        on_ranks(2, failing, None)
    assert str(caught.value).endswith("ArithmeticError: planted\n")
    assert str(caught.value).count("Traceback") == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("told", "codes", "kind", "words"),
    [
        ({0: (2, "Refusal: late"), 1: (1, "Refusal: early")}, {0: 1, 1: 1}, Refusal, "^early$"),
        ({0: (1, "ConfigError: a=0")}, {0: 1, 1: -15}, configs.ConfigError, "^a=0$"),
        ({0: (2, "Refusal: late"), 1: (1, "KeyError: 3")}, {0: 1, 1: 1}, RankError, "^rank 1 failed\nTrace$"),
        ({0: (1, "LostError: its peer")}, {0: 1, 1: -9}, RankDeath, "^rank 1 died of SIGKILL$"),
        ({0: (1, "BrokenPipeError: "), 1: (2, "KeyError: 3")}, {0: 1, 1: 1}, BrokenPipeError, ""),
        ({}, {0: 3, 1: -15}, RankDeath, "^rank 0 left with exit status 3 before the run's end$"),
        ({0: (1, "LostError: its peer"), 1: (2, "KeyError: 3")}, {0: 1, 1: 1}, RankError, "^rank 1 failed"),
        ({0: (1, "LostError: its peer"), 1: (2, "LostError: too")}, {0: 1, 1: 1}, Refusal, "^its peer$"),
        ({}, {0: -15}, RankDeath, "^ranks ended without a word; exit codes by rank: {0: -15}$"),
    ],
)
def test_of_several_ranks_that_fail_the_first_by_the_clock_is_told_of(told, codes, kind, words):
    failures = {
        rank: SimpleNamespace(exitcode=code, timestamp=0, message="no file") for rank, code in codes.items()
    }
    for rank, (when, message) in told.items():
        failures[rank].timestamp = when
        failures[rank].message = {"message": message, "extraInfo": {"py_callstack": "Trace"}}
    error = launch._first_error(failures, [])
    assert type(error) is kind
    assert re.search(words, str(error))


def test_after_a_death_the_run_says_what_the_same_command_does(tmp_path, monkeypatch):
    def killed(*_):
        raise RankDeath("rank 1 died of SIGKILL")

    monkeypatch.setattr(launch, "on_ranks", killed)
    run = tmp_path / "run"
    for made, said in (((), "begins again, since"), (("step-8", "step-16"), "goes on from step-16$")):
        for name in made:
            (run / "checkpoints" / name).mkdir(parents=True)
        words = f"^rank 1 died of SIGKILL: start the same command again with run_dir={run}: the run {said}"
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config = compose("train", overrides=[*MLP, *TINY, "parallel.num_processes=2", f"run_dir={run}"])
        with pytest.raises(Refusal, match=words):
            commands_train._train(configs.Composed.of(config))


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (["schedule.timetable=nowhere.txt"], configs.ConfigError, "nowhere.txt"),
        (["schedule=zb_auto", "schedule.costs=nowhere.json"], configs.ConfigError, "nowhere.json"),
        (["schedule=zb_auto", "schedule.memory_limit=much"], PlanError, "much"),
        (["schedule=zb_h1", "schedule.stages_per_rank=2"], PlanError, "leave stages_per_rank out"),
        (["schedule=zb_h1", "schedule.memory_limit=0.5"], PlanError, "memory"),
        (["schedule=zb_auto", "schedule.placement=v", "schedule.stages_per_rank=3"], PlanError, "contradict"),
        (["schedule=zb_auto", "schedule.stages_per_rank=2"], PlanError, "contradict"),
        (["schedule.name=zb_h9"], PlanError, "zb_h9"),
        (["schedule.replan=zb_h9"], configs.ConfigError, "zb_h9"),
        (["parallel.device=cuda"], DeviceError, "torch sees"),
        (["parallel.replicate=3"], configs.ConfigError, "replicate"),
        (["+optimizer.build._target_=nowhere.Adam", "optimizer=custom"], configs.ConfigError, "nowhere"),
        (["data._target_=zbpp.data.nowhere"], configs.ConfigError, "nowhere"),
    ],
)
def test_what_the_config_alone_shows_is_refused_before_a_model_is_made(
    tmp_path, monkeypatch, overrides, error, words
):
    def made(*_, **__):
        raise AssertionError("the model is made")

    monkeypatch.setattr(plans, "build_model", made)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("train", overrides=[*MLP, f"run_dir={tmp_path}/run", *overrides])
    with pytest.raises(error, match=words):
        app.check_before_start(configs.Composed.of(config).tree, 2)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- run folders


def test_a_mistake_in_a_new_command_costs_nothing_of_an_old_run(tmp_path):
    """metrics.jsonl was emptied before the new job had even started."""
    run = tmp_path / "run"
    given = [*MLP, *TINY, f"run_dir={run}"]
    train(given)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="has done 3 steps already: .* or overwrite=true to replace it"):
        train(given)
    with pytest.raises(configs.ConfigError, match="the data do not fit the model"):
        train([*given, "overwrite=true", "data.in_features=5"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    train([*given, "overwrite=true", "steps=4"])
    assert len(losses_in(run)) == 4


def test_all_that_a_run_prints_and_draws_has_the_same_bubble_of_the_same_steps(monkeypatch, tmp_path, capsys):
    """The last progress line, the summary, `zbpp compare` and the picture; metrics.jsonl has it unrounded."""
    drawn = {}
    monkeypatch.setattr(results, "render_picture", lambda panels, path, costs: drawn.update(panels))
    run = str(tmp_path / "run")
    train([*MLP, *TINY, "steps=12", "print_every=1", "measure_every=4", f"run_dir={run}"])
    lines = capsys.readouterr().out.splitlines()
    compare.main([run, run])
    compared = capsys.readouterr().out.splitlines()[1]

    last = metrics_in(tmp_path / "run")[-1]
    steps = last["measured_steps"]
    assert steps == "steps 8-12"
    measured, predicted = (f"{100 * last[f'{name}_bubble_rate']:.1f} %" for name in ("measured", "predicted"))
    progress = [each for each in lines if "  step " in each and "/12  " in each]
    assert f"bubble {measured} (predicted {predicted})  " in progress[-1]
    assert progress[-1].endswith(f"  measured: {steps}")
    early = [re.findall(r"  measured: (.*)$", each) for each in progress[:6]]
    assert early == [[], ["step 2"], ["steps 2-3"], ["steps 2-3"], ["steps 2-3, 5"], ["steps 2-3, 5"]]
    (sentence,) = [each for each in lines if "The pipeline's part of a step" in each]
    assert f"(the median of {steps})" in sentence
    assert f"idle for {measured}; simulated with" in sentence
    assert sentence.endswith(f" and {predicted}.")
    assert compared.endswith(f"{predicted.ljust(17)}  {measured.ljust(8)}  {steps}")
    assert [(title.split(": ")[1], headline(each).split(", ")[1]) for title, each in drawn.items()] == [
        (f"predicted from the costs of {steps}", f"largest bubble rate {predicted} (rank 0)"),
        (f"measured, the median of {steps}", f"largest bubble rate {measured} (rank 0)"),
    ]


# ---------------------------------------------------------------- one process, and bench


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_one_rank_needs_no_torchrun(tmp_path, schedule):
    summary = train([f"schedule={schedule}", *MLP, *TINY, f"run_dir={tmp_path}/run"])
    assert (summary["schedule"], summary["num_ranks"], summary["steps"]) == (schedule, 1, 3)
    stages = {f"stage-{s}-of-{summary['num_stages']}.safetensors" for s in range(summary["num_stages"])}
    assert {path.name for path in (tmp_path / "run").iterdir()} == stages | {
        "config.yaml", "job.json", "metrics.jsonl", "summary.json", "timeline.png", "trace.json",
        "checkpoints",
    }  # fmt: skip


def test_the_order_in_a_plans_file_is_the_order_that_runs(monkeypatch, tmp_path, capsys):
    made = []

    class Noted(trainer_parts.Pipeline):
        def __init__(self, stages, timetable, *args, **options):
            made.append(str(timetable))
            super().__init__(stages, timetable, *args, **options)

    monkeypatch.setattr(trainer_parts, "Pipeline", Noted)
    (tmp_path / "odd.txt").write_text("0F0 0F1 0B0 0F2 0B1 0W0 0B2 0W1 0W2")  # of no family
    choices = ["schedule.timetable=" + str(tmp_path / "odd.txt"), *MLP, *TINY, f"run_dir={tmp_path}/run"]
    summary = train([*choices, "num_microbatches=null", "save_weights=false"])
    assert made == ["0F0 0F1 0B0 0F2 0B1 0W0 0B2 0W1 0W2"]
    assert (summary["schedule"], summary["num_microbatches"]) == ("odd", 3)
    assert "odd.txt\n" in capsys.readouterr().out  # the default zb_h1 was not asked for
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(PlanError, match="is a plan for 3 microbatches, not for num_microbatches=4"):
        train(choices)


def test_auto_measures_its_first_steps_and_goes_on_with_a_plan_for_them(tmp_path, capsys):
    summary = train(["schedule=auto", *MLP, *TINY, "steps=9", f"run_dir={tmp_path}/run"])
    assert (summary["schedule"], summary["replanned_from"]) == ("zb_auto", "zb_h1")
    lines = metrics_in(tmp_path / "run")
    assert [line["step"] for line in lines if "expected_makespan_ms" in line] == [4, 8]
    assert "zb_auto, replanned from zb_h1  step 9/9" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_prints_predicted_beside_measured_for_each_schedule_and_runtime(tmp_path, warm):
    overrides = [
        "num_ranks=2", "num_microbatches=4", "repeats=1", "schedules=[1f1b,zb_h1]", "model.num_layers=4",
        "device=cpu", "run_dir=out",
    ]  # fmt: skip
    done = warm.start(tmp_path, warm.zbpp("bench", *overrides))
    assert done.rc == 0, done.text
    assert "EMULATED: stages sleep instead of computing" in done.text
    assert "zbpp's speed over torch's, same schedule: 1f1b " in done.text
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"bench.json", "bench.png", "trace.json"}
    found = json.loads((tmp_path / "out/bench.json").read_text())
    assert [(row["schedule"], row["runtime"]) for row in found["rows"]] == [
        ("1f1b", "zbpp"), ("1f1b", "torch"), ("zb_h1", "zbpp"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["failure"] == ""
        assert row["makespan_ms"] > 4 * 30  # two layers of a rank sleep F + B + W = 15 ms each per microbatch
        assert row["ratio"] > 0.5
        assert row["peak_memory_bytes"] == []  # of stages that hold nothing
    assert "memory" not in done.text


@pytest.mark.slow
def test_measured_costs_are_what_plan_takes(tmp_path, warm):
    overrides = ["num_ranks=2", "num_microbatches=2", "repeats=1", "model.num_layers=2", "run_dir=out"]
    done = warm.start(tmp_path, warm.zbpp("measure", *overrides, "device=cpu"))
    assert done.rc == 0, done.text
    found = json.loads((tmp_path / "out/costs.json").read_text())
    about = found.pop("about")
    assert set(found) >= {"f", "b", "w", "bw", "comm", "saved", "deferred"}
    assert {len(each) for each in found.values() if isinstance(each, list)} == {2}
    assert min(*found["f"], *found["b"], *found["w"]) >= 5
    assert (about["emulated"], about["model"]) == (True, "Emulated")
    planned = warm.start(tmp_path, warm.zbpp("plan", "zb_h1", "--ranks", "2", "--costs", "out/costs.json"))
    assert planned.rc == 0, planned.text
    assert "makespan" in planned.text


def stays(rank):
    launch.end_with_launcher()
    time.sleep(3 * launch._POLL)
    return os.getppid()


def test_a_rank_of_a_fork_server_lives_as_long_as_who_asked_for_it():
    """The operating system's parent of such a rank is the fork server, not the process that asked for it."""
    assert run_ranks(stays, 1, fresh=True) != [os.getpid()]
