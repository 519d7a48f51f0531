"""`zbpp explain`: what it shows of a stage, eager or compiled."""

import pytest
import torch.nn.functional as F
from torch import nn

import zbpp
from helpers.compiler import needs_inductor
from zbpp.config import ExplainConfig
from zbpp.run.explain_stage import explain_stage


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.calls = nn.LayerNorm(4), nn.Linear(4, 4), 0

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Counting(Layer):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Model:
    def build_stage(self, index, num_stages):
        return nn.Sequential(Layer(), Counting())

    def loss(self, output, target):
        return F.mse_loss(output, target)


class Reporting(Layer):
    """Its linear layer is trained by the auxiliary loss alone."""

    def forward(self, x):
        zbpp.auxiliary_loss("z", self.linear(x).square().mean())
        return self.norm(x)


class ReportingModel(Model):
    def build_stage(self, index, num_stages):
        return Reporting()

    def loss(self, output, target):
        return {"error": F.mse_loss(output, target), "size": output.abs().mean()}


def explained(model, **options):
    return explain_stage(
        ExplainConfig(
            model={"_target_": f"{__name__}.{model.__name__}"},
            data={"_target_": "zbpp.data.regression_data", "in_features": 4, "out_features": 4},
            stage=1,
            num_stages=2,
            microbatch_size=2,
            **options,
        )
    )


def test_weights_that_an_auxiliary_loss_trains_are_explained_and_the_loss_may_be_a_dict():
    assert {row.name: row.where for row in explained(ReportingModel).rows}["linear.weight"] == "W"


@needs_inductor
@pytest.mark.parametrize("compile", ["stage", "layer"])
def test_with_compile_it_tells_what_compiles_and_what_stays_eager_and_why(compile, capsys, caplog):
    explanation = explained(Model, compile=compile)
    why = {row.name: row.why for row in explanation.rows}
    assert why["0.linear.weight"] == "compiled: its product is in W's graph"
    assert "; not compiled: forward sets attributes or changes objects" in why["1.linear.weight"]
    assert "not compiled" in str(explanation)
    assert "stage 1 0: compiled in " in capsys.readouterr().out
    assert "stage 1 1 is not compiled, it stays eager: forward sets attributes" in caplog.text
