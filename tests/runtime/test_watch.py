"""The thread that tells where a rank stands, when the job's store is lost with the process that had it."""

import json

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
        watch._thread.join(30)
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
