"""What is read, that every window comes once per epoch, and that a step is all there is to save."""

import gzip

import numpy as np
import pytest
import torch

from zbpp.data import Batches, RandomRegression, text_data
from zbpp.data.text import load_tokens
from zbpp.data.windows import Windows

TEXT = "the quick brown fox jumps over the lazy dog\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("aaa\n")
    (tmp_path / "b.txt").write_text("bb\n")
    (tmp_path / "deep" / "c.txt").write_text("c\n")
    (tmp_path / "notes.md").write_text("not me\n")
    return tmp_path


def text_of(*given, **options):
    return bytes(load_tokens(*given, **options)[0])


def data(path, **options):
    sizes = {"sequence_length": 1, "vocab_size": 256, "batch_size": 1, "seed": 0, "held_out": 0}
    return text_data(path=None if path is None else str(path), **{**sizes, **options})


def tokens_of(source):
    """The tokens of batches in the order of the text."""
    inputs, targets = source.samples.rows(np.arange(source.samples.num_samples)).tokens.T
    return sorted([*inputs.tolist(), targets.max()])


def test_files_are_read_byte_by_byte_and_a_folder_at_any_depth_by_pattern(folder):
    assert text_of(folder / "notes.md") == b"not me\n"
    assert sorted(text_of(folder).splitlines()) == [b"aaa", b"bb", b"c"]
    assert text_of(folder, "*.md") == b"not me\n"
    assert text_of(folder, max_bytes=5) == text_of(folder)[:5]


def test_held_out_is_the_end_and_train_the_rest(folder):
    (folder / "long").write_bytes(bytes(range(1, 201)))
    found = data(folder / "long", held_out=0.1)
    assert tokens_of(found.train) == list(range(1, 181))
    assert tokens_of(found.evaluation) == list(range(181, 201))
    whole = data(folder / "long")
    assert tokens_of(whole.train) == list(range(1, 201))
    assert whole.num_evaluation_batches == 0


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_tokens_in_npy_and_bin_files_are_numbers_and_not_the_bytes_of_a_text(tmp_path, dtype):
    tokens = np.arange(200, dtype=dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    tokens.tofile(tmp_path / "tokens.bin")
    for name, given in (("tokens.npy", None), ("tokens.bin", dtype)):
        found, vocab_size = load_tokens(tmp_path / name, dtype=given)
        assert (found.tolist(), vocab_size) == (list(range(200)), 200)
        assert load_tokens(tmp_path / name, dtype=given, max_bytes=80)[0].nbytes == 80
        inputs, targets = data(tmp_path / name, dtype=given, sequence_length=4).train.batch(0)
        assert torch.equal(inputs + 1, targets)


@pytest.fixture
def tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["?", *sorted(set(TEXT.split()))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_gives_its_tokens_and_vocabulary_even_if_it_cuts_and_pads(folder, tokenizer_file):
    (folder / "text").write_text(TEXT)
    words = ["?", *sorted(set(TEXT.split()))]
    for length in (None, 3, 1000):  # BERT's files, and many others, hold both
        if length is not None:
            tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tokenizer_file))
            tokenizer.enable_truncation(length)
            tokenizer.enable_padding(length=length)
            tokenizer.save(str(tokenizer_file))
        tokens, vocab_size = load_tokens(folder / "text", tokenizer=tokenizer_file)
        assert [words[token] for token in tokens] == TEXT.split()
        assert vocab_size == len(words)


def windows_of(batches, steps):
    """The first token of each sample: the number of its window, where the tokens count up."""
    firsts = torch.cat([batches.batch(step)[0][:, 0] for step in steps])
    return (firsts // batches.samples.sequence_length).tolist()


def counting(num_tokens=101, sequence_length=4, batch_size=5, seed=0):
    return Batches(Windows(np.arange(num_tokens), sequence_length=sequence_length, seed=seed), batch_size)


def test_targets_are_the_tokens_after_the_inputs():
    inputs, targets = counting().batch(0)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(4))


def test_windows_come_once_per_epoch_where_batches_cross_its_end():
    order = windows_of(counting(batch_size=7), range(25))  # 175 samples: 7 epochs of 25 windows
    for epoch in range(7):
        assert sorted(order[25 * epoch : 25 * epoch + 25]) == list(range(25))


def test_a_step_number_is_all_it_takes_to_resume():
    running = counting(batch_size=7)
    seen = [running.batch(step) for step in range(12)]
    for step in (11, 3, 7, 0):
        fresh = counting(batch_size=7)
        for tensor, expected in zip(fresh.batch(step), seen[step], strict=True):
            assert torch.equal(tensor, expected)


def test_batches_do_not_touch_or_see_the_global_random_state():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    counting().batch(0)
    RandomRegression(in_features=3, out_features=2, batch_size=5, seed=0).batch(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", None, {}, "a.txt' does not exist .*name a file or a folder"),
        ("a.txt", b"", {}, "the corpus .*a.txt is empty"),
        ("a.txt", gzip.compress(b"text", mtime=0), {}, "is no text: it holds NUL bytes"),
        ("a.txt", b"text", {"path": "folder"}, r"matches pattern='\*.txt': it holds 1 of \*.md"),
        ("a.txt", b"text", {"held_out": 1.0}, "held_out=1.0 is a share"),
        ("a.txt", b"text", {"tokenizer": "none.json"}, "name the tokenizer.json"),
        ("a.txt", b"text", {"sequence_length": 4}, "needs 5 tokens .* the corpus has 4: .*=3 or less"),
        ("a.txt", b"text", {"batch_size": 4}, "the corpus has 3 windows .* a batch takes 4: give more"),
        ("a.txt", b"text", {"vocab_size": 100}, "write model.vocab_size=256"),
        ("a.bin", b"abcd", {}, "doesn't say what numbers it holds: write data.dtype"),
        ("a.bin", b"abcd", {"dtype": "uint16", "tokenizer": "none.json"}, "holds tokens already"),
        ("a.npy", np.ones(9), {}, r"holds float64 of shape \(9,\): write one line"),
        ("a.npy", np.array([3, -1]), {}, "whole numbers from 0"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, name, content, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.md").write_text("text")
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data(**{"path": name, **options})
