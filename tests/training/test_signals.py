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


def test_a_handler_of_the_users_for_another_signal_changes_nothing():
    """One for a real-time signal, which has no name in Python, ended the thread that waits for SIGTERM."""
    number, heard = signal.SIGRTMIN + 1, []
    before = signal.signal(number, lambda *_: heard.append(number))
    try:
        with LeaveOnSignal() as leave:
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + 100
            os.kill(os.getpid(), signal.SIGTERM)
            while leave.reason is None and time.monotonic() < deadline:
                time.sleep(0.01)
        assert (heard, leave.reason) == ([number], "SIGTERM")
    finally:
        signal.signal(number, before)


def test_a_signal_before_the_first_step_ends_the_run_behind_it():
    with LeaveOnSignal() as leave:
        os.kill(os.getpid(), signal.SIGUSR1)
        while leave.reason is None:
            time.sleep(0.01)
        trainer = small_trainer(callbacks=[leave])
        assert len(list(trainer.run(6))) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_a_rank_forks_is_ended_by_its_own_signals_alone():
    """A data loader's worker is ended by SIGTERM: the run goes on."""
    before = signal.getsignal(signal.SIGTERM)  # a job that torch has started in this process leaves its own
    with LeaveOnSignal() as leave:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        worker.start()
        worker.terminate()
        worker.join(100)
        time.sleep(0.2)
        assert (worker.exitcode, leave.reason) == (-signal.SIGTERM, None)
        assert os.getpid() != worker.pid
    assert signal.getsignal(signal.SIGTERM) == before


BLOCKED = """
import ctypes, sys, threading
from zbpp.training import leaving
from zbpp.training.leaving import LeaveOnSignal

def tell_apart():
    sys.stdin.readline()
    leaving.SAME = 0
    print("apart", flush=True)

leaving.SAME = 1e9  # s: two signals are one, however slow this machine is to send the second
threading.Thread(target=tell_apart, daemon=True).start()
with LeaveOnSignal(is_shown=True):
    print("ready", flush=True)
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # for ever, in C: no Python handler runs, as in gloo
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_a_process_that_is_blocked_in_c(number):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BLOCKED]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        bufsize=1,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stderr.readline().startswith(f"{number.name}: leaving after this step")
            process.send_signal(number)  # the same one twice, as from a terminal and a launcher
            time.sleep(0.3)
            assert process.poll() is None
            process.stdin.write("\n")
            assert process.stdout.readline() in ("apart\n", "")  # "": it took the second one only now
            process.send_signal(number)
            assert process.wait(100) == 128 + number
        finally:
            process.kill()
