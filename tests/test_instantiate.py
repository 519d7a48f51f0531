"""Objects from config nodes, and code of the user's that they name."""

import sys

from torch import nn

from zbpp.commands import command_line
from zbpp.config import instantiate_node


def test_nodes_inside_a_node_are_made_first_and_judged_alike():
    inner = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
    node = {"_target_": "torch.nn.TransformerDecoder", "decoder_layer": inner, "num_layers": 1}
    assert isinstance(instantiate_node("model", node).layers[0], nn.Linear)
    partial = instantiate_node("model", {**inner, "_partial_": True})
    assert partial().out_features == 3
    assert instantiate_node("model", {"_target_": "torch.nn.Linear", "_args_": [4, 5]}).in_features == 4


def test_a_config_of_the_users_names_code_of_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "friend.py").write_text("class Model: ...\n")
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("_target_: friend.Model\nuser: ${oc.env:SECRET}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "known")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ran = []
    command_line.run(ran.append, "explain", "", ["--config-dir", "conf", "model=mine", "data=regression"])
    assert ran[0].tree.model == {"_target_": "friend.Model", "user": "known"}
    assert type(instantiate_node("model", {"_target_": "friend.Model"})).__module__ == "friend"
