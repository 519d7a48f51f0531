"""Tensor-parallel stages of Llama and Gpt over two real processes, against the whole stage in one."""

import pytest
import torch

from helpers.cases.parallel_stages import CASES, MODELS, alone, parallel, stage_of, trained
from helpers.processes import run_ranks
from helpers.split import assert_close


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(parallel, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_parallel_stage_computes_what_the_whole_stage_does(case, ranks):
    """Outputs, gradients and initial values; names and their order stay."""
    expected, names = alone(*case)
    for found, _ in ranks:
        assert found[case].names == names
        assert_close(found[case].tensors, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_explain_shows_the_share_of_weights_that_waits_in_the_whole_stage(case, ranks):
    name, index, num_stages = case
    whole = trained(stage_of(MODELS[name], index, num_stages), index)
    assert whole.deferred_share > 0.9
    for found, _ in ranks:
        assert found[case].deferred_share == whole.deferred_share


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ranks_agree_to_the_last_bit(case, ranks):
    (one, _), (other, _) = ranks
    for name, tensor in one[case].tensors.items():
        assert torch.equal(tensor, other[case].tensors[name]), name


def test_a_rank_keeps_its_own_shards_in_memory_only(ranks):
    """Half of all matrices but the head, of whose 19 rows the ranks have 10 and 9; whole norms."""
    case = ("llama", 0, 1)
    stage = stage_of(MODELS["llama"], 0, 1)
    head, norms = 19 * 16, 5 * 16
    halves = sum(parameter.numel() for parameter in stage.parameters()) - head - norms
    for rows, (found, _) in zip((10, 9), ranks, strict=True):
        assert found[case].local_bytes == 8 * (halves // 2 + rows * 16 + norms)


def test_a_degree_that_does_not_fit_is_refused_before_anything_is_changed(ranks):
    for _, refusals in ranks:
        for name, message in {
            "heads": "num_heads=3 is not divisible by the tensor-parallel degree=2: write num_heads=2 or 4",
            "kv heads": "num_kv_heads=3 is not divisible by the tensor-parallel degree=2",
            "intermediate": "intermediate_size=7 is not divisible by the tensor-parallel degree=2",
            "gpt": "num_heads=3 is not divisible by the tensor-parallel degree=2",
            "dropout": "dropout=0.1 doesn't go with tensor-parallel stages",
            "mesh": "this mesh has 2: ('a', 'b'); give the one that is to share the weights",
            "length": "the sequence's length=5 is not divisible by the tensor-parallel degree=2",
        }.items():
            assert message in refusals[name], name


def test_a_dtensor_does_not_pass_between_stages(ranks):
    for _, refusals in ranks:
        assert "stage 3 returned a DTensor" in refusals["boundary"]
        assert "output_layouts=Replicate() and use_local_output=True" in refusals["boundary"]
