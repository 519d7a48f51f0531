"""The dynamic loss scale, against torch's GradScaler where that has the same rule."""

import math

import pytest
import torch

from zbpp import LossScale
from zbpp.training.optim.precision import LossScaleError


@pytest.mark.parametrize("seed", range(3))
def test_it_grows_and_falls_as_torchs_grad_scaler_does(seed):
    """torch's with its growth factor 2, backoff factor 1/2; it checks the gradients itself."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=3)
    ours = LossScale(growth_interval=3)
    generator = torch.Generator().manual_seed(seed)
    found, expected = [], []
    for _ in range(60):
        is_finite = torch.rand(1, generator=generator).item() < 0.75
        theirs.scale(torch.zeros(1))  # makes its scale
        parameter.grad = torch.tensor([1.0 if is_finite else math.inf])
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(is_finite=is_finite)
        found.append(ours.value)
        expected.append(theirs.get_scale())
    assert found == expected
    assert len(set(found)) > 3


def test_its_state_is_all_that_it_goes_on_with():
    one = LossScale(start=8.0, growth_interval=4)
    for is_finite in (True, False, True, True):
        one.update(is_finite=is_finite)
    other = LossScale(growth_interval=4)
    other.load_state_dict(one.state_dict())
    for _ in range(2):
        one.update(is_finite=True)
        other.update(is_finite=True)
        assert one.state_dict() == other.state_dict()
    assert other.value == 8.0


def test_below_one_it_gives_up_with_the_way_out():
    scale = LossScale(start=2.0)
    scale.update(is_finite=False)
    assert scale.value == 1.0
    with pytest.raises(LossScaleError, match=r"loss_scale=1.*write precision=mixed_bfloat16"):
        scale.update(is_finite=False)


@pytest.mark.parametrize("arguments", [{"start": 0.5}, {"start": math.nan}, {"growth_interval": 0}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="write numbers from 1 upwards"):
        LossScale(**arguments)
