"""What is read, that every window comes once per epoch, and that a step is all there is to save."""

import gzip
import math
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from zbpp.data import Batches, RandomRegression, text_data
from zbpp.data.corpus import load_corpus

TEXT = "the quick brown fox jumps over the lazy dog\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("aaa\n")
    (tmp_path / "b.txt").write_text("bb\n")
    (tmp_path / "deep" / "c.txt").write_text("c\n")
    (tmp_path / "notes.md").write_text("not me\n")
    return tmp_path


def text_of(corpus):
    return bytes(corpus.tokens)


def test_a_file_is_read_byte_by_byte(folder):
    corpus = load_corpus(folder / "notes.md")
    assert text_of(corpus) == b"not me\n"
    assert corpus.vocab_size == 256


def test_a_folder_is_read_at_any_depth_by_pattern(folder):
    assert sorted(text_of(load_corpus(folder)).splitlines()) == [b"aaa", b"bb", b"c"]
    assert text_of(load_corpus(str(folder), pattern="*.md")) == b"not me\n"


def test_the_order_of_files_does_not_depend_on_where_the_folder_is(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("elsewhere")
    for name in ("b.txt", "deep/c.txt", "a.txt"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes((folder / name).read_bytes())
    assert text_of(load_corpus(copy)) == text_of(load_corpus(folder))


def test_max_bytes_cuts(folder):
    whole = text_of(load_corpus(folder))
    assert text_of(load_corpus(folder, max_bytes=5)) == whole[:5]


def test_the_default_corpus_is_python_source_of_a_few_mebibytes():
    corpus = load_corpus()
    assert 2**20 < len(corpus.tokens) <= 2**22
    assert b"def __init__(self" in text_of(corpus)
    assert corpus.fingerprint == load_corpus().fingerprint


def test_the_default_corpus_holds_no_tests_and_no_packages():
    assert b"import unittest\nimport pytest" not in text_of(load_corpus())
    assert b"class TestCase(unittest.TestCase)" not in text_of(load_corpus(max_bytes=10**9))


def test_held_out_is_the_end_and_train_the_rest(folder):
    (folder / "long").write_bytes(bytes(range(1, 201)))
    corpus = load_corpus(folder / "long", held_out=0.1)
    assert bytes(corpus.train) == bytes(range(1, 181))
    assert bytes(corpus.held_out) == bytes(range(181, 201))


def test_nothing_held_out_leaves_all_for_training(folder):
    corpus = load_corpus(folder, held_out=0)
    assert (len(corpus.train), len(corpus.held_out)) == (len(corpus.tokens), 0)


def test_the_fingerprint_tells_corpora_and_splits_apart(folder):
    corpora = [
        load_corpus(folder),
        load_corpus(folder, max_bytes=8),
        load_corpus(folder, held_out=0.5),
        load_corpus(folder, pattern="*.md"),
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 4


def test_unigram_entropy_is_that_of_the_counts(folder):
    (folder / "text").write_text(TEXT)
    total = len(TEXT)
    expected = -sum(n / total * math.log(n / total) for n in Counter(TEXT).values())
    assert load_corpus(folder / "text").unigram_entropy() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64", "uint64"])
def test_tokens_in_a_npy_file_are_tokens_and_not_its_bytes(tmp_path, dtype):
    """They were read as the bytes of a text, header and all."""
    np.save(tmp_path / "tokens.npy", np.arange(200, dtype=dtype))
    corpus = load_corpus(tmp_path / "tokens.npy", held_out=0.25)
    assert corpus.train.tolist() == list(range(150))
    assert corpus.held_out.tolist() == list(range(150, 200))
    assert corpus.vocab_size == 200
    assert corpus.unigram_entropy() == pytest.approx(math.log(200))
    assert len(load_corpus(tmp_path / "tokens.npy", max_bytes=80).tokens) * np.dtype(dtype).itemsize == 80


def test_tokens_in_a_bin_file_are_numbers_of_the_type_that_is_said(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(40_000, 40_100, dtype=np.uint16).tofile(path)
    assert load_corpus(path, dtype="uint16").tokens.tolist() == list(range(40_000, 40_100))
    inputs, targets = text_data(
        path=path, dtype="uint16", sequence_length=4, vocab_size=50_000, batch_size=2, seed=0, held_out=0
    ).train.batch(0)
    assert torch.equal(inputs + 1, targets)
    with pytest.raises(ValueError, match="write model.vocab_size=40100"):
        text_data(path=path, dtype="uint16", sequence_length=4, vocab_size=256, batch_size=2, seed=0)


@pytest.mark.parametrize(
    ("name", "write", "options", "message"),
    [
        (
            "a.bin",
            lambda path: path.write_bytes(b"abcd"),
            {},
            "doesn't say what numbers it holds: write data.dt",
        ),
        (
            "a.bin",
            lambda path: path.write_bytes(b"abc"),
            {"dtype": "uint16"},
            "has 3 bytes, no whole number",
        ),
        (
            "a.bin",
            lambda path: path.write_bytes(b"abcd"),
            {"dtype": "float32"},
            "read as dtype=float32",
        ),
        ("a.bin", lambda path: path.touch(), {"dtype": "uint16"}, "a.bin is empty"),
        (
            "a.npy",
            lambda path: np.save(path, np.ones(9)),
            {},
            r"holds float64 of shape \(9,\): write one line",
        ),
        ("a.npy", lambda path: np.save(path, np.ones((3, 3), int)), {}, r"holds int64 of shape \(3, 3\)"),
        (
            "a.npy",
            lambda path: np.save(path, np.array([3, -1])),
            {},
            "holds the token -1: ",
        ),
        (
            "a.npy",
            lambda path: np.save(path, np.arange(9)),
            {"dtype": "uint16"},
            "says by itself",
        ),
        ("a.npy", lambda path: path.write_text("text"), {}, "can't be read as .npy"),
        (
            "a.txt",
            lambda path: path.write_text("text"),
            {"dtype": "uint16"},
            "is for a .bin file",
        ),
        ("a.txt", lambda path: path.write_bytes(gzip.compress(b"text")), {}, "is no text: it is a gzip file"),
        ("a", lambda path: path.write_bytes(b"\x93NUMPY"), {}, "is no text: it is a NumPy file"),
        (
            "a.txt",
            lambda path: path.write_bytes("text".encode("utf-16")),
            {},
            "holds NUL bytes, as",
        ),
        ("a.safetensors", lambda path: path.write_bytes(b"\x02" + bytes(7) + b"{}"), {}, "holds NUL bytes"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_what_to_write(tmp_path, name, write, options, message):
    """A .bin, a .npy, a gzip or safetensors file was trained on byte by byte."""
    write(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / name, **options)


@pytest.fixture
def tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["?", *sorted(set(TEXT.split()))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_gives_its_tokens_and_vocabulary(folder, tokenizer_file):
    (folder / "text").write_text(TEXT)
    corpus = load_corpus(folder / "text", tokenizer=tokenizer_file)
    words = ["?", *sorted(set(TEXT.split()))]
    assert [words[token] for token in corpus.tokens] == TEXT.split()
    assert corpus.vocab_size == len(words)


def test_a_tokenizer_file_that_cuts_and_pads_its_texts_cuts_and_pads_no_corpus(folder, tokenizer_file):
    (folder / "text").write_text(TEXT)
    whole = load_corpus(folder / "text", tokenizer=tokenizer_file).tokens.tolist()
    for length in (3, 1000):  # BERT's files, and many others, hold both
        tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tokenizer_file))
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length)
        tokenizer.save(str(tokenizer_file))
        assert load_corpus(folder / "text", tokenizer=tokenizer_file).tokens.tolist() == whole


def windows_of(batches, steps):
    """The first token of each sample: the number of its window, where the tokens count up."""
    firsts = torch.cat([batches.batch(step)[0][:, 0] for step in steps])
    return (firsts // batches.samples.sequence_length).tolist()


def counting(num_tokens=101, sequence_length=4, batch_size=5, seed=0):
    return Batches(np.arange(num_tokens), sequence_length=sequence_length, batch_size=batch_size, seed=seed)


def test_targets_are_the_tokens_after_the_inputs():
    inputs, targets = counting().batch(0)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(4))


def test_batches_are_int64_and_contiguous():
    tokens = np.arange(101, dtype=np.uint8)
    for tensor in Batches(tokens, sequence_length=4, batch_size=5, seed=0).batch(3):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (5, 4)
        assert tensor.is_contiguous()


@pytest.mark.parametrize(("num_tokens", "num_windows"), [(101, 25), (100, 24), (104, 25), (5, 1)])
def test_windows_need_one_token_more_for_the_last_target(num_tokens, num_windows):
    assert counting(num_tokens).samples.num_samples == num_windows


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_every_window_comes_once_per_epoch(epoch):
    batches = counting()
    steps = range(5 * epoch, 5 * epoch + 5)
    assert sorted(windows_of(batches, steps)) == list(range(25))


def test_windows_come_once_per_epoch_where_batches_cross_its_end():
    order = windows_of(counting(batch_size=7), range(25))  # 175 samples: 7 epochs of 25 windows
    for epoch in range(7):
        assert sorted(order[25 * epoch : 25 * epoch + 25]) == list(range(25))


def test_a_batch_larger_than_the_corpus_repeats_it():
    assert sorted(windows_of(counting(batch_size=60), [0])) == sorted(
        2 * list(range(25)) + windows_of(counting(batch_size=10), [5])
    )


def test_epochs_and_seeds_are_in_different_orders():
    batches = counting()
    orders = [
        windows_of(batches, range(0, 5)),
        windows_of(batches, range(5, 10)),
        windows_of(counting(seed=1), range(5)),
    ]
    assert len({tuple(order) for order in orders}) == 3
    assert list(range(25)) not in orders


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


def test_evaluation_goes_through_the_text_in_its_order():
    batches = counting(seed=None)
    assert batches.num_batches == 5
    assert windows_of(batches, range(batches.num_batches)) == list(range(25))


@pytest.mark.parametrize(("batch_size", "num_batches"), [(5, 5), (7, 3), (25, 1), (60, 1)])
def test_a_pass_has_full_batches_and_at_least_one(batch_size, num_batches):
    assert counting(batch_size=batch_size).num_batches == num_batches


def test_random_regression_is_decided_by_seed_and_step():
    def source(seed):
        return RandomRegression(in_features=3, out_features=2, batch_size=5, seed=seed)

    inputs, targets = source(0).batch(4)
    assert (inputs.shape, targets.shape) == ((5, 3), (5, 2))
    assert torch.equal(inputs, source(0).batch(4)[0])
    assert torch.equal(targets, source(0).batch(4)[1])
    assert not torch.equal(inputs, source(0).batch(5)[0])
    assert not torch.equal(inputs, source(1).batch(4)[0])


def test_random_regression_has_the_same_rows_in_large_and_in_small_batches():
    large, small = (
        RandomRegression(in_features=3, out_features=2, batch_size=size, seed=0) for size in (6, 3)
    )
    halves = [torch.cat(pair) for pair in zip(small.batch(2), small.batch(3), strict=True)]
    assert all(map(torch.equal, large.batch(1), halves))


def test_random_regression_can_be_learnt():
    """The targets are a function of the inputs: least squares explains most of them."""
    source = RandomRegression(in_features=3, out_features=2, batch_size=500, seed=0)
    inputs, targets = source.batch(0)
    fit = inputs @ torch.linalg.lstsq(inputs, targets).solution
    assert (fit - targets).var() < 0.3 * targets.var()


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere' does not exist .*name a text file or a folder"):
        load_corpus(tmp_path / "nowhere")


def test_a_folder_without_a_match_is_refused_with_what_it_holds(folder):
    with pytest.raises(ValueError, match=r"matches pattern='\*.rst': it holds 3 of \*.txt, 1 of \*.md"):
        load_corpus(folder, pattern="*.rst")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no file at all"):
        load_corpus(tmp_path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"the corpus .*empty.txt is empty"):
        load_corpus(tmp_path / "empty.txt")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"held_out": 1.0}, "held_out=1.0 is a share"),
        ({"held_out": -0.1}, "held_out=-0.1 is a share"),
        ({"max_bytes": 0}, "max_bytes=0 leaves nothing to read"),
    ],
)
def test_an_argument_out_of_range_is_refused(folder, argument, message):
    with pytest.raises(ValueError, match=message):
        load_corpus(folder, **argument)


def test_a_missing_tokenizer_file_is_refused(folder):
    with pytest.raises(FileNotFoundError, match="name the tokenizer"):
        load_corpus(folder, tokenizer=folder / "none.json")


def test_an_unreadable_tokenizer_file_is_refused(folder):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"notes.md' can't be read .*name a tokenizer.json"):
        load_corpus(folder, tokenizer=folder / "notes.md")


def test_a_tokenizer_without_the_package_is_refused(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="run `pip install tokenizers`"):
        load_corpus(folder, tokenizer=folder / "notes.md")


def test_a_sequence_longer_than_the_corpus_is_refused():
    message = (
        "sequence_length=10 needs 11 tokens .* the held-out part has 10: write sequence_length=9 or less"
    )
    with pytest.raises(ValueError, match=message):
        Batches(np.arange(10), sequence_length=10, batch_size=2, seed=None, name="the held-out part")


@pytest.mark.parametrize("sizes", [{"sequence_length": 0}, {"batch_size": 0}])
def test_an_empty_batch_is_refused(sizes):
    with pytest.raises(ValueError, match="must be positive"):
        counting(**sizes)


def test_a_text_of_fewer_windows_than_a_batch_is_refused(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    options = {
        "path": str(tmp_path / "text"),
        "vocab_size": 256,
        "seed": 0,
        "held_out": 0,
        "sequence_length": 8,
    }
    with pytest.raises(ValueError, match=r"the corpus has 5 windows .* a batch takes 6: give more text"):
        text_data(**options, batch_size=6)
    assert text_data(**options, batch_size=5).train.batch(0)
