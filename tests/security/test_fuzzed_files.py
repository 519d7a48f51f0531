"""Whatever bytes a file of a stranger holds: they are read, or refused by the documented error, and soon."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fuzzing import PARSERS, complaint, mutated
from zbpp.checkpoints.folders import manifest_of
from zbpp.models.hf.config import read_config
from zbpp.schedule import Timetable, simulate
from zbpp.training.run_folder import FolderError, check_free


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for the files of this module alone.

    A config.yaml above the folders of other tests would be read by them: some look for one above their own.
    """
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", PARSERS)
def test_a_valid_file_is_read(name, tmp_path):
    for sample in PARSERS[name].samples[:1]:
        assert complaint(PARSERS[name], sample, tmp_path) == ""


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_changed_files_are_read_or_refused_in_order(folder, name, seed):
    rng, parser = random.Random(seed), PARSERS[name]
    content = mutated(rng.choice(parser.samples), rng)
    assert complaint(parser, content, folder) == "", content


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=20)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_order(folder, name, content):
    assert complaint(PARSERS[name], content, folder) == ""


def test_a_parser_that_hangs_or_fails_would_be_found(tmp_path):
    def found(read, errors=()):
        return complaint(PARSERS["plan"]._replace(read=read, errors=errors), b"", tmp_path)

    assert found(lambda path: {}["x"]) == "KeyError: 'x'"
    assert found(lambda path: bytes(2**40)) == "MemoryError"
    assert found(lambda path: {}["x"], (KeyError,)) == ""


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", "a/b", "."])
def test_a_manifest_names_no_file_outside_its_folder(tmp_path, name):
    files = {".metadata": 1, "state.json": 1, name: 1}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    with pytest.raises(ValueError, match="lists files of another folder"):
        manifest_of(tmp_path)


def test_deep_json_in_a_run_folder_is_no_run(tmp_path):
    deep = "[" * 200_000
    for name in ("job.json", "summary.json", "metrics.jsonl", ".lock"):
        (tmp_path / name).write_text(deep)
    with pytest.raises(FolderError, match="holds a run already"):
        check_free(tmp_path)
    check_free(tmp_path, overwrite=True)


def test_a_plan_of_many_ranks_or_stages_takes_seconds():
    """Each rank made arrays over all stages: 20,000 ranks in a file of 300 kB took many minutes."""
    rows = [Timetable.parse("\n".join(f"{i}F0 {i}BW0" for i in range(4000)))]
    rows += [
        Timetable.parse(" ".join([*(f"{i}F0" for i in range(9000)), *(f"{i}BW0" for i in range(9000)[::-1])]))
    ]
    assert [simulate(each).makespan for each in rows] == [12000, 27000]


def test_an_attention_from_a_hub_is_refused():
    with pytest.raises(
        ValueError, match="attn_implementation=a/kernel is code from a hub: write sdpa or eager"
    ):
        read_config({"model_type": "llama", "attn_implementation": "a/kernel"}, {})
