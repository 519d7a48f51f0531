"""Python runs this first if the folder is in PYTHONPATH: see accelerator.processes.environment."""

import os

if "ZBPP_TEST_DEVICE" in os.environ:
    import accelerator.load  # noqa: F401
