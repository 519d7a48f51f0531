"""Two pipelines beside each other, against the unmodified Trainer in two data-parallel processes."""

import pytest

from helpers.hf_trainer import Case, assert_same, trained
from helpers.processes import run_ranks
from hf_trainer.test_matrix import ROUNDED, accuracy, chosen, lora, plain_mean, predicted

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TIED = Case(sizes={"tie_word_embeddings": True})
TWO = {"replicas": 2}


def test_two_pipelines_are_two_data_parallel_processes(tmp_path):
    """25 rows and 12: the last batches of training and evaluation are filled up. Then one process goes on."""
    expected, _ = run_ranks(trained, 2, TIED, str(tmp_path / "ddp"))
    left = run_ranks(trained, 4, TIED._replace(schedule="zb_h1", options=TWO), str(tmp_path / "piped"))
    assert_same(left[0], expected)
