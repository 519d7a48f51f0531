"""`python -m zbpp.benchmark.gpu`: what scripts/gpu_check.sh runs."""

import sys

from zbpp.benchmark.gpu.command_line import main

sys.exit(main())
