"""debug.check: when a run checks what, that its numbers stay, and what it doesn't go with."""

import pytest

from helpers.configs import composed
from helpers.trainers import small_trainer
from zbpp.ranges import ConfigError
from zbpp.runtime import Pipeline, ReplayError
from zbpp.runtime.replay import Replay
from zbpp.training.corruption import CheckReplicas, ReplaySteps, checks_done, sentence_of_checks
from zbpp.training.post_validated_update import Validation


def losses(**options):
    return [metrics["loss"] for metrics in small_trainer(**options).run(9)]


@pytest.mark.parametrize("validation", [None, Validation(after=0)])
def test_a_run_has_the_same_losses_and_checks_when_it_should(monkeypatch, validation):
    replayed, compared = [], []
    run, check = Replay.run, Pipeline.check_replicas

    def noted_run(replay, *args):
        replayed.append(replay._number + 1)
        return run(replay, *args)

    def noted_check(pipeline, *args, **options):
        compared.append(pipeline.num_steps)
        return check(pipeline, *args, **options)

    monkeypatch.setattr(Replay, "run", noted_run)
    monkeypatch.setattr(Pipeline, "check_replicas", noted_check)
    options = {"clip_norm": 0.1, "post_validation": validation}
    plain = losses(**options)
    assert (replayed, compared) == ([], [])
    trainer = small_trainer(**options, callbacks=[CheckReplicas(4), ReplaySteps(4)])
    assert [metrics["loss"] for metrics in trainer.run(9)] == plain
    assert replayed == [1, 4, 8]
    assert compared == [1, 4, 8, 9]
    assert checks_done(["replay", "replicas"], trainer) == {"replay": 3, "replicas": 0}


def test_a_run_says_at_its_end_what_it_has_checked():
    done = {"replay": 1, "replicas": 7, "messages": 1204}
    assert sentence_of_checks(done) == "checks: replay once, replicas 7 times, messages 1,204 times: equal"
    alone = "checks: messages 3 times: equal; replicas: nothing to compare"
    assert sentence_of_checks({"replicas": 0, "messages": 3}) == alone
    assert sentence_of_checks({"replicas": 0}) == "checks: replicas: nothing to compare"


def test_the_last_step_is_not_compared_twice(monkeypatch):
    compared = []
    monkeypatch.setattr(
        Pipeline, "check_replicas", lambda pipeline, *_, **__: compared.append(pipeline.num_steps)
    )
    list(small_trainer(callbacks=[CheckReplicas(4)]).run(8))
    assert compared == [1, 4, 8]


def test_a_fault_in_a_replayed_step_ends_the_run():
    trainer = small_trainer(callbacks=[ReplaySteps(3)])
    calls = [0]

    def drift(module, given, output):
        calls[0] += 1
        return output * (1 + 1e-5 * calls[0])

    trainer.pipeline.stages[1].register_forward_hook(drift)
    with pytest.raises(ReplayError, match=r"step 1 gave other numbers.*the gradient of .* of stage 0"):
        list(trainer.run(5))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", []),
        ("none", []),
        ("messages", ["messages"]),
        ("[messages,replay]", ["messages", "replay"]),
        ("'replicas, messages'", ["replicas", "messages"]),
    ],
)
def test_checks_are_a_list_or_a_text(text, expected):
    config = composed(f"debug.check={text}").debug
    assert (config.check, config.every) == (expected, 100)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["debug.check=[weights]"], "there is no check weights; write a list of messages, replicas, replay"),
        (["debug.check=replay", "memory.offload=auto"], "debug.check=replay doesn't go with memory.offload"),
        (
            ["debug.check=replay", "memory.gradient_release=step", "optimizer.clip_norm=null"],
            "debug.check=replay doesn't go with memory.gradient_release=step",
        ),
        (["debug.every=0"], "debug.every=0: write a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(given, words):
    with pytest.raises(ConfigError, match=words):
        composed(*given)


def test_a_loop_of_ones_own_is_told_what_a_step_cannot_run_twice_with():
    pipeline = small_trainer().pipeline
    inputs, target = small_trainer().data.train.batch(0)
    with pipeline.replaying(), pytest.raises(ValueError, match="inputs that require grad"):
        pipeline.step(inputs.clone().requires_grad_(), target=target)
    pipeline = small_trainer().pipeline
    pipeline.stages[0].register_forward_pre_hook(lambda module, given: (given[0].mul_(2), None)[1])
    with pipeline.replaying(), pytest.raises(ValueError, match="changes the step's inputs in place"):
        pipeline.step(inputs.clone(), target=target)
