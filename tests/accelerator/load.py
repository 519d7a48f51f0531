"""Gives the process that imports it the device that $ZBPP_TEST_DEVICE names, if torch was not imported yet.

torch asks once whether there is CUDA. So the library is loaded first, after torch's own libraries.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

NAME = os.environ["ZBPP_TEST_DEVICE"]


def _load_library() -> Any:
    assert "torch" not in sys.modules, "torch was imported before the emulated accelerator"
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    for name in ("c10", "torch_cpu", "torch", "torch_python"):
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location("zbpp_accelerator", os.environ["ZBPP_TEST_LIBRARY"])
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    errors, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # torch warns that kernels of c10d are replaced
    try:
        spec.loader.exec_module(library)
    finally:
        os.dup2(errors, 2)
        os.close(errors)
        os.close(nowhere)
    return library


library = _load_library()

import torch  # noqa: E402

if NAME == "cuda":
    from accelerator import cuda

    cuda.install()
else:
    from accelerator import npu

    npu.install()

from accelerator import collectives, reports  # noqa: E402

torch._C._accelerator_emptyHostCache = lambda: None  # of pinned memory, of which nothing is kept
collectives.install()
reports.install()
assert torch.accelerator.current_accelerator() == torch.device(NAME)
