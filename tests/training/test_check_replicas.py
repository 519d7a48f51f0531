"""check_replicas_every: when a run compares copies, and that its numbers stay."""

import pytest

from helpers.trainers import small_trainer
from zbpp.training import callbacks
from zbpp.training.callbacks import CheckReplicas


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize(("num_steps", "expected"), [(9, [4, 8, 9]), (8, [4, 8])])
def test_a_run_has_the_same_losses_and_compares_when_it_should(monkeypatch, validation, num_steps, expected):
    compared = []
    check = callbacks.check_replicas

    def noted_check(pipeline, *args, **options):
        compared.append(pipeline.num_steps)
        return check(pipeline, *args, **options)

    monkeypatch.setattr(callbacks, "check_replicas", noted_check)
    options = {"clip_norm": 0.1, "post_validation": validation}
    plain = [metrics["loss"] for metrics in small_trainer(**options).run(num_steps)]
    assert compared == []
    trainer = small_trainer(**options, callbacks=[CheckReplicas(4)])
    assert [metrics["loss"] for metrics in trainer.run(num_steps)] == plain
    assert compared == expected
