"""`zbpp plan --cluster`: its table, its JSON, and what it says of files that won't do."""

import json
from pathlib import Path

import pytest

from zbpp.cluster import Hardware
from zbpp.commands.plan import main
from zbpp.config import config_folder
from zbpp.config.typed_file import read_typed
from zbpp.ranges import ConfigError

GOOD = (config_folder() / "cluster/a100.yaml").read_text()


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_the_clusters_of_configs_are_read(name: str) -> None:
    cluster = read_typed(config_folder() / f"cluster/{name}.yaml", Hardware)
    assert cluster.gpus_per_node == 8
    assert cluster.source


def test_the_table_and_the_json_hold_the_same_steps(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "answer.json"
    command = "zb_h1 1f1b --cluster a100 --model llama_1b --batch 64 --top 2 --degrees pipeline=4,tensor=2"
    assert main([*command.split(), "--microbatch-size", "1", "--out", str(out)]) == 0
    printed, answer = capsys.readouterr().out, json.loads(out.read_text())
    assert len(answer["steps"]) == 2
    for step in answer["steps"]:
        assert (step["pipeline"], step["tensor"], step["replicate"] * step["shard"]) == (4, 2, 4)
        assert f"{step['step_ms']:,.0f}" in printed
        assert f"{step['mfu']:.1%}" in printed
        assert step["memory_gib"] < 74.5
    assert answer["steps"][0]["schedule"] == "zb_h1"


def test_a_hugging_face_folder_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8}
    config |= {"intermediate_size": 1024, "vocab_size": 32000, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = (
        f"zb_h1 --cluster a100 --model {tmp_path} --sequence 512 --batch 64 --degrees pipeline=4,tensor=1"
    )
    assert main(command.split()) == 0
    assert "64 sequences of 512 tokens" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    assert main(command.split()) == 2
    assert "mixtral has layers that --cluster does not know" in capsys.readouterr().err


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("nodes: 4\n", "", "nodes is missing: write the number of nodes, 1 to 1e+06"),
        ("nodes: 4", "nodes: 0", "nodes=0: write the number of nodes"),
        ("nodes: 4", "nodes: -4", "nodes=-4: write the number of nodes"),
        ("nodes: 4", "nodes: 2.5", "nodes=2.5 is no whole number"),
        ("nodes: 4", "nodes: four", "nodes='four' is no whole number"),
        ("nodes: 4", "nodes: true", "nodes=True is no whole number"),
        ("nodes: 4", "nodes: 1" + "0" * 400, "nodes=1000"),
        ("nodes: 4", "node: 4", "node: there is no such key; did you mean nodes?"),
        ("memory: 74.5", "memory: 1e99", "gpu.memory=1e+99: write GiB, such as 80"),
        ("memory: 74.5", "memory: .nan", "gpu.memory=nan: write GiB, such as 80"),
        ("  peak_tflops: 312", "", "gpu.peak_tflops is missing: write dense TFLOP/s of the datasheet"),
        ("achieved: 0.7", "achieved: 70", "gpu.achieved=70.0: write the share that kernels reach"),
        ("latency: 10", "latency: -1", "between.latency=-1.0: write microseconds"),
        ("bandwidth: 300", "bandwidth: 0", "inside.bandwidth=0.0: write GB/s in one direction"),
        (
            "bandwidth: 300",
            "bandwith: 300",
            "inside.bandwith: there is no such key; did you mean inside.bandw",
        ),
        (GOOD, "- 4", "has no keys"),
        (GOOD, "nodes: [", "can't be read"),
        (GOOD, "nodes: 4\ngpus_per_node: 8\ngpu: 3", "gpu=3: write the keys peak_tflops"),
    ],
)
def test_an_absurd_value_is_refused_by_its_key(
    old: str, new: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    assert main(["--cluster", str(path), "--model", "llama_1b", "--batch", "64"]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert len(error) < 700


BAD = [
    ".nan",
    ".inf",
    "-.inf",
    "-1",
    "1e30",
    "1" + "0" * 30,
    "80GB",
    "0x",
    "null",
    "[1, 2]",
    "{a: 1}",
    "true",
]


@pytest.mark.parametrize("value", BAD)
def test_every_number_of_a_cluster_refuses_what_is_no_number_of_its_kind(value: str, tmp_path: Path) -> None:
    """One line, which names the key."""
    path = tmp_path / "cluster.yaml"
    lines = GOOD.splitlines()
    numbers = [(at, line) for at, line in enumerate(lines) if line.split("#")[0].strip()[-1:].isdigit()]
    assert len(numbers) == 10
    for at, line in numbers:
        changed = f"{line.split(':')[0]}: {value}"
        path.write_text("\n".join([*lines[:at], changed, *lines[at + 1 :]]))
        with pytest.raises(ConfigError) as error:
            read_typed(path, Hardware)
        assert line.split(":")[0].strip() in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("--model llama_1b", "needs --batch"),
        ("--batch 64", "needs --model"),
        ("--model llama_1b --batch 0", "--batch 0: write a whole number"),
        ("--model llama_1b --batch 64 --top 0", "--top 0: write a whole number"),
        ("--model llama_1b --batch 64 --precision int8", "--precision int8: write mixed_bfloat16"),
        ("--model llama_1b --batch 64 --degrees pipeline=3", "write divisors of 32"),
        ("--model llama_1b --batch 64 --degrees expert=2", "--degrees expert=...: write pipeline"),
        ("--model llama_1b --batch 3 --degrees shard=32", "write a larger batch, such as --batch 32"),
        ("--model mlp --batch 64", "has no sizes that --cluster knows"),
        ("--model nowhere --batch 64", "there is no such file; write a path, or a name in configs"),
        (
            "zb_auto --model llama_1b --batch 64",
            "schedule zb_auto can't be searched; write some of gpipe",
        ),
    ],
)
def test_what_can_not_be_asked_is_refused(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["--cluster", "a100", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--memory-limit", "3GiB"], "--memory-limit doesn't go with --cluster"),
        (["--ranks", "8"], "--ranks doesn't go with --cluster"),
        (["-n", "4"], "whole runs: leave it out, or write --degrees pipeline=N"),  # the default's value
        (
            ["--text"],
            "--text doesn't go with --cluster, which plans whole runs: leave it out, or write --out",
        ),
    ],
)
def test_an_option_that_cluster_does_not_read_is_refused(
    more: list[str], complaint: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        main([*["--cluster", "a100", "--model", "llama_1b", "--batch", "64"], *more])
    assert complaint in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named_before_the_search(capsys: pytest.CaptureFixture) -> None:
    assert (
        main([*["--cluster", "a100", "--model", "llama_1b", "--batch", "64", "--out", "nowhere/answer.json"]])
        == 2
    )
    assert "--out nowhere/answer.json: there is no folder nowhere" in capsys.readouterr().err


def test_the_largest_cluster_that_a_file_may_have_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A thousand million GPUs: neither their divisors nor the links of a block are counted one by one."""
    path = tmp_path / "large.yaml"
    path.write_text(
        GOOD.replace("nodes: 4", "nodes: 1000000").replace("gpus_per_node: 8", "gpus_per_node: 1000")
    )
    command = f"1f1b --cluster {path} --model llama_1b --batch 10000000 --top 1 --microbatch-size 1"
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert "no mesh of 1000000000 GPUs can run it" in said
    assert said.endswith("take fewer GPUs\n")
