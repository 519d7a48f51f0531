"""--cluster: what a model would take on a cluster, and the best meshes and schedules for it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zbpp.cluster import Hardware, ModelSizes, Question, as_text, search, sizes_of_huggingface, sizes_of_node
from zbpp.ranges import ConfigError


def add_options(group: argparse._ArgumentGroup) -> None:
    """The options that go with --cluster, and --cluster itself."""
    group.add_argument("--cluster", metavar="FILE", help="the cluster: a file, or a name in configs/cluster")
    model = "a name in configs/model, a YAML file like those, a config.json, or its folder"
    group.add_argument("--model", metavar="MODEL", help=model)
    group.add_argument("--batch", type=int, metavar="N", help="sequences in a step")
    group.add_argument(
        "--sequence", type=int, metavar="N", help="tokens in a sequence (default: the model's)"
    )
    waits = "as memory.head_at_once=true: W of the head at the end of its B"
    group.add_argument("--head-at-once", action="store_true", help=waits)
    fixed = "sizes of the mesh that are given, such as pipeline=16,tensor=8"
    group.add_argument("--degrees", type=_degrees, default={}, metavar="NAME=N,...", help=fixed)


def on_paper(options: argparse.Namespace, progress: Callable[[float, str], None]) -> str:
    """The table. Raises ConfigError."""
    # Hydra's files are read by OmegaConf; no other form of the command needs it.
    from zbpp.config.typed_file import read_typed

    for name in ("model", "batch"):
        if getattr(options, name) is None:
            raise ConfigError(f"--cluster needs --{name}: write --model llama_1b --batch 256")
    names = {"schedules": tuple(options.schedules)} if options.schedules else {}
    question = Question(
        sizes=_sizes(options.model, options.sequence),
        hardware=read_typed(_file(options.cluster, "cluster"), Hardware),
        batch=options.batch,
        degrees=options.degrees,
        head_at_once=options.head_at_once,
        **names,
    )
    return as_text(search(question, progress))


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


def _sizes(given: str, sequence: int | None) -> ModelSizes:
    from zbpp.config.typed_file import read_plain

    path = _file(given, "model")
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        return sizes_of_huggingface(_json(path), sequence)
    sizes = sizes_of_node(read_plain(path))
    return sizes if sequence is None else replace(sizes, sequence=sequence)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"--model {path} is no config.json of a model: {error}") from None


def _degrees(text: str) -> dict[str, int]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for _, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=N,..., such as pipeline=16,tensor=8")
    return {name.strip(): int(size) for name, _, size in pairs}
