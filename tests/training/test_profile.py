"""profile=START:STOP: torch's profiler sees the actions by their names, in these steps alone."""

import json
from collections import Counter

from helpers.trainers import small_trainer
from zbpp.training.callbacks import Profile


def profiled(path, steps, num_steps, **options):
    trainer = small_trainer(callbacks=[Profile(steps, path)], **options)
    losses = [metrics["loss"] for metrics in trainer.run(num_steps)]
    names = Counter(
        event["name"]
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") == "user_annotation"
    )
    return trainer, losses, names


def test_each_action_of_the_timetable_is_in_the_trace_once_for_each_profiled_step(tmp_path):
    trainer, losses, names = profiled(tmp_path / "profile/rank-0.json", range(2, 4), 4)
    actions = {str(action) for row in trainer.pipeline.timetable.rows for action in row}
    assert {name: names[name] for name in actions} == dict.fromkeys(actions, 2)
    assert losses == [metrics["loss"] for metrics in small_trainer().run(4)]


def test_a_run_that_ends_inside_the_steps_writes_what_there_is(tmp_path):
    _, _, names = profiled(tmp_path / "rank-0.json", range(2, 9), 3)
    assert names["0F0"] == 2
