"""Which ranks did not come to a call of all ranks, as the store of the job says."""

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zbpp.runtime import roll_call
from zbpp.runtime.world import fake_world


def test_ranks_that_have_not_given_up_too_did_not_come(monkeypatch):
    monkeypatch.setattr(roll_call, "_WAIT", 0.1)
    monkeypatch.setattr(roll_call, "_POLL", 0.02)
    store = dist.HashStore()
    assert roll_call.missing_in(None) == []  # no group: nothing can be found out
    with fake_world(4):
        group = c10d._get_default_group()
        monkeypatch.setitem(c10d._world.pg_map, group, ("fake", store))
        store.set(f"zbpp/gave_up/{group.group_name}/2", "1")
        assert roll_call.missing_in(None) == [1, 3]
        store.set(f"zbpp/gave_up/{group.group_name}/1", "1")
        assert roll_call.missing_in(None) == [3]
    assert roll_call.ranks_text([3]) == "rank 3"
    assert roll_call.ranks_text([1, 3]) == "ranks 1, 3"
