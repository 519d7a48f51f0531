"""The thread that tells where a rank stands, when the job's store is lost with the process that had it."""

import json
import threading
import time

import pytest
import torch.distributed as dist

from zbpp.runtime import watch as module
from zbpp.runtime.flight_recorder import FlightRecorder
from zbpp.runtime.watch import Watch

WHY = "ValueError: planted"


class LostStore:
    """A store that is gone from the first call of `last` on."""

    def __init__(self, last=""):
        self.store, self.last, self.is_gone = dist.HashStore(), last, False

    def __getattr__(self, name):
        self.is_gone |= name == self.last
        if self.is_gone:
            raise dist.DistStoreError("the store is gone")
        return getattr(self.store, name)


@pytest.fixture
def alarms(monkeypatch):
    """The seconds of each alarm; None where it was cancelled."""
    found = []
    monkeypatch.setattr(module, "set_alarm", found.append)
    monkeypatch.setattr(module, "cancel_alarm", lambda: found.append(None))
    monkeypatch.setattr(module, "Finalize", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return found


def watch_on(store, folder):
    watch = Watch(FlightRecorder(0), store)
    watch.leave_records_in(folder, {})
    watch.end_process(60.0)
    return watch


@pytest.mark.parametrize("last", ["", "compare_set"])
def test_a_rank_that_fails_without_a_store_leaves_its_record_and_is_not_ended(last, alarms, tmp_path):
    """No record was written; and the alarm of `failed` killed the process some seconds later.

    The store is lost before the failure, or while the failure is told.
    """
    store = LostStore(last)
    watch = watch_on(store, tmp_path)
    if not last:
        store.is_gone = True
        watch._shared.wake.set()
        time.sleep(0.2)  # the thread notices it, or `failed` finds that it has not
    watch.failed(ValueError("planted"), WHY)
    watch._thread.join(30)
    assert alarms[-1] is None
    assert json.loads((tmp_path / "flight-rank-0.json").read_text())["why"] == WHY
    watch.close()


def test_a_rank_that_fails_has_an_alarm_until_the_watch_is_closed(alarms, tmp_path):
    watch = watch_on(LostStore(), tmp_path)
    watch.failed(ValueError("planted"), WHY)
    assert alarms[-1] is not None
    watch.close()
    assert alarms[-1] is None
    assert json.loads((tmp_path / "flight-rank-0.json").read_text())["why"] == WHY


def test_a_rank_that_hangs_when_the_store_is_gone_is_ended_behind_the_timeout(alarms, tmp_path, monkeypatch):
    """The thread ended with the store: the process hung for ever."""
    store, told, ended = LostStore(), [], threading.Event()
    monkeypatch.setattr(module, "_GRACE", 0.0)
    monkeypatch.setattr(module, "report_end", lambda why, *_: told.append(why))
    flight = FlightRecorder(0)
    watch = Watch(flight, store)
    monkeypatch.setattr(
        module.os, "_exit", lambda status: (ended.set(), watch._shared.__dict__.update(is_over=True))
    )
    watch.leave_records_in(tmp_path, {})
    watch.end_process(0.2)
    flight.enter("step")
    flight.begin([None])(time.monotonic())
    store.is_gone = True
    assert ended.wait(30)
    assert (
        "did not come back from its own code: the process with the job's store is gone. It stood at"
        in told[0]
    )
    assert (tmp_path / "flight-rank-0.json").exists()
    watch.close()


def test_a_rank_outside_of_a_call_is_not_ended_when_the_store_is_gone(alarms, tmp_path, monkeypatch):
    """Another rank may have ended its program while this one still writes its weights."""
    store = LostStore()
    monkeypatch.setattr(module, "_INTERVAL", 0.01)
    monkeypatch.setattr(module, "_GRACE", 0.0)
    monkeypatch.setattr(module.os, "_exit", lambda status: pytest.fail("ended"))
    watch = watch_on(store, tmp_path)
    watch.end_process(0.01)
    store.is_gone = True
    watch._shared.wake.set()
    time.sleep(0.3)
    assert watch._thread.is_alive()
    watch.close()
    assert not watch._thread.is_alive()
