"""Text to prepared tokens, and to batches: nothing lost, shares exact, documents apart, mistakes named."""

import gzip
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from zbpp.data import token_data
from zbpp.data.documents import Reading, documents_of, units_of
from zbpp.data.mixture import Mixture, shares_in_block
from zbpp.data.prepare import prepare
from zbpp.data.prepared import HEADER, HELD_OUT, TRAIN, open_prepared, partial_folder
from zbpp.data.windows import Windows, positions_in_documents

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
    prepared.check()


def test_tokens_are_the_tokenizers_with_an_end_after_each_document(texts, tokenizer_file, tmp_path):
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tokenizer_file))
    documents, files = texts
    header = prepare(
        files, tmp_path / "out", reading=LINES, tokenizer=tokenizer_file, end_token="<end>", held_out=0
    )
    expected = [[*tokenizer.encode(each).ids, tokenizer.token_to_id("<end>")] for each in documents]
    assert documents_in(open_prepared(tmp_path / "out"), TRAIN) == expected
    assert (tmp_path / "out/tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    counts = Counter(token for each in expected for token in each)
    total = sum(counts.values())
    entropy = -sum(n / total * np.log(n / total) for n in counts.values())
    assert header.unigram_entropy == pytest.approx(entropy, rel=1e-12)


def test_jsonl_and_a_dataset_on_disk_give_the_documents_of_the_text(texts, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("zbpp.data.documents.UNIT_BYTES", 500)  # lines cross the ends of the ranges
    monkeypatch.setattr("zbpp.data.documents.UNIT_ROWS", 50)
    documents, _ = texts
    (tmp_path / "all.jsonl").write_text(
        "".join(json.dumps({"n": 1, "body": each}) + "\n" for each in documents)
    )
    datasets.DatasetDict({"a": datasets.Dataset.from_dict({"body": documents})}).save_to_disk(
        tmp_path / "saved"
    )
    for source, split in (("all.jsonl", None), ("saved", "a")):
        prepare(
            [tmp_path / source],
            tmp_path / "out",
            reading=Reading(field="body", split=split),
            held_out=0,
            overwrite=True,
        )
        found = documents_in(open_prepared(tmp_path / "out"), TRAIN)
        assert [bytes(each).decode() for each in found] == documents
    with pytest.raises(ValueError, match=r"no split is named; write --split with one of a"):
        prepare([tmp_path / "saved"], tmp_path / "other")


@pytest.mark.parametrize("size", [1, 18, 19, 20, 38, 1000])
def test_each_line_of_a_jsonl_file_is_in_one_range(tmp_path, monkeypatch, size):
    """Lines of 19 bytes: ranges end inside of lines, at their ends, and behind several."""
    monkeypatch.setattr("zbpp.data.documents.UNIT_BYTES", size)
    documents = [f"{number:06}" for number in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{each}"}}\n' for each in documents))
    assert (tmp_path / "a.jsonl").stat().st_size == 30 * 19
    units = units_of([tmp_path / "a.jsonl"], Reading())
    assert [each for unit in units for each in documents_of(unit, Reading())] == documents


def at_once(done, total):
    raise KeyboardInterrupt


def test_a_run_that_was_cut_goes_on_and_ends_as_one_that_was_not(texts, tmp_path, monkeypatch):
    monkeypatch.setattr("zbpp.data.documents.UNIT_BYTES", 1)  # a unit a file
    whole = prepare(texts[1], tmp_path / "whole", reading=LINES)

    def cut(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(texts[1], tmp_path / "cut", reading=LINES, progress=cut)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(KeyboardInterrupt):  # nothing was finished yet: other settings may follow
        prepare(texts[1], tmp_path / "none", reading=LINES, held_out=0.5, progress=at_once)
    prepare(texts[1], tmp_path / "none", reading=LINES)
    with pytest.raises(FileNotFoundError, match=r"cut.partial. is not finished"):
        open_prepared(tmp_path / "cut")
    with pytest.raises(ValueError, match=r"was begun with other settings \(held_out changed\)"):
        prepare(texts[1], tmp_path / "cut", reading=LINES, held_out=0.5)
    seen = []
    assert (
        prepare(texts[1], tmp_path / "cut", reading=LINES, progress=lambda *each: seen.append(each)) == whole
    )
    assert len(seen) == 3  # one unit was done: that, and two more
    assert not partial_folder(tmp_path / "cut").exists()


def test_the_script_with_two_processes_writes_what_one_process_writes(texts, tmp_path, monkeypatch):
    prepare(texts[1], tmp_path / "one", reading=LINES)
    command = [sys.executable, ROOT / "scripts/prepare_data.py"]
    options = [*texts[1], "--separator", r"\n\n", "--processes", "2"]
    done = subprocess.run([*command, tmp_path / "two", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "vocab_size=256" in done.stdout
    assert (tmp_path / "two" / HEADER).read_text() == (tmp_path / "one" / HEADER).read_text()
    again = subprocess.run([*command, tmp_path / "two", *options], capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stderr.startswith("error: ")
    assert "exists: name another folder" in again.stderr


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
    assert batch.keys() == {"input_ids", "position_ids", "labels"}
    for inputs, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        start = text.index(bytes(inputs.tolist()))
        expected, position = [], 0
        for place in range(start, start + 16):
            position = 0 if place == start or place in starts_at else position + 1
            expected.append(position)
        assert positions.tolist() == expected
    inputs, targets = data(prepared).train.batch(3)
    assert torch.equal(inputs, batch["input_ids"])
    assert torch.equal(targets, batch["labels"])


def test_an_end_at_a_windows_edge_and_two_in_one_window():
    ends = np.array([4, 6, 8, 30])
    found = positions_in_documents(np.array([0, 4, 8]), 4, ends)
    assert found.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]


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


def test_a_mixture_is_decided_by_seed_and_step():
    sets = [Numbered(0), Numbered(1)]
    orders = [Mixture(sets, [3, 1], seed=seed).rows(np.arange(40)).tokens for seed in (0, 0, 1)]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert np.array_equal(Mixture(sets, [3, 1], seed=0).rows(np.arange(20, 40)).tokens, orders[0][20:])


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


def newer_header(folder):
    (folder / HEADER).write_text(json.dumps({"format": 2, "parts": {}}))


def cut_tokens(folder):
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-2])


def no_documents(folder):
    (folder / "train.documents.bin").unlink()


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (shutil.rmtree, {}, r"holds no prepared tokens .*make them by scripts/prepare_data.py"),
        (broken_header, {}, r"is no header of prepared tokens \(JSONDecodeError"),
        (newer_header, {}, "has format 2, this zbpp reads formats up to 1"),
        (cut_tokens, {}, r"train.bin' has \d+ bytes, the header says \d+: it was cut"),
        (no_documents, {}, "train.documents.bin' is missing"),
        (id, {"vocab_size": 100}, "the data has 256 tokens, .*write model.vocab_size=256"),
        (id, {"sequence_length": 10_000}, r"out \(train\) has \d+: write sequence_length="),
        (id, {"sequence_length": 500, "batch_size": 50}, r"has \d windows .* a batch takes 50: give"),
        (id, {"path": None}, "write data.path=FOLDER, or data.mixture="),
        (id, {"path": None, "mixture": [{"path": "a"}]}, r"data.mixture has \[{'path': 'a'}\]"),
        (id, {"path": None, "mixture": [{"path": "a", "weight": 0}]}, r"weights of a mixture are \[0\]"),
        (id, {"path": None, "mixture": [{"path": "a", "weight": "3"}]}, r"are \['3'\]: write a number"),
        (id, {"tokenizer": __file__}, r"was not made by data.tokenizer=.*, but holds bytes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(prepared, spoil, options, message):
    spoil(prepared)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data(**{"path": prepared, **options})


def test_sets_of_different_tokenizers_are_not_mixed(prepared, texts, tokenizer_file, tmp_path):
    prepare(texts[1], tmp_path / "words", reading=LINES, tokenizer=tokenizer_file)
    both = [{"path": str(prepared), "weight": 1}, {"path": str(tmp_path / "words"), "weight": 1}]
    with pytest.raises(ValueError, match="were made by different tokenizers"):
        data(mixture=both)
    (tmp_path / "edited.json").write_text(tokenizer_file.read_text() + "\n")
    with pytest.raises(ValueError, match="but holds tokens of another one"):
        data(tmp_path / "words", tokenizer=str(tmp_path / "edited.json"))
    assert data(tmp_path / "words", tokenizer=str(tokenizer_file), sequence_length=4).train.batch(0)


def test_a_flipped_bit_is_found_by_check(prepared):
    content = bytearray((prepared / "train.bin").read_bytes())
    content[10] ^= 1
    (prepared / "train.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"train.bin' is damaged: its checksum is"):
        open_prepared(prepared).check()


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 1}\n', {}, r"line at byte 14: 'text' holds a int"),
        ("a.jsonl", b'{"body": "x"}\n', {}, r"'text' is missing; fields with text: body; write --field NAME"),
        ("a.jsonl", b"text\n", {}, "line at byte 0, is no JSON"),
        ("a.jsonl", b"[1]\n", {}, "is a list: write one object a line"),
        ("a.txt", gzip.compress(b"x", mtime=0), {}, "is no text: it is a gzip file"),
        ("a.txt", b"", {}, "the sources hold no text"),
        ("a.txt", b"one document", {"held_out": 0.5}, "of 1 documents leaves none for"),
        ("a.txt", b"x", {"held_out": 1.0}, "--held-out 1.0 is a share"),
        ("a.txt", b"x", {"end_token": "<end>"}, "--end-token '<end>' needs --tokenizer"),
        ("a.txt", b"x", {"tokenizer": Path("nowhere.json")}, "tokenizer 'nowhere.json' is not a file"),
    ],
)
def test_sources_that_are_no_text_are_refused(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare([tmp_path / name], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
