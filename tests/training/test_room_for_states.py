"""Too little memory is told before the first step: what is counted is what a step then allocates."""

from dataclasses import replace

import pytest
import torch

from helpers.configs import composed
from helpers.processes import run_ranks
from helpers.trainers import small_trainer
from zbpp.runtime import DeviceError
from zbpp.training.optim import room_for_states
from zbpp.training.optim.room_for_states import check_room

GIB = 2**30


def bytes_of(tensors):
    return sum(each.nbytes for each in tensors)


@pytest.mark.parametrize("make", [None, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.SGD, "momentum"])
def test_counted_are_the_gradients_and_states_that_a_step_makes(make):
    trainer = small_trainer()
    if make is not None:
        parameters, is_sgd = trainer.optimizer.param_groups[0]["params"], make == "momentum"
        kind = torch.optim.SGD if is_sgd else make
        optimizer = kind(parameters, lr=0.1, **({"momentum": 0.9} if is_sgd else {}))
        trainer = replace(trainer, optimizer=optimizer)
    room = room_for_states._room(trainer, lambda device: None)
    list(trainer.run(1))
    weights = list(trainer.pipeline.parameters())
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    kept = [each for each in states if isinstance(each, torch.Tensor) and each.numel() > 1 and each.dim()]
    assert room.weights == room.gradients == bytes_of(weights)
    assert room.states == pytest.approx(bytes_of(kept), abs=8 * len(weights))  # 1-element biases: abs
    check_room(trainer, free=lambda device: 0)  # nothing more is to come: a run that goes on is let alone


def says(rank, free):
    """What check_room says on a rank of two that trains one stage of an Mlp."""
    trainer = small_trainer()  # each rank a pipeline of its own; the place gathers from both
    trainer.pipeline.place = type("Both", (), {"gather": staticmethod(gathered)})
    try:
        check_room(trainer, free=lambda device: free[rank])
    except DeviceError as error:
        return str(error)
    return None


def gathered(value):
    from zbpp.job.agreement import gather

    return gather(value)


def test_every_rank_raises_the_figures_of_all_ranks_if_one_has_too_little():
    first, second = run_ranks(says, 2, (GIB, 1000))
    assert first == second
    assert first.startswith("too little memory on 1 of 2 ranks, before any activation is counted:\n  rank 0:")
    assert "rank 1: weights" in first
    assert "too little" in first.splitlines()[2]
    assert "too little" not in first.splitlines()[1]
    assert "`zbpp memory`" in first


def test_cpus_and_weights_on_the_host_are_not_checked():
    trainer = small_trainer()
    check_room(trainer)
    check_room(trainer, weights_on_host=True, free=lambda device: 0)
    with pytest.raises(DeviceError, match="too little memory on 1 of 1 ranks"):
        check_room(trainer, free=lambda device: 0)


def test_a_run_is_refused_before_its_first_step_and_says_so_to_the_config(tmp_path, monkeypatch):
    from zbpp.run import app

    config = composed("model=mlp", "data=regression", f"run_dir={tmp_path / 'run'}", "steps=1")
    monkeypatch.setattr(room_for_states, "free_bytes", lambda device: 0)
    with pytest.raises(DeviceError, match="parallel.shard.*memory.gradient_release=step"):
        app.train(config, {}, "")
    assert not (tmp_path / "run" / "summary.json").exists()
