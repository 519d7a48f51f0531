"""Whose code a command may run: what the user types is trusted, what a config file says is not.

A file that somebody else wrote is chosen by --config-dir, or lies in a run's folder. The code that such a
file names by `_target_` runs only if the user types trust_code=true, or types the name, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from zbpp.config.known_code import is_known_name
from zbpp.ranges import ConfigError

_SHOWN = 120  # characters of a stranger's text in an error
_ENVIRONMENT = re.compile(r"\boc\.env:\s*(\w+)")


@dataclass(frozen=True)
class Trust:
    """What the user has typed. targets: (key of a node, the name that its `_target_` has)."""

    everything: bool = False
    targets: frozenset[tuple[str, str]] = frozenset()
    variables: frozenset[str] = frozenset()  # of the environment

    @classmethod
    def typed(cls, arguments: Sequence[str]) -> Trust:
        """What a command line says; arguments: Hydra's, with flags among them."""
        parser = OverridesParser.create()
        everything, targets = False, set()
        for argument in arguments:
            try:
                override = parser.parse_override(argument)
            except HydraException:  # a flag, or a mistake that Hydra tells
                continue
            key = str(override.key_or_group)
            values = list(_values(override))
            if key == "trust_code":
                everything = values == [True]
            for value in values:
                targets |= set(_targets_of(key, value))
        found = (name for argument in arguments for name in _ENVIRONMENT.findall(argument))
        return cls(everything, frozenset(targets), frozenset(found))

    @property
    def names_own_code(self) -> bool:
        """Whether code may come from the current folder."""
        return self.everything or any(not is_known_name(name) for _, name in self.targets)

    def check(self, config: Any) -> None:
        """Raise ConfigError for a `_target_` in the config, as plain values, that is not trusted."""
        for key, name in _targets_in("", config):
            if not (self.everything or is_known_name(name) or (key, name) in self.targets):
                shown = str(name)[:_SHOWN]
                raise ConfigError(
                    f"{key}._target_={shown} is code that a config file names, and that does not belong to "
                    f"zbpp or torch's layers, optimizers and data: to run it, type {key}._target_={shown} "
                    "in the command, or trust_code=true if you trust all of the config"
                )
        typed = isinstance(config, Mapping) and config.get("trust_code") in (True, "true")
        if typed and not self.everything:
            raise ConfigError("trust_code=true counts in the command only, not in a config file: type it")

    def check_run(self, path: os.PathLike[str], config: Any) -> None:
        """Raise ConfigError for code that a run's config.yaml names, and that is not of zbpp or torch."""
        for key, name in _targets_in("", config):
            if not is_known_name(name):
                raise ConfigError(
                    f"{os.fspath(path)} names code of its own, {key}._target_={str(name)[:_SHOWN]}: if you "
                    "trust this run, add --trust-code"
                )

    def guard_environment(self) -> None:
        """Let `${oc.env:NAME}` in configs read only what the user has typed, from now on in this process."""

        def guarded(name: str, *default: Any) -> Any:
            if name in self.variables:
                return oc.env(name, *default)
            raise ConfigError(
                f"${{oc.env:{name[:_SHOWN]}}} in a config file asks for the environment: write the value in "
                "the command, or trust_code=true if you trust all of the config"
            )

        OmegaConf.register_new_resolver("oc.env", oc.env if self.everything else guarded, replace=True)


def _values(override: Override) -> Iterator[Any]:
    """The values of an override: one, or those of a sweep."""
    if override.is_sweep_override():
        choices: Any = getattr(override.value(), "list", None) or []
        yield from (getattr(each, "text", each) for each in choices)  # a quoted choice has a text
    elif not override.is_delete():
        yield override.value()


def _targets_of(key: str, value: Any) -> Iterator[tuple[str, str]]:
    node, _, last = key.rpartition(".")
    if last == "_target_":
        yield node, str(value)
    yield from _targets_in(key, value)


def _targets_in(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(key, `_target_`) of each node below a value."""
    if isinstance(value, Mapping):
        plain = {str(name): each for name, each in value.items()}
        if "_target_" in plain:
            yield key, plain["_target_"]
        for name, each in plain.items():
            yield from _targets_in(f"{key}.{name}" if key else name, each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _targets_in(f"{key}.{number}", each)


def add_current_folder(trust: Trust, path: list[str]) -> bool:
    """Let Python import from the current folder if the command names the user's code; returns if it does.

    Otherwise a file there, such as a `wandb.py` beside somebody's run, could be imported for a package.
    """
    if trust.names_own_code:
        path.insert(0, os.getcwd())
    return trust.names_own_code
