"""`python -m zbpp.benchmark.gpu`: what scripts/gpu_check.sh runs."""

import sys

from zbpp.benchmark.interruption import Interrupted, interruption


def main() -> int:
    """The exit status; 128 + N after signal N."""
    with interruption() as signals:
        try:
            from zbpp.benchmark.gpu.command_line import main  # imports torch: a signal may come meanwhile

            return main(signals=signals)
        except Interrupted as signal:
            print(f"gpu_check: ended by {signal}", file=sys.stderr)
    return signals.exit_status


if __name__ == "__main__":
    sys.exit(main())
