#!/usr/bin/env python
"""Start of the check on one GPU: see scripts/gpu_check/__init__.py, or --help."""

import sys

from gpu_check.main import main

if __name__ == "__main__":
    sys.exit(main())
