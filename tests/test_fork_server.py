"""What is left of a job that has ended: nothing of zbpp, whatever children the code of a user has started."""

import os
import select
import subprocess
import sys
from multiprocessing import forkserver, resource_tracker

import pytest

from zbpp import fork_server, launch


def test_a_child_of_a_rank_keeps_neither_the_fork_server_nor_the_tracker_alive(monkeypatch):
    """The two end when no process has the other end of their pipes."""
    pipes = [os.pipe() for _ in range(2)]
    for _, end in pipes:
        os.set_inheritable(end, True)  # as a rank gets them
    (server, its_end), (tracker, own_end) = pipes
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_alive_fd", its_end)
    monkeypatch.setattr(resource_tracker._resource_tracker, "_fd", own_end)
    fork_server._leave_nothing_to_children()
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        os.close(own_end)  # the rank ends
        for pipe in (server, tracker):
            assert select.select([pipe], [], [], 5)[0] == [pipe]
            assert os.read(pipe, 1) == b""
            os.close(pipe)
    finally:
        child.kill()
        child.wait()


def test_the_tracker_is_ended_even_if_somebody_else_has_its_pipe(monkeypatch):
    read, write = os.pipe()
    child = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(resource_tracker._resource_tracker, "_pid", child.pid)
    monkeypatch.setattr(resource_tracker._resource_tracker, "_fd", write)
    monkeypatch.setattr(fork_server, "_PATIENCE", 0.0)
    fork_server._end_tracker()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    os.close(read)
    child.returncode = 0  # it has been waited for
    fork_server._end_tracker()  # there is none any more


def test_a_ranks_error_is_shown_even_if_its_file_can_not_be_written(monkeypatch, tmp_path, capsys):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    def fails(_):
        raise ZeroDivisionError("the real error")

    monkeypatch.setattr(launch, "_write_at_once", refuse)
    monkeypatch.setattr(fork_server, "begin_as_a_rank", lambda: None)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(ZeroDivisionError):
        launch._run_rank(fails, None, str(tmp_path))
    said = capsys.readouterr().err
    assert said.startswith(
        "rank 3 failed ([Errno 28] No space left on device, so it says so here):\nTraceback"
    )
    assert "ZeroDivisionError: the real error" in said
