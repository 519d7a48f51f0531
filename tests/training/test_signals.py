"""Signals end a run in order, behind a step; the second one ends the process at once."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.trainers import small_trainer
from zbpp.training.callbacks import Callback
from zbpp.training.leaving import SIGNALS, LeaveOnSignal

ROOT = Path(__file__).parents[2]


class Sender(Callback):
    """Sends this process a signal before a step, and waits until it was noticed."""

    def __init__(self, number, step, leave):
        self.number, self.step, self.leave = number, step, leave

    def before_step(self, trainer, step):
        if step == self.step:
            os.kill(os.getpid(), self.number)
            deadline = time.monotonic() + 100
            while self.leave.reason is None and time.monotonic() < deadline:
                time.sleep(0.01)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_behind_the_step_that_runs(number):
    whole = [metrics["loss"] for metrics in small_trainer().run(6)]
    before = [signal.getsignal(each) for each in SIGNALS]
    with LeaveOnSignal() as leave:
        trainer = small_trainer(callbacks=[leave, Sender(number, 2, leave)])
        losses = [metrics["loss"] for metrics in trainer.run(6)]
    assert (trainer.leaving, trainer.next_step, losses) == (signal.Signals(number).name, 3, whole[:3])
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_signal_before_the_first_step_ends_the_run_behind_it():
    with LeaveOnSignal() as leave:
        os.kill(os.getpid(), signal.SIGUSR1)
        while leave.reason is None:
            time.sleep(0.01)
        trainer = small_trainer(callbacks=[leave])
        assert len(list(trainer.run(6))) == 1


def sleep(runs):
    runs.set()
    time.sleep(600)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_a_rank_forks_is_ended_by_its_own_signals_alone():
    """A data loader's worker is ended by SIGTERM: the run goes on."""
    before = signal.getsignal(signal.SIGTERM)  # a job that torch has started in this process leaves its own
    with LeaveOnSignal() as leave:
        context = multiprocessing.get_context("fork")
        runs = context.Event()  # Python drops a signal that reaches the process during the fork
        worker = context.Process(target=sleep, args=(runs,))
        worker.start()
        assert runs.wait(100)
        worker.terminate()
        worker.join(100)
        time.sleep(0.2)
        assert (worker.exitcode, leave.reason) == (-signal.SIGTERM, None)
        assert os.getpid() != worker.pid
    assert signal.getsignal(signal.SIGTERM) == before


TWICE = """
import os, signal, time
from zbpp.training import leaving

with leaving.LeaveOnSignal() as leave:
    for number in (signal.SIGTERM, signal.SIGTERM):  # the same one twice, from a terminal and a launcher
        os.kill(os.getpid(), number)
    print(leave.reason, flush=True)
    leaving.SAME = 0
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)
"""


def test_the_second_signal_ends_the_process():
    done = subprocess.run(
        [sys.executable, "-c", TWICE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "SIGTERM\n")


WHILE_BLOCKED = """
import os, subprocess
from zbpp.training.leaving import LeaveOnSignal

kill = f"kill -TERM {os.getpid()}"
with LeaveOnSignal() as leave:
    subprocess.Popen(["sh", "-c", f"{kill}; sleep 0.1; {kill}"])
    while leave.reason is None:
        pass
    sum(range(100_000_000))  # longer than SAME, in which Python runs no handler
print(leave.reason)
"""


def test_a_signal_that_comes_twice_is_one_also_while_the_rank_is_blocked():
    """Slurm and torchrun both send SIGTERM, and the second one may come while the rank waits for another."""
    done = subprocess.run(
        [sys.executable, "-c", WHILE_BLOCKED],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n")
