"""Every command and all code of docs/ runs, and does what its page says."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers.configs import composed
from helpers.pages import ROOT, blocks, run_command

TUTORIAL, TRAINING = "docs/tutorial.md", "docs/training.md"
FILES = ("my_file.py", "load.py")  # of the tutorial
FILES_OF_REFERENCE = ("loop.py",)
OF_CHECKPOINTS = ("runs/left", "loop.py")  # commands with a test of their own
NUM_FOR_DATA = 3  # the first commands of the page about training are for data


@pytest.mark.parametrize(
    "page",
    ["pipeline", "split", "memory", "planning", "optimizer", "long_context"],
)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str) -> None:
    namespace: dict[str, object] = {}
    for block in blocks(f"docs/{page}.md", "python"):
        exec(block, namespace)


def test_the_function_and_the_rule_shown_equal_plain_autograd() -> None:
    import torch

    from zbpp import backward_input

    namespace: dict[str, object] = {}
    for block in blocks("docs/split.md", "python"):
        exec(block, namespace)
    weight, matrix = (torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4,), (3, 4)))
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = (matrix @ namespace["Scale"].apply(x, weight).sum(0)).square().sum()  # type: ignore[attr-defined]
    expected = torch.autograd.grad(y, (x, weight, matrix), retain_graph=True)
    (grad,), weight_grads = backward_input(y, None, [x])
    weight_grads.accumulate()
    for found, plain in zip((grad, weight.grad, matrix.grad), expected, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_commands_that_do_not_run_by_day_have_a_config() -> None:
    for page in ("docs/parallel.md", "docs/optimizer.md", TRAINING):
        for block in blocks(page, "bash"):
            for words in map(shlex.split, block.replace("\\\n", " ").splitlines()):
                if words[:2] == ["zbpp", "train"]:
                    composed(*words[2:])


@pytest.mark.slow
def test_the_loop_of_the_parallel_page_trains(tmp_path: Path) -> None:
    (script,) = blocks("docs/parallel.md", "python")
    (tmp_path / "mesh.py").write_text(script)
    (tmp_path / "tower.py").write_text(blocks("README.md", "python")[0])
    (own_loop,) = (each for each in blocks("docs/parallel.md", "bash") if each.startswith("torchrun"))
    printed = run_command(own_loop, tmp_path).splitlines()
    rows = [row for row in map(str.split, printed) if len(row) == 3 and row[0] in ("0", "1")]
    for part in ("0", "1"):
        found = [float(loss) for own, _, loss in rows if own == part]
        assert len(found) == 4
        assert 1.1 > found[0] > found[-1] > 0


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_commands_of_the_parallel_page_train(tmp_path: Path) -> None:
    """Each trains a pipeline of two ranks; replicas, shards and parts of layers have one loss."""
    runs = [each for each in blocks("docs/parallel.md", "bash") if each.startswith("zbpp")]
    small = "steps=2 precision=float64 evaluate_every=0 save_weights=false"
    small += " model.num_layers=2 model.hidden_size=16 num_microbatches=2 microbatch_size=2"
    for command in runs:
        run_command(command.replace("steps=4", small), tmp_path)
    names = ("replicas", "shards", "tensor", "experts", "sharded_experts")
    folders = [tmp_path / "runs" / name for name in names]
    losses = [json.loads((each / "summary.json").read_text())["loss"] for each in folders]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)  # both see twice the rows that the third sees
    assert losses[3] == pytest.approx(losses[4], rel=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_commands_of_the_optimizer_page_run(number: int, tmp_path: Path) -> None:
    """In three steps."""
    block = blocks("docs/optimizer.md", "bash")[number]
    command, replaced = re.subn(r" steps=\d+", " steps=3 evaluate_every=0 save_weights=false", block)
    assert replaced == 1
    run_command(command, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_the_command_of_lora_trains_an_adapter(tmp_path: Path) -> None:
    """The adapter loads in peft, over the base model that was trained."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    from helpers.chat import write_files

    write_files(tmp_path)
    _, lora = blocks("docs/huggingface.md", "bash")
    printed = run_command(lora, tmp_path)
    found = {path.name for path in (tmp_path / "runs/lora").iterdir()}
    assert "adapter" in found
    assert not [name for name in found if name.endswith(".safetensors")]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "runs/lora/adapter", is_trainable=True)
    trained, of_all = tuned.get_nb_trainable_parameters()
    assert f"trainable {trained:,} of {of_all:,} parameters\n" in printed


