"""The command `zbpp train`, for use without installing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zbpp.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
