"""A file of the user's that hides a library is refused by its name, where Python would import it."""

import sys

import pytest

from zbpp.commands.shadowed import check_no_library_is_hidden
from zbpp.launch import Refusal


def test_a_file_that_hides_a_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "model.py").touch()
    (tmp_path / "datasets").mkdir()  # a folder of data hides nothing
    check_no_library_is_hidden(tmp_path)
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy/__init__.py").touch()
    with pytest.raises(Refusal, match="numpy/__init__.py in the current folder hides the library numpy"):
        check_no_library_is_hidden(tmp_path)
    (tmp_path / "torch.py").touch()
    with pytest.raises(Refusal, match="torch.py in the current folder hides the library torch"):
        check_no_library_is_hidden(tmp_path)


def test_a_library_that_is_only_there_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "torch.py").touch()
    check_no_library_is_hidden(tmp_path)
