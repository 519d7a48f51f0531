"""Compare finished runs: are their losses the same numbers, and what did each measure?

    python scripts/compare.py runs/demo/1f1b runs/demo/zb_h1

Exits with 1 if the losses differ in any bit, or the last one is not below the corpus' unigram entropy.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


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
    print(table(folders, summaries))
    equal = all(each == losses[0] for each in losses)
    print(f"losses of all {len(losses[0])} steps {'are equal to the last bit' if equal else 'DIFFER'}")
    learned = check_learning(summaries[0])
    print("(with more ranks than cores, a run's own bubble says little about the schedule)")
    sys.exit(0 if equal and learned else 1)


def table(folders: list[Path], summaries: list[dict[str, Any]]) -> str:
    """A row per run, called by its folder."""
    head = ("run", "schedule", "last loss", "held-out", "speed", "bubble: predicted", "measured")
    rows = [head, *(row(folder, summary) for folder, summary in zip(folders, summaries, strict=True))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in rows
    )


def row(folder: Path, summary: dict[str, Any]) -> tuple[str, ...]:
    began, held_out = summary.get("replanned_from"), summary.get("evaluation_loss")
    unit = next(name for name in ("tokens", "rows") if f"{name}_per_second" in summary)
    return (
        str(folder),
        f"{summary['schedule']} (began as {began})" if began else summary["schedule"],
        "-" if summary["loss"] is None else f"{summary['loss']:.16g}",  # null: it was not finite
        "-" if held_out is None else f"{held_out:.4f}",
        f"{summary[f'{unit}_per_second']:,.0f} {unit}/s",
        f"{summary['predicted_bubble_rate']:.3f}",
        f"{summary['measured_bubble_rate']:.3f}",
    )


def read_losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def check_learning(summary: dict[str, Any]) -> bool:
    entropy = summary["unigram_entropy"]
    if entropy is None or summary["loss"] is None:
        return entropy is None
    below = summary["loss"] < entropy
    print(f"last loss {summary['loss']:.3f}, unigram entropy of the corpus {entropy:.3f} nats per token")
    return below


if __name__ == "__main__":
    main()
