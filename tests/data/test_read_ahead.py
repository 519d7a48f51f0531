"""A thread reads the same batches early, not more than it may, and its errors reach training."""

import threading
import time

import pytest
import torch

from helpers.trainers import small_trainer
from zbpp.data.read_ahead import BatchError, ReadAhead

CPU = torch.device("cpu")


def readers():
    return [each for each in threading.enumerate() if each.name == "zbpp-read-ahead"]


def test_losses_are_equal_to_the_last_bit_with_and_without():
    plain, ahead = (small_trainer(read_ahead=depth) for depth in (0, 3))
    losses = [[metrics["loss"] for metrics in trainer.run(20)] for trainer in (plain, ahead)]
    assert losses[0] == losses[1]
    assert not readers()


def test_not_more_than_that_many_batches_are_read_early():
    read = []
    ahead = ReadAhead(lambda number: read.append(number) or number, 2, CPU)
    assert [ahead.batch(number) for number in (5, 6, 6)] == [5, 6, 6]
    deadline = time.monotonic() + 100
    while len(read) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert read == [5, 6, 7, 8]
    assert ahead.batch(3) == 3  # not the next one: begun anew
    ahead.close()
    assert not readers()


def test_an_error_is_raised_for_the_batch_that_it_is_of():
    def read(number):
        if number == 4:
            raise OSError("the disk is gone")
        return number

    ahead = ReadAhead(read, 3, CPU)
    assert [ahead.batch(number) for number in (2, 3)] == [2, 3]
    with pytest.raises(BatchError, match="the batch of step 4 can't be read: OSError: the disk is gone"):
        ahead.batch(4)
    assert not readers()


def test_a_users_own_data_is_refused():
    trainer = small_trainer()
    trainer.data.train.draws_global_random = True
    with pytest.raises(ValueError, match="give a DataLoader with num_workers=1 or more"):
        type(trainer)(
            pipeline=trainer.pipeline,
            optimizer=trainer.optimizer,
            data=trainer.data,
            learning_rate=trainer.learning_rate,
            read_ahead=1,
        )
