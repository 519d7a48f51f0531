"""Tests that compile C++: without a compiler they are skipped, with a line that says what to install."""

import shutil
import sysconfig
from pathlib import Path

import pytest
from torch.utils import cpp_extension


def missing(who: str) -> str:
    """What is missing to compile, in one line; empty if nothing is. who: what needs a compiler."""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"{who} needs a C++ compiler, and there is no {compiler}: apt install g++"
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        return f"{who} needs Python.h, which {headers} lacks: apt install python3-dev"
    return ""


needs_inductor = pytest.mark.skipif(bool(missing("Inductor")), reason=missing("Inductor"))
"""For tests of what Inductor compiles."""
