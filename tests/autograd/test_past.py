"""Attention over slices of a sequence, against plain autograd over the whole sequence in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.slices import Sliced, assert_equals_whole
from helpers.split import double, linear_weights
from zbpp import backward_input, checkpoint
from zbpp.autograd.models import past as past_room
from zbpp.autograd.models.past import Past

TIME = 12
BOUNDS = [[0, 12], [0, 6, 12], [0, 3, 6, 9, 12], [0, 5, 6, 10, 12], [*range(13)]]


class Layer(nn.Module):
    """Causal attention of one head, its mask written out; window: how many tokens a token sees."""

    def __init__(self, window=None):
        super().__init__()
        self.query, self.value, self.output = (nn.Linear(6, 6) for _ in range(3))
        self.key = nn.Linear(6, 6, bias=False)  # the gradient of its bias would be 0 in theory
        self.window = window

    def forward(self, x, sequence_slice=None):
        query, key, value = self.query(x), self.key(x), self.value(x)
        first = start = 0
        if sequence_slice is not None:
            key = sequence_slice.whole((self, "key"), key, self.window)
            value = sequence_slice.whole((self, "value"), value, self.window)
            start, first = sequence_slice.start, sequence_slice.first(self.window)
        distance = torch.arange(start, start + x.shape[1])[:, None] - torch.arange(first, start + x.shape[1])
        seen = (distance >= 0) & (distance < (self.window or TIME))
        scores = (query @ key.mT).masked_fill(~seen, -torch.inf)
        return x + self.output(scores.softmax(-1) @ value)


class Stage(nn.Module):
    def __init__(self, window=None, wrapped=lambda layer, x, place: layer(x, sequence_slice=place)):
        super().__init__()
        self.layers = nn.ModuleList([Layer(window), Layer()])
        self.wrapped = wrapped

    def forward(self, x, sequence_slice=None):
        for layer in self.layers:
            x = self.wrapped(layer, x, sequence_slice)
        return x


def stage_of(**options):
    torch.manual_seed(0)
    return Stage(**options).double()


def inputs():
    return double(2, TIME, 6)


@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_slices_are_the_whole_sequence(bounds, window):
    """Also: all linears wait for W, and no product runs more often than once per slice."""
    stage = stage_of(window=window)
    facts = assert_equals_whole(stage, inputs(), bounds)
    assert facts.deferred == linear_weights(stage)
    assert not facts.computed


def zbpp_checkpoint(layer, x, place):
    return checkpoint(layer, x, sequence_slice=place)


def torch_checkpoint(layer, x, place):
    return torch.utils.checkpoint.checkpoint(layer, x, sequence_slice=place, use_reentrant=False)


@pytest.mark.parametrize("wrapped", [zbpp_checkpoint, torch_checkpoint])
@pytest.mark.parametrize("bounds", [[0, 3, 6, 9, 12], [0, 5, 6, 10, 12]], ids=str)
def test_a_recompute_writes_and_adds_nothing_twice(bounds, wrapped):
    assert_equals_whole(stage_of(wrapped=wrapped), inputs(), bounds, is_recomputed=True)


@pytest.mark.parametrize("mutant", ["no gradient for earlier slices", "no gradient from later slices"])
def test_without_gradients_between_slices_the_comparison_fails(mutant, monkeypatch):
    if mutant.endswith("earlier slices"):
        monkeypatch.setattr(past_room._Buffer, "add", lambda *args: None)
    else:
        no_sum = property(lambda buffer: None, lambda buffer, value: None)
        monkeypatch.setattr(past_room._Buffer, "grads", no_sum, raising=False)
        monkeypatch.setattr(past_room._Buffer, "add", lambda *args: None)
    with pytest.raises(AssertionError, match="off by"):
        assert_equals_whole(stage_of(), inputs(), [0, 6, 12])


def test_sums_are_float32_where_gradients_have_16_bits():
    """64 slices each add 1 + 2^-7 to the first slice's gradient; a bfloat16 sum of them is off."""
    past = Past(range(65))
    own = torch.zeros(64, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    views = [past.at(index).whole("key", own[index]) for index in range(64)]
    exact = torch.tensor(1 + 2**-7, dtype=torch.bfloat16)
    for view in reversed(views):
        torch.autograd.backward(view, exact.expand(view.shape))
    expected = exact.double() * torch.arange(64, 0, -1)
    assert torch.equal(own.grad.flatten(), expected.bfloat16())


def test_buffers_end_with_b_of_slice_0():
    whole = Sliced(stage_of(), inputs(), [0, 5, 9, 12])
    whole.forward()
    keys_and_values = 2 * 2 * inputs().nbytes
    assert whole.pasts[0].held_bytes == keys_and_values
    for index in (2, 1):
        whole.backward(index)
        assert whole.pasts[0].held_bytes == keys_and_values + 2 * 2 * inputs()[:, :9].nbytes
    whole.backward(0)
    assert whole.pasts[0].held_bytes == 0


def test_w_holds_of_a_slice_what_its_tokens_need():
    """The gradient of a slice's values is a part of that of all values; W holds no view of the whole."""
    sliced = Sliced(stage_of(), inputs(), [0, 5, 9, 12])
    sliced.forward()
    # Two layers' x and dy: query, key and value have one x.
    assert [sliced.backward(index).held_bytes for index in (2, 1, 0)] == [
        2 * (2 + 4) * inputs()[:, :length].nbytes for length in (3, 4, 5)
    ]


def test_a_wrong_order_raises():
    stage = stage_of()
    sliced = Sliced(stage, inputs(), [0, 6, 12])
    with pytest.raises(ValueError, match="F of slice 1 gives key of Layer, and F of slice 0 has not: F's"):
        stage(inputs()[:, 6:], sequence_slice=sliced.pasts[0].at(1))
    sliced.forward()
    with pytest.raises(RuntimeError, match="B of slice 0 runs where B of slice 1 is next: B's of a sequence"):
        sliced.backward(0)
    with pytest.raises(ValueError, match="slice 1 gives key of Layer twice in one forward"):
        stage(inputs()[:, 6:], sequence_slice=sliced.pasts[0].at(1))


class Scaled(Layer):
    """It changes the keys of all tokens so far, in the slice with this number."""

    def __init__(self, changing):
        super().__init__()
        self.changing = changing

    def forward(self, x, sequence_slice=None):
        key = sequence_slice.whole((self, "key"), self.key(x))
        if sequence_slice.index == self.changing:
            key.mul_(0.5)
        return x + key.square().sum(1, keepdim=True)


@pytest.mark.parametrize("changing", [0, 1])
def test_a_result_that_was_changed_in_place_is_refused(changing):
    """Plain autograd allows it on the whole sequence; here other slices read the same memory."""
    sliced = Sliced(Scaled(changing).double(), inputs(), [0, 6, 12])

    def run():
        sliced.forward()
        sliced.backward(1)

    with pytest.raises(ValueError, match=r"changed the whole key of Scaled in place, .* x \* 2 in place of"):
        run()


def test_a_tensor_of_another_length_is_refused():
    with pytest.raises(
        ValueError, match=r"slice 1 has tokens 6 to 12, and key got 5 of them .*\[..., time, d\]"
    ):
        Past([0, 6, 12]).at(1).whole("key", inputs()[:, 6:11])


def test_whole_numbers_and_frozen_weights_have_a_past_without_gradients():
    """Positions, say; and the keys of a frozen first layer."""
    past = Past([0, 2, 5])
    positions = torch.arange(5).view(1, 5, 1)
    seen = [past.at(index).whole("positions", part) for index, part in enumerate(positions.split([2, 3], 1))]
    assert torch.equal(seen[1], positions)
    assert not seen[1].requires_grad
    stage = stage_of()
    stage.layers[0].requires_grad_(False)
    facts = assert_equals_whole(stage, inputs(), [0, 5, 9, 12])
    assert facts.deferred == {name for name in linear_weights(stage) if name.startswith("layers.1")}


def test_evaluation_keeps_no_graph():
    stage, past = stage_of(), Past([0, 5, 12])
    with torch.no_grad():
        parts = [stage(x, sequence_slice=past.at(index)) for index, x in enumerate(inputs().split([5, 7], 1))]
        torch.testing.assert_close(torch.cat(parts, 1), stage(inputs()), rtol=0, atol=1e-14)


def test_a_fused_kernel_saves_views_that_later_slices_leave_alone():
    """sdpa's backward checks that what it has saved is unchanged."""

    class Fused(Layer):
        def forward(self, x, sequence_slice=None):
            query, key, value = (each(x).unsqueeze(1) for each in (self.query, self.key, self.value))
            start = 0
            if sequence_slice is not None:
                key, value = (sequence_slice.whole(name, each) for name, each in (("k", key), ("v", value)))
                start = sequence_slice.start
            mask = torch.ones(x.shape[1], key.shape[-2], dtype=torch.bool).tril(start)
            return self.output(F.scaled_dot_product_attention(query, key, value, mask).squeeze(1))

    torch.manual_seed(0)
    assert_equals_whole(Fused().double(), inputs(), [0, 5, 9, 12])


def test_b_without_a_gradient_for_earlier_slices_needs_no_graph_of_theirs():
    """The loss of one slice alone: its B leaves sums, which B of the slice before it adds."""
    stage = stage_of()
    sliced = Sliced(stage, inputs(), [0, 6, 12])
    sliced.forward()
    for index in (1, 0):
        sliced.losses[index] = sliced.losses[index] * float(index == 1)
        sliced.backward(index).accumulate()
    found = {name: each.grad.clone() for name, each in stage.named_parameters()}
    stage.zero_grad()
    sliced.loss(stage(inputs())[:, 6:], 6, TIME).backward()
    for name, each in stage.named_parameters():
        torch.testing.assert_close(found[name], each.grad, rtol=0, atol=1e-13)


def test_a_split_backward_runs_nothing_twice_for_one_slice():
    loss = stage_of()(inputs(), sequence_slice=Past([0, TIME]).at(0)).sum()
    backward_input(loss, None, [])
    with pytest.raises(RuntimeError, match="has been gone through before"):
        backward_input(loss, None, [])
