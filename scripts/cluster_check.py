#!/usr/bin/env python
"""Start of the check on several GPUs: see scripts/cluster_check/__init__.py, or --help."""

import sys

from cluster_check.main import main

if __name__ == "__main__":
    sys.exit(main())
