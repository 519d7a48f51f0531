"""Config files that are not zbpp's own: what they may say of Hydra itself, and how large they may be.

Hydra obeys the node `hydra` of whatever it has composed: `hydra.job_logging` and `hydra.callbacks` call any
function, `hydra.job.env_set` changes the environment. The command may set these, a file may not.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from zbpp.config.yaml_files import check_yaml
from zbpp.ranges import ConfigError

_OF_HYDRA = re.compile(r"[+~]*hydra\b")
# Hydra writes these itself while it composes.
_WRITTEN = ("runtime", "overrides", "job", "mode")
_OF_THE_JOB = ("env_set", "env_copy", "chdir")


@contextmanager
def foreign_files_checked(name: str, own: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Inside, Hydra refuses config files that set more of Hydra than configs/NAME.yaml in `own` does.

    arguments: Hydra's. Raises ConfigError for YAML files that would need endless memory.
    """
    folders = _foreign_folders(arguments)
    if not folders and not any("hydra.searchpath" in each for each in arguments):
        yield
        return
    for folder in folders:
        for path in _yaml_files(folder):
            check_yaml(path)

    class Loader(ConfigLoaderImpl):
        def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
            try:
                found = super().load_configuration(*args, **kwargs)
            except RecursionError:
                raise ConfigError("the defaults of config files lead to each other in a circle") from None
            _check_hydra(found, _own_hydra(name, own, arguments), _hint(name, arguments))
            return found

        def _process_config_searchpath(self, config_name: Any, overrides: Any, repo: Any) -> None:
            # Before Hydra looks into the path: a package in it is imported.
            if not any(each.get_key_element() == "hydra.searchpath" for each in overrides):
                _refuse_searchpath(repo.load_config(config_path=config_name))
            super()._process_config_searchpath(config_name, overrides, repo)

    maker: Any = import_module("hydra._internal.hydra")  # hydra.main takes no loader
    kept, maker.ConfigLoaderImpl = maker.ConfigLoaderImpl, Loader
    try:
        yield
    finally:
        maker.ConfigLoaderImpl = kept


def _refuse_searchpath(loaded: Any) -> None:
    """Raise ConfigError for a config file that names further places for configs."""
    config: Any = None if loaded is None else loaded.config
    if OmegaConf.is_dict(config) and OmegaConf.select(config, "hydra.searchpath") is not None:
        raise ConfigError(
            "a config file sets hydra.searchpath, which can run code: leave it out of the file and write it "
            "in the command, or trust_code=true if you trust all of the config"
        )


def _foreign_folders(arguments: Sequence[str]) -> list[Path]:
    """The folders that --config-dir, --config-path and hydra.searchpath name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-path", "-cp")
    given, others = parser.parse_known_args(list(arguments))
    typed = [each.partition("=")[2] for each in others if "hydra.searchpath" in each]
    searched = [each.strip(" '\"") for text in typed for each in text.strip("[]").split(",")]
    paths = [each.removeprefix("file://") for each in searched if not each.startswith("pkg:")]
    return [Path(each) for each in (given.config_dir, given.config_path, *paths) if each]


def _yaml_files(folder: Path) -> Iterator[Path]:
    """All YAML files below a folder, also behind links to folders, as Hydra finds them."""
    seen: set[Path] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        if Path(place).resolve() in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(Path(place).resolve())
        yield from (Path(place, name) for name in sorted(files) if fnmatch(name, "*.y*ml"))


def _own_hydra(name: str, own: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """The node `hydra` of zbpp's own files and of the command."""
    path: ConfigSearchPath = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    path.append("main", str(own))
    path.append("schema", "structured://")
    typed = [each for each in arguments if _OF_HYDRA.match(each) and "searchpath" not in each]
    composed = ConfigLoaderImpl(config_search_path=path).load_configuration(name, typed, RunMode.RUN)
    return _compared(composed)


def _compared(config: DictConfig) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(config.hydra, resolve=False)
    job = {f"job.{key}": found["job"].get(key) for key in _OF_THE_JOB}
    return {key: value for key, value in found.items() if key not in _WRITTEN} | job


def _hint(name: str, arguments: Sequence[str]) -> str:
    """A hint for a file that takes the place of configs/NAME.yaml; "" if there is none."""
    if not any(each.partition("=")[0] in ("--config-name", "-cn") for each in arguments):
        return ""
    return f". A file that --config-name names needs the line `defaults: [{name}, _self_]`"


def _check_hydra(config: DictConfig, own: dict[str, Any], hint: str) -> None:
    found = _compared(config)
    for key in sorted(found.keys() | own.keys()):
        if key != "searchpath" and found.get(key) != own.get(key):
            raise ConfigError(
                f"a config file sets hydra.{key}, which can run code: leave it out of the file and write it "
                f"in the command, or trust_code=true if you trust all of the config{hint}"
            )
