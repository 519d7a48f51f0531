"""The split backward of tensor-parallel modules: DTensor weights over two real processes."""

import pytest

from helpers.cases.tensor_parallel import CASES, alone, made, outcomes_of_all_cases
from helpers.processes import run_ranks
from helpers.split import assert_close


@pytest.fixture(scope="module")
def job():
    return run_ranks(outcomes_of_all_cases, 2)


@pytest.fixture
def outcomes(job):
    """Of each rank, by case."""
    return [outcomes for outcomes, _ in job]


@pytest.fixture
def claims(job):
    """Of each rank, by the name of the function that found it out."""
    return [claims for _, claims in job]


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_are_those_of_plain_autograd_in_one_process(name, outcomes):
    expected = alone(CASES[name])
    for outcome in outcomes:
        assert_close(outcome[name].gradients, expected)


@pytest.mark.parametrize("name", CASES)
def test_all_weights_wait_whose_placements_allow_it(name, outcomes):
    case = CASES[name]
    trained = {name for name, parameter in made(case).named_parameters() if parameter.requires_grad}
    reached = trained - ({"norm.weight", "norm.bias"} if case.make.__name__ == "Twice" else set())
    for outcome in outcomes:
        assert outcome[name].deferred == reached - case.in_b


def test_w_holds_its_own_shards_only(outcomes):
    """x and dy of up, down and head, half of down's x and of up's dy; two gradients of the norm."""
    rows = 10
    numbers = rows * (8 + 8 + 8 + 8) + 2 * 8 + rows * (8 + 4)
    assert outcomes[0]["mlp"].held_bytes == 8 * numbers


def test_a_dy_with_other_placements_is_redistributed(claims):
    for found in claims:
        assert len(found["dy_placed_otherwise"]) == 4
        for deferred, differences in found["dy_placed_otherwise"].values():
            assert deferred == {"weight", "bias"}
            assert max(differences.values()) < 1e-12


def test_several_backward_passes_add_up(claims):
    for found in claims:
        for deferred, differences in found["several_passes"].values():
            assert deferred == {"weight", "bias"}
            assert max(differences.values()) < 1e-12


def test_w_computes_with_shards_of_a_mesh_with_two_dimensions(claims):
    """Rows of x that are sharded over the first dimension leave a partial sum: to B."""
    for found in claims:
        (waiting, one), (computed, other) = found["mesh_of_two_dimensions"].values()
        assert waiting == {"weight", "bias"}
        assert computed == set()
        assert max(*one.values(), *other.values()) < 1e-12


def test_w_notices_a_change_in_place_of_a_dtensor_and_of_its_shard(claims):
    for found in claims:
        messages = found["what_is_changed_in_place"]
        assert messages.pop("nothing") == ""
        for name, message in messages.items():
            said = "the input that AddmmBackward0 saved" if name.endswith("x") else "dy, the gradient of"
            assert said in message, name


def test_b_notices_a_function_that_changes_the_gradient_of_another_layer_or_its_shard(claims):
    for found in claims:
        messages = found["what_is_changed_in_b"]
        assert messages.pop("nothing") == ""
        for name, message in messages.items():
            assert "the backward of ChangesGradient, or a hook, changes a gradient of shape" in message, name


def test_a_gradient_with_other_placements_than_its_parameter_is_refused(claims):
    for found in claims:
        assert "parameter as (Shard(dim=0),): write p.grad" in found["gradient_with_other_placements"]


def test_explain_says_why_a_dtensor_waits_or_not(claims):
    fits, rows, cast = claims[0]["reasons_of_explain"]
    assert (fits.where, fits.why) == ("W", "AddmmBackward0 through TBackward0")
    assert (rows.where, cast.where) == ("B", "B")
    for row in (rows, cast):
        assert "shards that don't fit" in row.why
