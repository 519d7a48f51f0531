"""`torchrun ... -m zbpp.parity FILE:CASE`: the entry alone. zbpp/parity_check/command.py says what it does.

The function `zbpp.parity` is made in zbpp/parity_check; `import zbpp.parity` gives it, too.
"""

import sys

from zbpp.parity_check.check import parity
from zbpp.parity_check.command import main

if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__] = parity  # type: ignore[assignment]  # else this module would hide the function