def test_the_figures_of_one_card_at_a_time_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    *_, planned = blocks("docs/finetune.md", "python")
    exec(planned, {})
    printed = re.findall(r"\d\.\d\d", capsys.readouterr().out)
    table = (ROOT / "docs/finetune.md").read_text().rpartition("| | step / ideal |")[2]
    in_order = [printed[0], printed[1], printed[2], *printed[4:]]  # the even cut of 1F1B is left out
    assert in_order == re.findall(r"\| (\d\.\d\d) \|", table)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_a_folder_becomes_an_adapter_that_transformers_and_peft_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of an 8B model, with a small one: three ranks, 4 bits, slices, a chosen cut."""
    for needed in ("transformers", "peft", "bitsandbytes"):
        pytest.importorskip(needed)
    from helpers.chat import write_files

    write_files(tmp_path, hidden_size=64, intermediate_size=128, num_hidden_layers=6)
    (tmp_path / "base").rename(tmp_path / "Llama-3-8B")
    small = " model.sequence_length=64 data.chat_template=chat.jinja evaluation_batches=1 steps=2"
    small += " schedule.slices=2"
    memory, train, export = (each.strip() for each in blocks("docs/finetune.md", "bash"))
    printed = run_command(memory + small, tmp_path)
    assert "cut for ranks of speed 1, 1, 2" in printed
    assert "everything fits" in printed
    trained = run_command(train + small, tmp_path)
    monkeypatch.chdir(tmp_path)
    speeds, load, _ = blocks("docs/finetune.md", "python")
    namespace: dict[str, Any] = {}
    for block in (speeds, load):
        exec(block, namespace)
    found = dict(namespace["tuned"].named_parameters())
    adapters = sum(each.numel() for name, each in found.items() if "lora_" in name)
    assert f"trainable {adapters:,} of " in trained
    assert all(each.abs().max() > 0 for name, each in found.items() if "lora_B" in name)  # they begin at 0
    assert "merged into the weights that nf4 has made of the base" in run_command(export, tmp_path)


STEPS_OF_DATA = {"tokens": 2, "mixture": 2, "by_tokens": 3}  # the runs of these commands


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, pytest.param(NUM_FOR_DATA, marks=pytest.mark.nightly)])
def test_the_commands_for_data_run(number: int, tmp_path: Path) -> None:
    for block in blocks(TRAINING, "bash")[:number]:
        run_command(f"set -e\n{block}", tmp_path)
    names = dict([*STEPS_OF_DATA.items()][:number])
    losses = {name: (tmp_path / "runs" / name / "metrics.jsonl").read_text() for name in names}
    assert {name: len(each.splitlines()) for name, each in losses.items()} == names


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_huggingface_page_loads_trains_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run has trained is what transformers loads."""
    pytest.importorskip("transformers")
    import torch
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    first, *rest = blocks("docs/huggingface.md", "python")
    namespace: dict[str, object] = {}
    exec(first, namespace)
    commands, _ = blocks("docs/huggingface.md", "bash")
    small = "steps=2 num_microbatches=2 microbatch_size=2"
    run_command("set -e\n" + commands.replace("steps=5", small), tmp_path)
    for block in rest:
        exec(block, namespace)
    found: dict[str, torch.Tensor] = namespace["tuned"].state_dict()  # type: ignore[attr-defined]
    for index in range(2):
        stage = load_file(tmp_path / f"runs/tuned/stage-{index}-of-2.safetensors")
        assert all(torch.equal(value, found[name]) for name, value in stage.items())
    assert len(namespace["packed"]) == len(namespace["losses"]) == 2  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_commands_of_the_planning_page_run(tmp_path: Path) -> None:
    for block in blocks("docs/planning.md", "bash"):
        command = re.sub(r"--time-limit \d+", "--time-limit 0.1", block)
        run_command(f"set -e\n{command}", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"plans.html", "plans.png"}


