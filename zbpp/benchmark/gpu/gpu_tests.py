"""Part tests: the tests that need a GPU, by pytest, without the suite's other needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from zbpp.benchmark.gpu.rows import Row
from zbpp.benchmark.gpu.settings import Settings

_ROOT = Path(__file__).parents[3]


def rows(settings: Settings) -> Iterator[Row]:
    """A row of counts, and one for each test that failed."""
    if not settings.is_cuda:
        yield Row("not run: they need a GPU")
        return
    if importlib.util.find_spec("pytest") is None:
        yield Row("not run: pytest is not installed")
        return
    files = files_with_gpu_tests(_ROOT / "tests")
    if not files:
        yield Row("not run: the tests are not here (run from a clone)")
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        seconds = max(1.0, settings.left - 2)
        try:
            done = subprocess.run(
                _command(files, report),
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "tests"), str(_ROOT)])},
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            yield Row(f"not finished within {seconds:.0f} s: run `python -m pytest -m gpu tests` by itself")
            return
        if not report.exists():
            yield Row(f"pytest ended with status {done.returncode}: {_last_line(done.stdout + done.stderr)}")
            return
        yield from _of_report(report)


def files_with_gpu_tests(folder: Path) -> list[Path]:
    """The test files that have tests marked gpu: to collect all files would take longer than these tests."""
    return [path for path in sorted(folder.rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]


def _command(files: list[Path], report: Path) -> list[str]:
    """The command of pytest, without the project's options and conftest.py, which need plugins."""
    own = ["-c", os.devnull, f"--rootdir={_ROOT}", "--noconftest", "--import-mode=importlib"]
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
    chosen = ["-m", "gpu", f"--junitxml={report}", *map(str, files)]
    return [sys.executable, "-m", "pytest", *own, *quiet, *chosen]


def _of_report(report: Path) -> Iterator[Row]:
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None  # pytest writes one
    count = {name: float(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    yield Row("tests", count, form=".0f")
    for case in suite.iter("testcase"):
        for problem in (*case.iter("failure"), *case.iter("error")):
            text = problem.get("message", "").partition("\n")[0]
            yield Row(f"FAILED {case.get('classname')}.{case.get('name')}", note=text[:200])


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
