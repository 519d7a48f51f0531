"""Compare finished runs: are their losses the same numbers, and what did each measure?

    python scripts/compare.py runs/demo/1f1b runs/demo/zb_h1

Exits with 1 if the losses differ in any bit, or the last one is not below the corpus' unigram entropy.
"""

import argparse
import json
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of scripts/train.py")
    folders = parser.parse_args().runs
    for folder in folders:
        if not (folder / "summary.json").is_file():
            sys.exit(
                f"error: {folder} holds no summary.json: name the run_dir of a finished scripts/train.py"
            )
    losses = [read_losses(folder / "metrics.jsonl") for folder in folders]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    print(f"{'':<14}{'last loss':<20}{'held-out':<10}{'tokens/s':<10}{'bubble: predicted':>18} | measured")
    for summary in summaries:
        print(
            f"{summary['schedule']:<14}{summary['loss']:<20.16g}{summary.get('evaluation_loss', 0):<10.4f}"
            f"{summary['tokens_per_second']:<10,.0f}{summary['predicted_bubble_rate']:>18.3f} "
            f"| {summary['measured_bubble_rate']:.3f}"
        )
    equal = all(each == losses[0] for each in losses)
    print(f"losses of all {len(losses[0])} steps {'are equal to the last bit' if equal else 'DIFFER'}")
    learned = check_learning(summaries[0])
    print("(with more ranks than cores, a run's own bubble says little about the schedule)")
    sys.exit(0 if equal and learned else 1)


def read_losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def check_learning(summary: dict[str, float]) -> bool:
    entropy = summary["unigram_entropy"]
    if entropy is None:
        return True
    below = summary["loss"] < entropy
    print(f"last loss {summary['loss']:.3f}, unigram entropy of the corpus {entropy:.3f} nats per token")
    return below


if __name__ == "__main__":
    main()
