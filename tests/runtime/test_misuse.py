"""Calls of the Python API that no training loop should make: an error, and the pipeline as it was."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zbpp

X = torch.arange(16.0).reshape(4, 4) / 7


def pipeline(loss=F.mse_loss):
    torch.manual_seed(0)
    return zbpp.Pipeline({0: nn.Linear(4, 4)}, zbpp.plan("zb_h1", 1, 2), loss)


def gradients(made):
    return [parameter.grad for parameter in made.parameters()]


def test_a_call_inside_a_call_is_refused():
    """From the loss of a step, in this thread or in another one; a later step is as if nothing had been."""
    found = []

    def loss(output, target):
        for call in (made.step, made.evaluate):
            for run in (in_thread, lambda function: function()):
                with pytest.raises(RuntimeError, match="is in a call already"):
                    run(lambda call=call: call(X, target=X))
                found.append(call)
        return F.mse_loss(output, target)

    made, alone = pipeline(loss), pipeline()
    assert made.step(X, target=X) == alone.step(X, target=X)
    assert len(found) == 8  # two microbatches
    assert made.num_steps == 1
    assert all(module.training for module in made.stages.values())
    assert all(map(torch.equal, gradients(made), gradients(alone)))


def in_thread(function):
    errors = []

    def run():
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise errors[0]


def test_gradients_of_a_step_between_validated_steps_are_not_dropped_in_silence():
    made = pipeline()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    validated = zbpp.PostValidation(made, optimizer, clip_norm=100.0)
    validated.step(X, target=X)
    made.step(X, target=X)
    with pytest.raises(ValueError, match="would drop the gradients of a pipeline.step"):
        validated.step(X, target=X)
    validated.finish_update()
    optimizer.step()
    optimizer.zero_grad()
    validated.step(X, target=X)


@pytest.mark.parametrize(
    ("args", "keywords", "said"),
    [
        ((X, X), {}, r"needs target=.*write pipeline.step\(x, target=y\). Positional .* inputs$"),
        ((X,), {"labels": X}, "and labels= goes to each stage's forward"),
        ((torch.ones(4, 3),), {"target": X}, "shapes"),
        ((X, X), {"target": X}, "takes 2 positional arguments"),
    ],
)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_call_whose_arguments_do_not_fit_says_what_was_given(call, args, keywords, said):
    with pytest.raises((ValueError, RuntimeError, TypeError), match=said.replace("step", call)) as caught:
        getattr(pipeline(), call)(*args, **keywords)
    if said == "shapes":
        assert "the forward of stage 0 was given (float32[2, 3])" in caught.value.__notes__
    if said.startswith("takes"):  # as on the first of two ranks, where `target` may be another rank's
        assert f"is one of them the target? Then write pipeline.{call}(x, target=y)" in caught.value.__notes__


@pytest.mark.parametrize("name", ["train", "eval", "to", "zero_grad", "modules", "__call__"])
def test_what_a_module_has_and_a_pipeline_has_not_says_what_to_write(name):
    made = pipeline()
    assert callable(getattr(nn.Linear(4, 4), name))
    with pytest.raises((AttributeError, TypeError), match="is no nn.Module: write pipeline.step"):
        made(X) if name == "__call__" else getattr(made, name)
    with pytest.raises(AttributeError, match="^Pipeline has no num_step$"):
        made.num_step  # noqa: B018  # the look-up is what fails


def test_a_property_of_a_pipeline_that_fails_raises_its_own_error(monkeypatch):
    def fail(pipeline):
        raise AttributeError("the cause")

    made = pipeline()
    monkeypatch.setattr(zbpp.Pipeline, "count", property(fail))
    with pytest.raises(AttributeError, match="^the cause"):
        made.count  # noqa: B018  # the look-up is what fails


@pytest.mark.parametrize("bound", [-1, float("nan"), "1", None, True])
def test_a_bound_of_a_norm_is_a_number_that_is_not_negative(bound):
    made = pipeline()
    made.step(X, target=X)
    before = [each.clone() for each in gradients(made)]
    with pytest.raises(ValueError, match="max_norm=.*: write a number"):
        zbpp.clip_grad_norm_(made, bound)
    assert all(map(torch.equal, gradients(made), before))
    if bound is not None:
        with pytest.raises(ValueError, match="clip_norm=.*: write a number above 0"):
            zbpp.PostValidation(made, torch.optim.AdamW(made.parameters()), clip_norm=bound)
