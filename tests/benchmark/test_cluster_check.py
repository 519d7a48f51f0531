"""scripts/cluster_check.sh: what the parts find on two ranks, what failures leave, how it starts."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from helpers.processes import outcomes, run_ranks
from zbpp.benchmark.cluster import hang, reference
from zbpp.benchmark.cluster.__main__ import main
from zbpp.benchmark.cluster.hang_verdict import verdict
from zbpp.benchmark.cluster.links import Link, all_pairs, judged, neighbours, shown
from zbpp.benchmark.cluster.meshes import mesh_text
from zbpp.benchmark.cluster.parts import attempt, run_part
from zbpp.benchmark.cluster.placement import tensor_degrees
from zbpp.benchmark.cluster.report import collected, report
from zbpp.benchmark.cluster.rows import FAILED, NOT_RUN, OK, SLOW, Journal, Row
from zbpp.benchmark.cluster.settings import PARTS, Settings
from zbpp.planning import SCHEDULES, plan
from zbpp.runtime.world import World

SCRIPT = Path(__file__).parents[2] / "scripts/cluster_check.sh"
CPU = torch.device("cpu")


def settings(out):
    return replace(Settings(out=out, device="cpu").small(), timed=("1f1b",))


# ---------------------------------------------------------------- on two ranks


def all_but_hang(rank, out):
    os.environ["LOCAL_RANK"] = str(rank)
    for part in PARTS[:-1]:
        run_part(part, settings(out), World(rank, 2, CPU))
    # A planted fault: one rank updates its weights otherwise.
    expected, timetable = reference.plain_losses(4, 4, rank), plan("zb_h1", 2, 4)
    reference.RATE *= 1 + 1e-5 * rank

    def wrong():
        return reference.pipeline_losses(4, timetable, CPU, rank=rank, timeout=60)

    return attempt("schedules", "wrong", lambda: reference.against_reference(wrong, expected))


def stopping(rank, out):
    os.environ["LOCAL_RANK"] = str(rank)
    hang.run(settings(out), World(rank, 2, CPU))


@pytest.mark.slow
def test_two_ranks_on_cpus_fill_the_table(tmp_path, capsys):
    wrong, _ = run_ranks(all_but_hang, 2, tmp_path)
    assert wrong.outcome == FAILED
    assert "differ from plain autograd's" in wrong.found
    assert [succeeded for succeeded, _ in outcomes(stopping, 2, tmp_path, timeout=30)] == [False, False]
    assert main(["--out", str(tmp_path), "--report"]) == 0
    found = json.loads((tmp_path / "cluster.json").read_text())["rows"]
    rows = {(row["part"], row["name"]): row for row in found}
    assert {row["outcome"] for row in rows.values()} == {OK}
    # Every schedule and every composition that two ranks allow has the losses of plain autograd.
    assert {name for part, name in rows if part == "schedules"} == set(SCHEDULES)
    assert {name for part, name in rows if part == "meshes"} == {
        f"pipeline 1 x {name} 2, zb_v" for name in ("replicate", "shard", "tensor")
    }
    link = rows["links", "0 <-> 1 inside a node"]["numbers"]
    assert min(link["latency_ms"], link["one_way"], link["both_ways"]) > 0
    for runtime in ("zbpp", "torch"):
        timed = rows["speed", f"1f1b (1 stages per rank), {runtime}"]["numbers"]
        assert timed["makespan_ms"] > 0
        assert timed["predicted_makespan_ms"] > 0
    assert "rank 0 named it after" in rows["hang", "rank 1 stops in F"]["found"]
    text = capsys.readouterr().out
    assert text == (tmp_path / "cluster.txt").read_text()
    assert text.splitlines()[-1] == f"{len(rows)} rows: none failed, 0 SLOW, 0 not run"


# ---------------------------------------------------------------- failures are rows


def test_a_step_that_raises_is_a_row_and_says_why(tmp_path):
    def fails():
        raise RuntimeError("no route\nto host")

    assert attempt("links", "a", fails) == Row("links", "a", FAILED, "rank 0: RuntimeError: no route", {})


def test_a_row_during_which_the_processes_died_and_a_part_that_never_began_are_failures(tmp_path):
    journal = Journal(tmp_path, "schedules")
    journal.begin("schedules", "zb_h1")
    journal.end(Row("schedules", "zb_h1", OK, "fine", {"difference": 0.0}))
    journal.begin("schedules", "zb_v")
    (path,) = tmp_path.glob("rows-*.jsonl")
    path.write_text(path.read_text() + '{"begun": ["sched')  # killed while it wrote
    (tmp_path / "parts").write_text("links\nschedules\n")
    text, is_fine = report(tmp_path)
    rows = {(row.part, row.name): row for row in collected(tmp_path)}
    assert not is_fine
    assert rows["schedules", "zb_h1"].outcome == OK
    assert "ended while this ran: see schedules.log" in rows["schedules", "zb_v"].found
    assert rows["schedules", "(the rest)"].outcome == NOT_RUN
    assert "never began: see links.log" in rows["links", "(start)"].found
    assert text.splitlines()[-1].startswith("4 rows: 2 FAILED (links (start); schedules zb_v)")


@pytest.mark.parametrize(
    ("said", "after", "outcome"),
    [
        ("CommunicationError: late rank 2 is behind: at 2F0", 31.0, OK),
        ("CommunicationError: late rank 2 is behind: at 2F0", 99.0, FAILED),  # much later than the timeout
        ("CommunicationError: late rank 1 is behind: at 1F0", 31.0, FAILED),
        ("the step ended: nothing stopped", 1.0, FAILED),
        (None, 0.0, FAILED),
    ],
)
def test_the_rank_that_stopped_has_to_be_named_in_time(tmp_path, said, after, outcome):
    folder = tmp_path / "hang"
    folder.mkdir()
    assert verdict(tmp_path) is None
    (folder / "begin.json").write_text(json.dumps({"victim": 2, "begin": 0.0, "timeout": 30.0}))
    if said:
        (folder / "said-0.json").write_text(json.dumps({"rank": 0, "after": after, "said": said}))
    found = verdict(tmp_path)
    assert (found.name, found.outcome) == ("rank 2 stops in F", outcome), found


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 9])
def test_every_pair_of_nodes_meets_once_and_nobody_twice_in_a_round(number):
    rounds = all_pairs(number)
    assert sorted(pair for each in rounds for pair in each) == [*combinations(range(number), 2)]
    for each in [*rounds, *neighbours(number)]:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))
    ring = {(rank, (rank + 1) % number) for rank in range(number)}
    assert {tuple(sorted(pair)) for pair in ring} == {pair for each in neighbours(number) for pair in each}


def test_a_link_with_less_than_half_of_the_usual_bandwidth_is_slow_and_is_shown():
    links = [Link((rank, rank + 1), "between nodes", 0.01, 20.0, 38.0) for rank in range(40)]
    links[7] = links[7]._replace(one_way=9.0)
    outcome, text, _ = judged(links[7], links)
    assert outcome == SLOW
    assert "links between nodes have 20.00 GB/s: look at the cable" in text
    assert judged(links[6], links)[0] == OK
    assert shown(links)[0] == links[7]
    assert len(shown(links)) == 4


def test_tensor_degrees_that_leave_a_node_are_told():
    hosts = ["a"] * 4 + ["b"] * 4
    _, text, numbers = tensor_degrees(hosts)
    assert numbers == {"inside": [2, 4], "across": [8]}
    assert "inside a node: 2, 4; tensor=8: 1 of 1 tensor groups span nodes" in text
    assert mesh_text(8, {"tensor": 4}) == "pipeline 2 x tensor 4"
    assert tensor_degrees(["a"] * 2)[0] == OK


# ---------------------------------------------------------------- the script

PYTHON = """#!/usr/bin/env bash
echo "$* PET=${PET_NNODES:-}" >> "$CALLS"
[[ $1 == -c || $* == *--report* || $* == *--check-arguments* ]] && exit 0
[[ $* == *"--parts links"* ]] && touch "$OUT/first-node"
exit 1
"""


def run_script(tmp_path, *arguments, **environment):
    """(the finished script, the calls of python that torchrun would get); each part fails."""
    stub, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    stub.write_text(PYTHON)
    stub.chmod(0o755)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho node-1\necho node-2\n")
    scontrol.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    more = {"PATH": path, "PYTHON": str(stub), "CALLS": str(calls), "OUT": str(out), **environment}
    command = ["bash", str(SCRIPT), "--out", str(out), *arguments]
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True)
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done, [line for line in lines if "torch.distributed.run" in line], lines


def test_parts_that_fail_do_not_keep_the_others_from_running(tmp_path):
    done, launches, lines = run_script(tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.partition("--parts ")[2].split()[0] for line in launches] == list(PARTS)
    assert all("--standalone --nproc-per-node=gpu" in line for line in launches)
    assert "--report" in lines[-1]
    assert (tmp_path / "out/parts").read_text().split() == list(PARTS)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("--nnodes", "2", "--head", "node-1"), {}),
        ((), {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[1-2]"}),
        ((), {"PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": "node-1:29400"}),
    ],
)
def test_several_nodes_meet_at_the_head_on_a_port_for_each_part(tmp_path, arguments, environment):
    _, launches, _ = run_script(tmp_path, *arguments, "--parts", "links,hang", "--steps", "3", **environment)
    assert len(launches) == 2
    for number, line in enumerate(launches):
        assert f"--nnodes=2 --rdzv-endpoint=node-1:{29600 + number} --nproc-per-node=gpu" in line
        assert line.endswith("--steps 3 PET=")  # torchrun finds no second opinion in its environment


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nnodes", "2"), "needs --head"),
        (("--nnodes", "x"), "write a number"),
        (("--out",), "needs a value"),
    ],
)
def test_the_script_refuses_what_it_cannot_start(tmp_path, arguments, words):
    done, launches, _ = run_script(tmp_path, *arguments)
    assert (done.returncode, launches) == (2, [])
    assert words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "links,lniks"], "'lniks' is no part: write some of links,"),
        (["--timed", "zbh1"], "'zbh1' is no schedule"),
        (["--steps", "0"], "write a number above 0"),
    ],
)
def test_wrong_arguments_are_told_with_what_to_write(tmp_path, arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--out", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_help_names_the_script_and_the_parts():
    done = subprocess.run(["bash", str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--nnodes 4 --head node-1" in done.stdout
    code = [sys.executable, "-m", "zbpp.benchmark.cluster", "--help"]
    assert "links,schedules,meshes,speed,hang" in subprocess.run(code, capture_output=True, text=True).stdout
