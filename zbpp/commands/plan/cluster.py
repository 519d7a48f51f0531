"""--cluster: what a model would take on a cluster, and the best meshes and schedules for it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zbpp.commands.plan.progress import bar
from zbpp.ranges import ConfigError


def add_options(group: argparse._ArgumentGroup) -> None:
    """The options that go with --cluster, and --cluster itself."""
    group.add_argument("--cluster", metavar="FILE", help="the cluster: a file, or a name in configs/cluster")
    model = "a name in configs/model, a YAML file like those, a config.json, or its folder"
    group.add_argument("--model", metavar="MODEL", help=model)
    group.add_argument("--batch", type=int, metavar="N", help="sequences in a step")
    for name, text in {
        "microbatch-size": "sequences in a microbatch (default: 1, 2, 4 and 8 are tried)",
        "top": "rows in the table (default 5)",
    }.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    group.add_argument("--precision", metavar="NAME", help="default mixed_bfloat16")
    fixed = "sizes of the mesh that are given, such as pipeline=16,tensor=8"
    group.add_argument("--degrees", type=_degrees, metavar="NAME=N,...", help=fixed)
    again = "layers compute their activations again in B (default: only if nothing else fits)"
    group.add_argument("--recompute", action=argparse.BooleanOptionalAction, help=again)
    tokens = "as model.sequence_parallel=true: with tensor > 1, norms are divided, too"
    group.add_argument("--sequence-parallel", action="store_true", help=tokens)
    group.add_argument("--out", metavar="FILE", help="write the answer to FILE (.json, or else as text)")


def on_paper(options: argparse.Namespace) -> str:
    """The table. Raises ConfigError, and OSError if --out can't be written."""
    from zbpp.cluster.report import as_json, as_text
    from zbpp.cluster.search import SCHEDULES, Question, search

    for name in ("model", "batch"):
        if getattr(options, name) is None:
            raise ConfigError(f"--cluster needs --{name}: write --model llama_1b --batch 256")
    if options.out and not Path(options.out).absolute().parent.is_dir():
        raise ConfigError(f"--out {options.out}: there is no folder {Path(options.out).parent}")
    given = {
        name: getattr(options, name)
        for name in ("degrees", "microbatch_size", "precision", "recompute", "top")
        if getattr(options, name) is not None
    }
    if given.get("microbatch_size", 1) < 1:
        raise ConfigError(f"--microbatch-size {options.microbatch_size}: write a whole number, 1 or more")
    question = Question(
        sizes=_sizes(options.model, options.sequence),
        hardware=_hardware(options.cluster),
        batch=options.batch,
        sequence_parallel=options.sequence_parallel,
        schedules=tuple(options.schedules) or SCHEDULES,
        **given,
    )
    with bar() as progress:
        answer = search(question, progress)
    text = as_text(answer)
    if options.out:
        Path(options.out).write_text((as_json(answer) if options.out.endswith(".json") else text) + "\n")
    return text


def _hardware(given: str) -> Any:
    from zbpp.cluster.hardware import Hardware
    from zbpp.config.typed_file import read_typed

    return read_typed(_file(given, "cluster"), Hardware)


def _file(given: str, folder: str) -> Path:
    """A file by its path, or by its name in configs/."""
    from zbpp.config import config_folder

    path, known = Path(given), config_folder() / folder
    if path.suffix in (".yaml", ".yml", ".json") or path.exists():
        return path
    if (known / f"{given}.yaml").is_file():
        return known / f"{given}.yaml"
    names = ", ".join(sorted(each.stem for each in known.glob("*.yaml")))
    raise ConfigError(
        f"--{folder} {given}: there is no such file; write a path, or a name in configs: {names}"
    )


def _sizes(given: str, sequence: int | None) -> Any:
    from dataclasses import replace

    from zbpp.cluster.model_sizes import sizes_of_huggingface, sizes_of_node
    from zbpp.config.typed_file import read_plain

    path = _file(given, "model")
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        return sizes_of_huggingface(_json(path), sequence)
    sizes = sizes_of_node(read_plain(path))
    return sizes if sequence is None else replace(sizes, sequence=sequence)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--model {path}: there is no such file") from None
    except ValueError as error:
        raise ConfigError(f"--model {path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--model {path} is no config.json of a model")
    return found


def _degrees(text: str) -> dict[str, int]:
    found = {}
    for pair in text.split(","):
        name, _, size = pair.partition("=")
        if not size.isdecimal() or not 1 <= float(size) <= 1e6:
            raise argparse.ArgumentTypeError(f"{pair!r}: write NAME=N, such as pipeline=16,tensor=8")
        if name.strip() in found:
            raise argparse.ArgumentTypeError(f"{name.strip()} is given twice")
        found[name.strip()] = int(size)
    return found
