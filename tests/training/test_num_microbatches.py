"""A batch has one loss and one norm, whatever the number of its microbatches and of ranks."""

import pytest
import torch
from hydra import compose, initialize_config_dir

from helpers.chat import PLAIN, write_conversations, write_tokenizer
from helpers.configs import FOLDER
from helpers.runs import metrics_in
from zbpp import config as configs
from zbpp.commands import command_line
from zbpp.run import app
from zbpp.stage_api import IGNORED

ROWS, LENGTH = 8, 48
MODEL = [
    "model=llama_tiny", "model.num_layers=2", "model.hidden_size=16", f"model.sequence_length={LENGTH}",
    "model.vocab_size=300",
]  # fmt: skip
RUN = ["steps=3", "evaluate_every=0", "precision=float64", "parallel.device=cpu", "parallel.timeout=100"]


class Unequal(torch.utils.data.Dataset):
    """Rows of 48 labels, of which 1 to 48 are counted."""

    def __len__(self):
        return 32

    def __getitem__(self, row):
        tokens = torch.arange(LENGTH).mul(7 + row) % 300
        labels = torch.roll(tokens, -1)
        labels[1 + row * 5 % LENGTH :] = IGNORED
        return tokens, labels


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """{kind of data: its keys}."""
    folder = tmp_path_factory.mktemp("data")
    write_tokenizer(folder / "tokenizer.json")
    write_conversations(folder / "chats.jsonl", 24)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    chat = ["data=chat", f"data.path={folder}/chats.jsonl", f"data.tokenizer={folder}/tokenizer.json"]
    (folder / "template.jinja").write_text(PLAIN)
    return {
        "custom": [f"data._target_={__name__}.Unequal"],
        "text": ["data=text", f"data.path={folder}/text.txt"],
        "chat": [*chat, f"data.chat_template={folder}/template.jinja"],
    }


def given(data, run, number):
    parts = [f"num_microbatches={number}", f"microbatch_size={ROWS // number}"]
    return [*MODEL, *data, *RUN, *parts, f"run_dir={run}"]


def train(arguments):
    configs.register()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        app.train(configs.Composed.of(compose("train", command_line.arguments(arguments))))


def trained(run):
    """(loss, norm) of each step, from metrics.jsonl."""
    return [value for row in metrics_in(run) for value in (row["loss"], row["grad_norm"])]


@pytest.mark.parametrize("kind", ["custom", "text", "chat"])
def test_losses_and_norms_of_a_run_do_not_depend_on_the_number_of_microbatches(tmp_path, data, kind):
    found = []
    for number in (1, 2, 4):
        train([*given(data[kind], tmp_path / str(number), number), "schedule=1f1b"])
        found.append(trained(tmp_path / str(number)))
    assert len(found[0]) == 6
    assert found[1] == pytest.approx(found[0], rel=1e-9)
    assert found[2] == pytest.approx(found[0], rel=1e-9)
