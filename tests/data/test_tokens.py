"""Text to prepared tokens, and to batches: nothing lost, shares exact, documents apart, mistakes named."""

import gzip
import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from zbpp.data import token_data
from zbpp.data.prepare import Reading, prepare
from zbpp.data.prepared import HEADER, HELD_OUT, TRAIN, open_prepared
from zbpp.data.tokens import Mixture, shares_in_block
from zbpp.data.windows import Windows

ROOT = Path(__file__).parent.parent.parent
WORDS = ["a", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs"]


@pytest.fixture
def texts(tmp_path):
    """120 documents in three text files, cut by blank lines."""
    generator = np.random.default_rng(0)
    documents = [" ".join(generator.choice(WORDS, 3 + n % 7)) for n in range(120)]
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("\n\n".join(documents[number * 40 : number * 40 + 40]))
    return documents, [tmp_path / f"{number}.txt" for number in range(3)]


@pytest.fixture
def tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: number for number, word in enumerate(["?", *WORDS])}, unk_token="?"
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


datasets = pytest.importorskip("datasets")
LINES = Reading(separator="\n\n")


def documents_in(prepared, part):
    tokens, ends = prepared.part(part)
    return [tokens[start:end].tolist() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def test_bytes_in_and_bytes_out_in_both_parts(texts, tmp_path):
    documents, files = texts
    header = prepare(files, tmp_path / "out", reading=LINES, held_out=0.2)
    prepared = open_prepared(tmp_path / "out")
    assert prepared.header == header
    assert (header.dtype, header.vocab_size, header.tokenizer) == ("uint16", 256, "bytes")
    found = {
        part: [bytes(each).decode() for each in documents_in(prepared, part)] for part in (TRAIN, HELD_OUT)
    }
    assert Counter(found[TRAIN] + found[HELD_OUT]) == Counter(documents)
    assert found[TRAIN] == [each for each in documents if each in set(found[TRAIN])]  # in their order
    assert 0.1 < len(found[HELD_OUT]) / 120 < 0.3
    assert not (tmp_path / "out.partial").exists()


def test_tokens_are_the_tokenizers_with_an_end_after_each_document(texts, tokenizer_file, tmp_path):
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tokenizer_file))
    documents, files = texts
    prepare(files, tmp_path / "out", reading=LINES, tokenizer=tokenizer_file, end_token="<end>", held_out=0)
    expected = [[*tokenizer.encode(each).ids, tokenizer.token_to_id("<end>")] for each in documents]
    assert documents_in(open_prepared(tmp_path / "out"), TRAIN) == expected
    assert (tmp_path / "out/tokenizer.json").read_bytes() == tokenizer_file.read_bytes()


