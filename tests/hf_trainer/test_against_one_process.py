"""transformers.Trainer in a pipeline, against the unmodified Trainer in one process."""

import json

import pytest
import torch

from helpers.hf_trainer import ARGUMENTS, Case, assert_same, trained
from helpers.processes import run_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
TIED = Case(sizes={"tie_word_embeddings": True})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in one process, of a model with a tied weight, and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    (left,) = run_ranks(trained, 1, TIED, str(folder))
    return left, folder


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    """The same run in a pipeline, and its folder."""
    folder = tmp_path_factory.mktemp("piped")
    return run_ranks(trained, 2, TIED._replace(schedule="zb_h1"), str(folder)), folder


def test_losses_norms_rates_evaluations_and_weights_are_those_of_one_process(alone, piped):
    """Microbatches have unequal numbers of targets; an epoch's last step has one; a weight is tied."""
    (expected, _), (both, _) = alone, piped
    assert_same(both[0], expected)
    steps = [{key: each.get(key) for key in ("step", "loss", "grad_norm")} for each in both[1].logs]
    assert steps == [{key: each.get(key) for key in ("step", "loss", "grad_norm")} for each in both[0].logs]
    norms = [each["grad_norm"] for each in expected.logs if "grad_norm" in each]
    assert min(norms) < ARGUMENTS["max_grad_norm"] < max(norms)  # some are clipped


def test_a_checkpoint_of_a_pipeline_goes_on_in_one_process(alone, piped, tmp_path):
    (expected, _), (_, folder) = alone, piped
    (left,) = run_ranks(trained, 1, TIED._replace(resume=f"{folder}/run/checkpoint-4"), str(tmp_path))
    assert_same(left, expected, first=5)


def test_a_checkpoint_of_one_process_goes_on_in_a_pipeline(alone, tmp_path):
    expected, folder = alone
    case = TIED._replace(schedule="zb_v", resume=f"{folder}/run/checkpoint-4")
    left, _ = run_ranks(trained, 2, case, str(tmp_path))
    assert_same(left, expected, first=5)


def test_the_files_are_those_of_one_process(alone, piped):
    (_, one), (_, both) = alone, piped
    files = [{path.relative_to(folder).as_posix() for path in folder.rglob("*")} for folder in (one, both)]
    assert files[0] == files[1]
    states = [
        json.loads((folder / "run/checkpoint-8/trainer_state.json").read_text()) for folder in (one, both)
    ]
    assert states[0].keys() == states[1].keys()
    assert states[0]["global_step"] == states[1]["global_step"] == 8


def test_the_bubble_of_each_logged_step_stands_beside_its_loss(piped):
    both, _ = piped
    found = [[each["bubble"] for each in left.logs if "loss" in each] for left in both]
    assert found[0] == found[1]  # on all ranks
    assert len(found[0]) == 8
    assert all(0 < each < 1 for each in found[0])


@pytest.mark.parametrize("name", ["final", "run/checkpoint-8"])
def test_the_library_loads_what_was_saved(name, piped):
    """The head is tied again, and every tensor has the value that was saved."""
    both, folder = piped
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    state = model.state_dict()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert both[0].weights.keys() == state.keys() - {"lm_head.weight"}
    assert all(torch.equal(state[name], each) for name, each in both[0].weights.items())