@pytest.mark.slow
def test_the_command_of_the_page_about_long_sequences_trains(tmp_path: Path) -> None:
    (command,) = blocks("docs/long_context.md", "bash")
    small = "steps=2 evaluate_every=0 model.num_layers=2 num_microbatches=2 microbatch_size=2"
    printed = run_command(command.replace("steps=4", small), tmp_path)
    assert "slices of a sequence begin at tokens: 0 " in printed
    assert (tmp_path / "runs/slices/stage-0-of-2.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_of_the_memory_page_run(tmp_path: Path) -> None:
    """They say what fits."""
    predict, choose = blocks("docs/memory.md", "bash")
    printed = run_command(predict, tmp_path)
    assert "schedule=v_min" in printed
    assert "everything fits" in printed
    assert "everything fits" in run_command(choose, tmp_path)


def write_files_of_pages(folder: Path) -> None:
    pages = (TUTORIAL, FILES), (TRAINING, FILES_OF_REFERENCE)
    for page, names in pages:
        for name, text in zip(names, blocks(page, "python"), strict=True):
            (folder / name).write_text(text)


def commands_of_pages() -> list[str]:
    return [*blocks(TUTORIAL, "bash"), *blocks(TRAINING, "bash")[NUM_FOR_DATA:]]


def test_no_command_takes_more_than_two_lines() -> None:
    assert max(len(block.strip().splitlines()) for block in blocks(TUTORIAL, "bash")) <= 2


@pytest.mark.slow
def test_the_first_runs_of_a_new_user_are_equal(tmp_path: Path) -> None:
    """Four ranks and one process, in a few steps."""
    write_files_of_pages(tmp_path)
    _, *commands = commands_of_pages()
    *_, printed = [run_command(each.replace("steps=60", "steps=3"), tmp_path) for each in commands[:3]]
    assert "equal to the last bit" in printed


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_new_users_path_from_an_empty_folder(tmp_path: Path) -> None:
    """Four ranks, one process and a searched plan have the same losses; accuracy is far above chance."""
    write_files_of_pages(tmp_path)
    _, *commands = commands_of_pages()  # the first one installs
    commands = [each for each in commands if not any(word in each for word in OF_CHECKPOINTS)]
    outputs = [run_command(command, tmp_path) for command in [*commands, "python load.py"]]
    assert "equal to the last bit" in outputs[2]
    runs = [tmp_path / "runs" / name / "metrics.jsonl" for name in ("four_ranks", "one_process", "planned")]
    losses = [[json.loads(line)["loss"] for line in run.read_text().splitlines()] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 60
    assert losses[0][-1] < losses[0][0] / 2
    for output in (outputs[0], outputs[1], outputs[6]):
        assert float(re.findall(r"accuracy (\d\.\d+)", output)[-1]) > 0.5  # chance: .1


def assert_it_goes_on(*outputs: str) -> None:
    """Outputs of the loop of the page about training, started twice."""
    rows = [line.split() for text in outputs for line in text.splitlines() if line[:1].isdigit()]
    assert [int(step) for step, _ in rows] == list(range(1, 41))
    losses = [float(loss) for _, loss in rows]
    assert sum(losses[20:30]) < 0.9 * sum(losses[:10])  # the second start did not begin anew


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on(tmp_path: Path) -> None:
    write_files_of_pages(tmp_path)
    *_, on_two_ranks = blocks(TRAINING, "bash")
    assert_it_goes_on(*(run_command(on_two_ranks, tmp_path) for _ in range(2)))


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_run_that_was_left_and_a_loop_of_ones_own_go_on_with_half_the_ranks(tmp_path: Path) -> None:
    write_files_of_pages(tmp_path)
    commands = [each for each in commands_of_pages() if any(word in each for word in OF_CHECKPOINTS)]
    _, again, *of_loop = [run_command(each, tmp_path) for each in commands]
    assert "going on after step 25 of runs/left/checkpoints/step-25" in again
    text = (tmp_path / "runs/left/metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(1, 61))
    assert_it_goes_on(*of_loop)


def test_the_ten_files_to_read_exist_and_take_an_afternoon() -> None:
    """As many lines as the page says, with the three files that their rows lead to."""
    page = (ROOT / "docs/reading.md").read_text()
    rows = re.findall(r"^\| \d+ \| \[.*$", page, flags=re.M)
    assert len(rows) == 10
    files = {file for row in rows for file in re.findall(r"\]\(\.\./([\w/]+\.py)\)", row)}
    assert len(files) == 13
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    stated = re.search(r"about (\d),(\d+) lines", page)
    assert stated is not None
    assert lines == pytest.approx(int(stated[1] + stated[2]), rel=0.05)


def test_every_law_has_the_test_that_its_row_names() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = page.partition("## Which test holds which law")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", rows)
    assert len(named) > 12
    tests = {file: (ROOT / "tests" / file).read_text() for file, _ in named}
    assert [(file, test) for file, test in named if f"\ndef {test}(" not in tests[file]] == []


def test_the_list_of_rooms_names_every_folder() -> None:
    page = (ROOT / "docs/reading.md").read_text()
    named = set(re.findall(r"^zbpp/(\w+)/ ", page, flags=re.M))
    assert named == {path.parent.name for path in (ROOT / "zbpp").glob("*/__init__.py")}


def test_every_file_that_the_reading_page_names_exists() -> None:
    page = (ROOT / "docs/reading.md").read_text()
    named = set(re.findall(r"(?<![/\w])[a-z_]+/[\w/]+\.py", page))
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / "zbpp" / name).exists() and not (ROOT / name).exists()]