def test_the_script_with_two_processes_writes_what_one_process_writes(texts, tmp_path, warm):
    prepare(texts[1], tmp_path / "one", reading=LINES)
    command = [warm.python, ROOT / "scripts/prepare_data.py"]
    options = [*texts[1], "--separator", r"\n\n", "--processes", "2"]
    done = subprocess.run([*command, tmp_path / "two", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "vocab_size=256" in done.stdout
    assert (tmp_path / "two" / HEADER).read_text() == (tmp_path / "one" / HEADER).read_text()
    again = subprocess.run([*command, tmp_path / "two", *options], capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stderr.startswith("error: ")
    assert "exists: name another folder" in again.stderr


SOURCES = ["a.jsonl", "a.jsonl.gz", "a.parquet", "saved", "split", "folder [1]"]


@pytest.mark.parametrize("name", SOURCES)
def test_each_kind_of_source_gives_the_documents_of_the_text(texts, tmp_path, name):
    documents, _ = texts
    rows = datasets.Dataset.from_dict({"body": [*documents, "", None], "n": list(range(122))})
    split = None
    match name:
        case "a.parquet":
            rows.to_parquet(tmp_path / name)
        case "saved":
            rows.save_to_disk(tmp_path / name)
        case "split":
            split = "a"
            datasets.DatasetDict(a=rows, b=rows.select([0])).save_to_disk(tmp_path / name)
        case _:
            (tmp_path / "folder [1]").mkdir()
            rows.to_json(tmp_path / "folder [1]/a [1].json")
            if name.startswith("a"):
                content = (tmp_path / "folder [1]/a [1].json").read_bytes()
                (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    before = sorted(tmp_path.rglob("*"))
    reading = Reading(field="body", split=split, pattern="*.json")
    prepare([tmp_path / name], tmp_path / "out", reading=reading, held_out=0, end_token="")
    found = documents_in(open_prepared(tmp_path / "out"), TRAIN)
    assert [bytes(each[:-1]).decode() for each in found] == documents
    assert {each[-1] for each in found} == {256}
    shutil.rmtree(tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left beside the sources


def test_a_call_that_was_cut_short_goes_on(texts, tmp_path, monkeypatch):
    expected = prepare(texts[1], tmp_path / "whole", reading=LINES)
    with monkeypatch.context() as patch:
        patch.setattr("zbpp.data.prepare._written", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(texts[1], tmp_path / "cut", reading=LINES)
    assert not (tmp_path / "cut").exists()
    with monkeypatch.context() as patch:
        patch.setattr("zbpp.data.prepare.Encoder.encode", lambda *given: 1 / 0)  # not called again
        assert prepare(texts[1], tmp_path / "cut", reading=LINES) == expected
        with pytest.raises(ZeroDivisionError):
            prepare(texts[1], tmp_path / "other", reading=LINES, held_out=0.5)


def test_a_folder_that_an_earlier_version_wrote_is_read(tmp_path):
    """Its header and files, as commit 7d91019 wrote them."""
    np.arange(40, dtype="<u2").tofile(tmp_path / "train.bin")
    np.array([10, 40], dtype="<i8").tofile(tmp_path / "train.documents.bin")
    for name in ("held_out.bin", "held_out.documents.bin"):
        (tmp_path / name).touch()
    parts = {
        "train": {"num_tokens": 40, "num_documents": 2, "checksum": "6d1b3d4ffa6b3c26"},
        "held_out": {"num_tokens": 0, "num_documents": 0, "checksum": "e4a6a0577479b2b4"},
    }
    header = {"dtype": "uint16", "vocab_size": 256, "tokenizer": "bytes", "end_token": None}
    header |= {"unigram_entropy": 3.6, "parts": parts, "format": 1}
    (tmp_path / HEADER).write_text(json.dumps(header))
    batch = data(tmp_path, sequence_length=4, across_documents=False).train.batch(0)
    assert torch.equal(batch["target"], batch["input_ids"] + 1)


# ---------------------------------------------------------------- batches


@pytest.fixture
def prepared(texts, tmp_path):
    prepare(texts[1], tmp_path / "out", reading=LINES, held_out=0.2)
    return tmp_path / "out"


def data(path=None, **options):
    sizes = {"sequence_length": 16, "vocab_size": 256, "batch_size": 4, "seed": 0}
    return token_data(**{**sizes, "path": None if path is None else str(path), **options})


def test_batches_are_windows_of_the_tokens_and_the_step_is_the_state(prepared):
    tokens = open_prepared(prepared).part(TRAIN).tokens
    windows = [tokens[start : start + 17].tolist() for start in range(0, len(tokens) - 16, 16)]
    source, seen = data(prepared).train, []
    for step in range(len(windows) // 4):
        inputs, targets = source.batch(step)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        seen += torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
    assert all(each in windows for each in seen)
    assert len({str(each) for each in seen}) == len(seen)
    assert torch.equal(data(prepared).train.batch(5)[0], source.batch(5)[0])


def test_two_replicas_read_the_rows_of_one_large_batch(prepared):
    """In every epoch, whatever the number of windows."""
    large, small = (data(prepared, batch_size=size).train for size in (6, 3))
    for step in range(100):
        halves = torch.cat([small.batch(2 * step)[0], small.batch(2 * step + 1)[0]])
        assert torch.equal(large.batch(step)[0], halves)


def test_positions_begin_anew_with_each_document(prepared):
    tokens, ends = open_prepared(prepared).part(TRAIN)
    starts_at = {0, *ends.tolist()}
    batch = data(prepared, across_documents=False).train.batch(3)
    text = bytes(tokens.tolist())
    assert batch.keys() == {"input_ids", "position_ids", "target"}
    for inputs, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        start = text.index(bytes(inputs.tolist()))
        expected, position = [], 0
        for place in range(start, start + 16):
            position = 0 if place == start or place in starts_at else position + 1
            expected.append(position)
        assert positions.tolist() == expected
    inputs, targets = data(prepared).train.batch(3)
    assert torch.equal(inputs, batch["input_ids"])
    assert torch.equal(targets, batch["target"])


class Numbered:
    """Samples that say which set they are of, and their number."""

    def __init__(self, which, num_samples=100):
        self.which, self.num_samples = which, num_samples

    def rows(self, samples):
        windows = Windows(np.arange(10), sequence_length=1, seed=None)
        return windows.rows(samples * 0)._replace(
            tokens=np.stack([samples * 0 + self.which, samples], axis=1)
        )


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([3, 1], [3, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1, 1, 1], [1, 1, 1]),
        ([50, 50], [1, 1]),
        ([1, 1e-6], [1000, 1]),
    ],
)
def test_each_block_of_a_mixture_has_exactly_its_shares(weights, counts):
    assert shares_in_block(weights).tolist() == counts
    block = sum(counts)
    mixture = Mixture([Numbered(which) for which in range(len(weights))], weights, seed=0)
    rows = mixture.rows(np.arange(3 * block)).tokens
    for first in range(0, 3 * block, block):
        assert np.bincount(rows[first : first + block, 0]).tolist() == counts
    for which, count in enumerate(counts):  # each set's samples come once, none is left out
        assert sorted(rows[rows[:, 0] == which, 1]) == list(range(3 * count))


def test_a_mixture_of_prepared_sets_reads_both(prepared, texts, tmp_path):
    prepare(texts[1][:1], tmp_path / "other", reading=LINES, held_out=0.2)
    both = [{"path": str(prepared), "weight": 3}, {"path": str(tmp_path / "other"), "weight": 1}]
    batch = data(mixture=both, across_documents=False)
    first, second = (
        bytes(open_prepared(each).part(TRAIN).tokens.tolist()) for each in (prepared, tmp_path / "other")
    )
    rows = [bytes(row.tolist()) for row in batch.train.batch(2)["input_ids"]]
    assert sum(row in first for row in rows) >= 3
    assert all(row in first or row in second for row in rows)
    assert batch.num_evaluation_batches > 0


# ---------------------------------------------------------------- mistakes


def broken_header(folder):
    (folder / HEADER).write_text("{")


def cut_tokens(folder):
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-2])


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (shutil.rmtree, {}, r"holds no prepared tokens .*make them by scripts/prepare_data.py"),
        (broken_header, {}, r"is no header of prepared tokens \(Expecting"),
        (cut_tokens, {}, r"train.bin' has \d+ bytes, the header says \d+: it was cut"),
        (id, {"vocab_size": 100}, "the data has 256 tokens, .*write model.vocab_size=256"),
        (id, {"sequence_length": 10_000}, r"out \(train\) has \d+: write sequence_length="),
        (id, {"sequence_length": 500, "batch_size": 50}, r"has \d windows .* a batch takes 50: give"),
        (id, {"path": None}, "write data.path=FOLDER, or data.mixture="),
        (id, {"path": None, "mixture": [{"path": "a"}]}, r"data.mixture has \[{'path': 'a'}\]"),
        (id, {"path": None, "mixture": [{"path": "a", "weight": 0}]}, r"weights of a mixture are \[0\]"),
        (id, {"tokenizer": __file__}, r"are of different tokenizers .*: bytes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(prepared, spoil, options, message):
    spoil(prepared)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data(**{"path": prepared, **options})


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 1}\n', {}, r"no text in a column 'text'"),
        ("a.jsonl", b'{"body": "x"}\n', {}, r"no text in a column 'text': write --field with one of body"),
        ("a.jsonl", b"text\n", {}, "a.jsonl' can't be read: JSON parse error"),
        ("a.txt", gzip.compress(b"x", mtime=0), {}, "is no text: it holds NUL bytes"),
        ("a.txt", b"", {}, "holds no text"),
        ("a.txt", b"\n\n\n\n", {"reading": LINES}, "the sources hold no text"),
        ("a.txt", b"one document", {"held_out": 0.5}, "leaves no document for"),
        ("a.txt", b"x", {"end_token": "<end>"}, "--end-token '<end>' needs --tokenizer"),
        ("a.txt", None, {}, "does not exist"),
    ],
)
def test_sources_that_are_no_text_are_refused(tmp_path, name, content, options, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare([tmp_path / name], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
