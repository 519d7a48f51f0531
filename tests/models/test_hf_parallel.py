"""Tensor-parallel stages of Hugging Face models over two real processes, against the stages in one."""

import pytest

pytest.importorskip("transformers")

from helpers.cases.parallel_hf import FAMILIES, alone, parallel
from helpers.processes import run_ranks
from helpers.split import assert_close


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(parallel, 2, timeout=200)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_sharded_by_the_librarys_plan_compute_what_whole_stages_do(family, ranks):
    """Norms and softmax are the library's, in float32."""
    expected = alone(family)
    for found, _ in ranks:
        assert_close(found[family][0], expected, 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_sharded_linears_wait_for_w(family, ranks):
    for found, _ in ranks:
        _, deferred, sharded = found[family]
        projections = {name for name in sharded if "_norm" not in name}
        assert len(projections) >= 12
        assert projections <= deferred


def test_a_tied_head_stays_whole(ranks):
    for found, _ in ranks:
        assert "model.embed_tokens.weight" not in found["gemma"][2]
        assert "lm_head.weight" in found["llama"][2]


def test_what_the_plan_can_not_shard_is_refused_before_anything_is_changed(ranks):
    for _, refusals in ranks:
        assert "GPT2LMHeadModel ships no tensor-parallel plan" in refusals["gpt2"]
        assert "mlp.experts" in refusals["mixtral"]
        assert "torch's tensor-parallel styles do not express" in refusals["mixtral"]
        assert "num_key_value_heads=1 is not divisible by the tensor-parallel degree=2" in refusals["llama"]
