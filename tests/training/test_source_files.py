"""Ranks that run different code are told so, with the file."""

import importlib
import sys
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

import pytest

import zbpp
from helpers.processes import run_ranks
from zbpp.run.checks import check_source_files, source_files
from zbpp.runtime import AgreementError


def compared(rank, folder, differing):
    """What is said where each rank imports its own copies of three files, the last on rank 0 alone."""
    mine = Path(folder) / str(rank)
    mine.mkdir()
    sys.path.insert(0, str(mine))
    for name in ("user_model", "user_layers", "only_on_rank_0")[: 3 - rank]:
        (mine / f"{name}.py").write_text(f"rank = {rank if name == differing else 0}\n")
        importlib.import_module(name)
    try:
        check_source_files()
    except AgreementError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("differing", ["user_layers", None])
def test_a_file_that_differs_between_ranks_is_named_on_every_rank_and_others_are_not(tmp_path, differing):
    found = run_ranks(compared, 2, str(tmp_path), differing, fresh=True)  # they import a file
    assert found[0] == found[1]
    if differing is None:
        assert found[0] == ""
    else:
        first, second = (blake2b(f"rank = {r}\n".encode(), digest_size=4).hexdigest() for r in (0, 1))
        assert found[0] == (
            "the ranks of this job have different source files (by hash):\n"
            f"  user_layers: '{first}' on rank 0; '{second}' on rank 1"
        )


def test_all_of_zbpp_and_what_the_user_wrote_is_compared_and_nothing_that_is_installed():
    files = source_files()
    package = Path(zbpp.__file__).parent
    assert {name for name in files if name.startswith("zbpp/")} == {
        f"zbpp/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")
    }
    assert "helpers.processes" in files
    assert not {"torch", "json", "pytest", "numpy"} & {name.partition(".")[0] for name in files}


def test_a_file_that_an_installed_package_wrote_elsewhere_is_not_the_users(monkeypatch, tmp_path):
    """torch's compiler leaves modules of its own in a folder for temporary files."""
    (tmp_path / "generated.py").write_text("made = True\n")
    for name in ("torch._made.here", "of_the_user"):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / "generated.py")
        monkeypatch.setitem(sys.modules, name, module)
    files = source_files()
    assert "of_the_user" in files
    assert "torch._made.here" not in files
