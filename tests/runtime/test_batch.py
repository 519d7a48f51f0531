"""A batch: what each stage gets of a call's arguments, in the order that all ranks are told."""

import pytest
import torch

from zbpp import per_microbatch, replicate
from zbpp.runtime.call.batch import Batch
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.sizes import Size, Sizes
from zbpp.runtime.stage import StageLosses

FIRST, LAST, SEED = 0, 1, 100


def batch_of(call, *stages, num_microbatches=2, count=None):
    return Batch(call, num_microbatches, dict.fromkeys(stages, SEED), LAST, count)


def test_a_stage_gets_the_units_that_run_in_their_order_and_losses_come_back_in_the_callers():
    """Four microbatches, of which one is empty. Random numbers are those of the caller's numbers."""
    x, y = [torch.full((2, 3), i) for i in range(4)], [torch.full((2,), i) for i in range(4)]
    x[1] = y[1] = None
    call = Call((per_microbatch(x, [3, 1, 0, 2]),), per_microbatch(y), {"scale": per_microbatch([*"abcd"])})
    batch = batch_of(call, FIRST, LAST, num_microbatches=4)
    told = batch.sizes(7)
    full = Size("int64[,]", (2, 3))
    assert told == Sizes("step", 7, (full, Size("", ()), full, full), (3, 0, 2))
    batch.arrange(told)
    assert batch.sizes_of_units == [full] * 3
    first, last = batch.feed(FIRST), batch.feed(LAST)
    assert [int(value[0, 0]) for (value,) in first.args] == [3, 0, 2]
    assert [int(value[0]) for value in last.targets] == [3, 0, 2]
    assert last.args == ()
    for feed in (first, last):
        assert [each["scale"] for each in feed.kwargs] == ["d", "a", "c"]
        assert [*feed.seeds] == [SEED + 3, SEED, SEED + 2]
    losses = [torch.tensor(float(number)) for number in (3, 10, 2)]
    result = batch.result([StageLosses([], {}), StageLosses(losses, {})])
    assert [*map(float, result.losses)] == [10, 0, 2, 3]


def test_a_rank_without_the_inputs_says_its_order_and_no_sizes():
    """All it has is the target. In an evaluation nothing is put in order."""
    y = per_microbatch([torch.ones(1), torch.ones(1)], [1, 0])
    for kind, order in {"step": (1, 0), "evaluate": ()}.items():
        assert batch_of(Call((), y, {}, kind), LAST).sizes(3) == Sizes(kind, 3, (), order)


def test_slices_of_a_microbatch_stay_side_by_side_and_their_losses_add_up():
    x = [torch.arange(3) + 10 * torch.tensor([[i]]) for i in range(2)]
    call = Call((per_microbatch(x, [1, 0]),), per_microbatch(x), {}, slice_bounds=(0, 2, 3))
    batch = batch_of(call, FIRST, LAST)
    batch.arrange(batch.sizes(0))
    feed = batch.feed(FIRST)
    assert [value.tolist() for (value,) in feed.args] == [[[10, 11]], [[12]], [[0, 1]], [[2]]]
    assert [*feed.seeds] == [SEED + 2, SEED + 3, SEED, SEED + 1]
    assert feed.shares == pytest.approx([2 / 3, 1 / 3] * 2)
    losses = [torch.tensor(float(number)) for number in (1, 2, 10, 20)]
    assert [*map(float, batch.result([StageLosses(losses, {})]).losses)] == [30, 3]


def test_a_batch_that_begins_again_has_new_leaves_in_the_same_order():
    """B of the first run has added to the leaves' gradients."""
    x = torch.ones(4, 1, requires_grad=True)
    batch = batch_of(Call((x * 2,), None, {}), FIRST, num_microbatches=4)
    batch.arrange(Sizes("step", 0, (Size("float32[,]*", (1, 1)),) * 4, (3, 1, 0, 2)))
    before = batch.feed(FIRST)
    for (leaf,) in before.args:
        leaf.grad = torch.ones_like(leaf)
    batch.begin_again(loss_scale=8.0)
    after = batch.feed(FIRST)
    assert [*after.seeds] == [*before.seeds]
    assert all(leaf.grad is None for (leaf,) in after.args)
    assert after.loss_grads.value == 2.0
    batch.backward()
    assert x.grad is None


NAMES = ["a"] * 16


@pytest.mark.parametrize(
    ("rows", "args", "target", "kwargs", "said"),
    [
        (6, True, None, {"size": [2, 4]}, None),  # also at a stage that cuts no tensor
        (6, True, None, {"size": (2, 4)}, None),
        (6, True, None, {"options": {"sizes": [[1, 2], [3, 4]]}}, None),
        (16, True, NAMES, {}, "target is a list of 16 values, and the batch has 16 rows"),
        (16, False, NAMES, {}, "target is a list of 16 values, and no tensor says"),
        (16, True, None, {"names": NAMES}, "names is a list of 16 values, and the batch has 16 rows"),
        (16, True, None, {"a": [NAMES]}, r"a\[0\] is a list of 16 values, and the batch has 16 rows"),
        (16, True, NAMES * 2, {}, None),
        (16, False, [replicate(torch.ones(3))] * 2, {}, None),
    ],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_list_is_refused_where_it_is_as_long_as_the_batch(stage, rows, args, target, kwargs, said):
    """Stage 0 of 2 cuts the inputs, stage 1 the target, both cut the keywords."""
    call = Call((torch.ones(rows, 3),) if args else (), target, kwargs)
    if stage == 0 and (not args or target is not None):
        return
    if said is None:
        assert batch_of(call, stage)
    else:
        with pytest.raises(ValueError, match=f"{said}.*per_microbatch"):
            batch_of(call, stage)
