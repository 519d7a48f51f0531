"""Options of the test suite, and where drawn data begins.

Random tests draw the same data in every run; `--free-seeds` lets them draw anew.
"""

import gc
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import hypothesis
import pytest

from helpers.installed import ROOT, Installation, install_once
from helpers.warm import WarmPython
from zbpp import tracebacks

tracebacks._OWN = "nowhere"  # a test that fails shows zbpp's frames

hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("free", database=None, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="write tests/golden/ anew")
    parser.addoption("--free-seeds", action="store_true", help="let random tests draw new data")


def pytest_configure(config: pytest.Config) -> None:
    """This process is no rank of any job, wherever pytest was started."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    hypothesis.settings.load_profile("free" if config.getoption("--free-seeds") else "fixed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, begin with the files that hold slow tests: a long one at the end runs alone."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """gc.collect(), which many tests call, searches what they make and not a million imported objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests run outside of the clone: torch's compiler, say, writes into the current folder."""
    with chdir(tmp_path_factory.mktemp("current")):
        yield


@pytest.fixture
def float64() -> Iterator[None]:
    """New tensors and modules are float64."""
    from helpers.split import float64  # imports torch

    with float64():
        yield


@pytest.fixture
def first_seed(request: pytest.FixtureRequest) -> int:
    """Where a test that counts through seeds begins."""
    return random.randrange(2**32) if request.config.getoption("--free-seeds") else 0


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """zbpp installed from a wheel that is built once in a run; without hatchling, the repository."""
    if importlib.util.find_spec("hatchling") is None:
        return Installation(Path(sys.executable), pythonpath=str(ROOT))
    folder = tmp_path_factory.getbasetemp()
    return install_once((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "wheel")


@pytest.fixture(scope="session")
def warm(installed: Installation) -> Iterator[Installation]:
    """The same, for commands that need no Python of their own: see helpers.warm."""
    python = WarmPython(installed.python, installed.pythonpath)
    yield Installation(python.bin / "python", installed.pythonpath)
    python.close()
