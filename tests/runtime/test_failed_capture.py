"""What a failed capture leaves to eager steps, on a GPU that is made up."""

import copy

import pytest
import torch

from zbpp.runtime.graphs.cuda import CudaGraphs


class State:
    """A generator's state; is_captured: a capture uses it, and before torch 2.13 a failed one for good."""

    def __init__(self):
        self.is_captured = False


class Generator:
    def __init__(self):
        self.state = State()

    def graphsafe_get_state(self):
        return self.state

    def graphsafe_set_state(self, state):
        self.state = state

    def clone_state(self):
        clone = copy.copy(self.state)
        clone.is_captured = False
        return clone


class Graph:
    """A graph whose capture ends with an error."""

    def __init__(self, generator):
        self.states = [generator.state]

    def register_generator_state(self, state):
        self.states.append(state)

    def capture_begin(self, **_):
        for each in self.states:
            each.is_captured = True

    def capture_end(self):
        raise RuntimeError("the capture has failed")


@pytest.mark.parametrize("num_seeds", [0, 2])
def test_random_numbers_are_drawn_from_a_state_that_no_capture_uses(num_seeds, monkeypatch):
    """With seeds, the generator got back the very state that the failed capture had."""
    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,), raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(generator))
    maker = CudaGraphs.__new__(CudaGraphs)
    maker._device, maker._pool, maker._seeds = torch.device("cuda", 0), None, None
    seeds = maker.seeds(num_seeds) if num_seeds else None

    def fails():
        if seeds is not None:
            seeds.use(1)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        maker.capture(fails)
    if seeds is not None:
        seeds.restore()  # as whoever asked for the graph does
    assert not generator.state.is_captured
