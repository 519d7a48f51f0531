"""From YAML files and a command line to one checked config, by Hydra.

A YAML file under configs/ is one choice. What Hydra or OmegaConf says of a mistake becomes one line.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self, cast, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from zbpp.config.choice_help import choice_help
from zbpp.config.commands import BenchConfig, ExplainConfig, MeasureConfig
from zbpp.config.folder import config_folder
from zbpp.config.instantiate import no_module
from zbpp.config.train import TrainConfig
from zbpp.config.typed_file import in_python
from zbpp.error_text import did_you_mean
from zbpp.ranges import ConfigError, help_of
from zbpp.signatures import names_of, not_taken

_KINDS: dict[str, Any] = {
    "train": TrainConfig,
    "bench": BenchConfig,
    "measure": MeasureConfig,
    "explain": ExplainConfig,
}


@dataclass(frozen=True)
class Composed:
    """A config in three forms. tree: a TrainConfig, say; settings: values by dotted key.

    yaml: its text, which Hydra composes to the same config: `--config-dir FOLDER --config-name FILE`.
    given: the user's own part of it, as typed: "schedule=zb_v".
    """

    tree: Any
    settings: dict[str, Any]
    yaml: str
    given: Sequence[str] = ()

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        """The forms of what Hydra has composed. Raises ConfigError."""
        header, tree = _HEADER.format(kind=_name_of(config)), typed(config)
        given = [*HydraConfig.get().overrides.task] if HydraConfig.initialized() else []
        return cls(tree, flat(config), header + OmegaConf.to_yaml(config, resolve=True), given)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """The config with other values, by dotted key. Raises ConfigError for values out of range."""
        if not changes:
            return self
        header, body = self.yaml[: self.yaml.index(_END)] + _END, self.yaml.partition(_END)[2]
        values = cast(DictConfig, OmegaConf.create(body))
        for key, value in changes.items():
            OmegaConf.update(values, key, value)
        tree = with_values(self.tree, changes)
        return replace(self, tree=tree, settings=flat(values), yaml=header + OmegaConf.to_yaml(values))


def with_values(tree: Any, changes: Mapping[str, Any]) -> Any:
    """A config's tree with other values, by dotted key. Raises ConfigError for values out of range."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        groups.setdefault(group, {})[name] = value
    plain = groups.pop("", {})
    made = {group: _replaced(getattr(tree, group), values) for group, values in groups.items()}
    return replace(tree, **made, **plain)


def _replaced(group: Any, values: dict[str, Any]) -> Any:
    # The model's node is a dict, since its keys are those of the user's class.
    return {**group, **values} if isinstance(group, dict) else replace(group, **values)


_HEADER = """\
# `zbpp {kind}` with the folder of this file in place of all keys composes this config again.
defaults:
  - {kind}_types
  - override hydra/job_logging: stdout
  - _self_
hydra:
  run:
    dir: .
  output_subdir: null
"""
_END = "  output_subdir: null\n"  # of the header
_OF_HYDRA = ("defaults", "hydra")


def _name_of(config: DictConfig) -> str:
    """The command whose config this is. Raises ConfigError for keys without types."""
    for name, kind in _KINDS.items():
        if kind is OmegaConf.get_type(config):
            return name
    raise ConfigError(
        "the keys of this config have no types: its file must begin with `defaults: [train_types, _self_]`, "
        "as the config.yaml of a run does"
    )


def command(
    main: Callable[[Composed], None],
    name: str,
    guard: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[], None]:
    """A function that composes configs/NAME.yaml with sys.argv and calls `main` with the checked config.

    guard: a context around the check and the call of `main`. It is entered inside Hydra, which would print a
    line of its own about an error.
    """
    register()

    def composed_and_checked() -> None:
        def checked(config: DictConfig) -> None:
            with guard():
                main(Composed.of(config))

        decorated: Callable[[], None] = hydra.main(str(config_folder()), name, version_base="1.3")(checked)
        decorated()

    return composed_and_checked


def register() -> None:
    """Tell Hydra the types of our configs: configs/train.yaml and its like build on them."""
    store = ConfigStore.instance()
    for name, kind in _KINDS.items():
        store.store(name=f"{name}_types", node=kind)
    OmegaConf.register_new_resolver("sweep_number", _sweep_number, replace=True)
    OmegaConf.register_new_resolver("vocabulary_of", _vocabulary_of, replace=True)
    OmegaConf.register_new_resolver("sequence_length_of", _sequence_length_of, replace=True)


def _sweep_number() -> str:
    """`-0`, `-1`, ... for the jobs of a sweep (-m), which all start at the same time; else nothing."""
    job = HydraConfig.get() if HydraConfig.initialized() else None
    return f"-{job.job.num}" if job is not None and job.mode is RunMode.MULTIRUN else ""


def _vocabulary_of(folder: str | None, otherwise: int) -> int | None:
    """The size of the vocabulary in a model's folder; None if the folder does not say it.

    otherwise: without a folder.
    """
    return otherwise if folder is None else _size_in(Path(folder) / "config.json", "vocab_size")


_USUAL_LENGTH = 2048  # tokens: what a model of the Hub is trained on where nobody says otherwise


def _sequence_length_of(folder: str | None, config: Any, otherwise: int) -> int:
    """The sequence length for a model from a folder, or from the file of a config: at most _USUAL_LENGTH.

    otherwise: for a config that is written out.
    """
    if folder is None and not isinstance(config, str):
        return otherwise
    file = Path(config) if folder is None else Path(folder) / "config.json"
    return min(_size_in(file, *_OF_POSITIONS) or _USUAL_LENGTH, _USUAL_LENGTH)


_OF_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


def _size_in(file: Path, *names: str) -> int | None:
    """The first of these sizes that a model's config.json has, also in its part on text; None without one."""
    try:
        whole = json.loads(file.read_text())
        parts = whole, whole.get("text_config") or {}
        found = [part[name] for part in parts for name in names if isinstance(part.get(name), int)]
        return found[0] if found else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # what is wrong with the file is said where it is loaded


# ---------------------------------------------------------------- the forms of a composed config


def typed(config: DictConfig) -> Any:
    """The composed config as the dataclass that it was composed from. Raises ConfigError."""
    try:
        _check_keys(config)
        return OmegaConf.to_object(config)
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf wraps what __post_init__ raises in types of its own
        key, text = getattr(error, "full_key", None), in_python(str(error))
        if isinstance(error, InterpolationKeyError) and str(key).startswith("data."):
            raise ConfigError(_missing_module(config) or _data_of_another_model(key, text)) from error
        if isinstance(error, MissingMandatoryValue):
            group, dot, _ = str(key).partition(".")
            text += f": write {key}=..." + (dot and f", see zbpp {_name_of(config)} --help {group}=NAME")
        raise ConfigError(f"{key}: {text}" if key else text) from error


def _missing_module(config: DictConfig) -> str:
    """A message if the module of the model's class does not exist: its keys are missing for this reason."""
    target = OmegaConf.select(config, "model._target_", default=None)
    first = target.partition(".")[0] if isinstance(target, str) else ""
    if not first or first in sys.modules or importlib.util.find_spec(first) is not None:
        return ""
    return f"model._target_={target}: {no_module(first)}"


def _data_of_another_model(key: object, text: str) -> str:
    """A message for data that ask for a key which the model has not, such as model.vocab_size."""
    return (
        f"{key}: {text}. The chosen data (by default data=stdlib, a text) are not for this model: write "
        "data._target_=my_file.my_data for data of yours, or data=regression; for a language model "
        f"{key}=... (docs/training.md)"
    )


def flat(config: DictConfig) -> dict[str, Any]:
    """Resolved values by dotted key: what the ranks of one job must agree on."""
    return dict(_leaves("", OmegaConf.to_container(config, resolve=True)))


def _leaves(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), value)
    else:
        yield prefix, node


# ---------------------------------------------------------------- mistakes


def _check_keys(config: DictConfig, root: DictConfig | None = None, prefix: str = "") -> None:
    """Refuse a key that is no field: Hydra's `+step=2` adds one, and nothing would read it."""
    kind: Any = OmegaConf.get_type(config)
    if not is_dataclass(kind):
        return  # the node of a model or of data: its class knows its own arguments
    names = [field.name for field in fields(kind)]
    for name in map(str, config):
        if name not in names:
            raise ConfigError(_no_such_key(f"{prefix}{name}", root or config))
        if not OmegaConf.is_missing(config, name) and OmegaConf.is_dict(config[name]):
            _check_keys(config[name], root or config, f"{prefix}{name}.")


_ELSEWHERE = {  # names in other trainers
    "lr": "optimizer.learning_rate (or optimizer.build.lr with optimizer=lion, custom, ...)",
    "num_ranks": "parallel.num_processes (-n 4)",
    "batch_size": "microbatch_size",
    "dtype": "precision",
}


def _no_such_key(key: str, root: Any) -> str:
    """That the config `root` has no such key, and the key that is called nearly so."""
    values: Any = OmegaConf.to_container(root, resolve=False)
    known = [each for each, _ in _leaves("", values) if not each.startswith("hydra.")] + [*values]
    known = [each for each in known if each != key]
    name = key.rpartition(".")[2]
    by_name = {each.rpartition(".")[2]: each for each in reversed(known)}
    if _ELSEWHERE.get(name, "").partition(" ")[0] in known:
        return f"{key}: there is no such key; did you mean {_ELSEWHERE[name]}?"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.8) or [
        by_name[each] for each in difflib.get_close_matches(name, by_name, n=1)
    ]
    meant = f"; did you mean {close[0]}?" if close else did_you_mean(key.partition(".")[0], map(str, values))
    return f"{key}: there is no such key{meant}"


def _not_overridden(key: str, missing: str, node: Any) -> str:
    """That a node has no such key; and how one adds the key, if the node's class takes it.

    missing: the first part of the key that is not there, which would be in `node`.
    """
    if is_dataclass(OmegaConf.get_type(node)):
        return _no_such_key(key, node._get_root())
    part, _, name = missing.rpartition(".")
    with suppress(
        AttributeError, ImportError, ValueError
    ):  # a class that is not there has an error of its own
        found = resolve_name(node.get("_target_") or "")
        known = names_of(found)
        if known is not None and name not in known:
            return not_taken(part, found, name, known)
    return f"{_no_such_key(key, node._get_root())} (+{key}=... adds it)"


def _no_such_choice(group: str, given: str, known: Sequence[str]) -> str:
    """That a group has no such choice, and the nearest one, or how one names a class of one's own."""
    text = f"{group}={given}: there is no such choice; known: {', '.join(known)}"
    near = did_you_mean(given, known)
    custom = config_folder() / group / "custom.yaml"
    if near or not custom.is_file():
        return text + near
    return f"{text}. {custom.read_text().partition(chr(10))[0].removeprefix('# ')}"


def has_key(command: str, key: str) -> bool:
    """Whether a command's config has this key or group, or a node that takes any key below it."""
    known = [each for each, _ in keys_of(_KINDS[command])]
    return any(key == each or each.startswith(f"{key}.") or key.startswith(f"{each}.") for each in known)


def key_called(name: str, command: str) -> str:
    """The key of a command that another program's option --NAME means; "" if there is none."""
    known = [key for key, _ in keys_of(_KINDS[command])]
    same = [each for each in known if name in (each, each.rpartition(".")[2])]
    return (same or [_ELSEWHERE.get(name, "").partition(" ")[0]])[0]


def keys_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """The dotted keys of a config class, those of the classes inside it last, with their fields."""
    hints = get_type_hints(kind)
    groups = [each for each in fields(kind) if is_dataclass(hints[each.name])]
    yield from ((prefix + each.name, each) for each in fields(kind) if each not in groups)
    for each in groups:
        yield from keys_of(hints[each.name], f"{prefix}{each.name}.")


def composition_error(error: BaseException) -> ConfigError | None:
    """An error of Hydra or OmegaConf as a ConfigError of one line; None for any other error."""
    is_group = str(error).startswith("Config group override must be")  # optimizer=null: a plain ValueError
    if not (is_group or isinstance(error, HydraException | OmegaConfBaseException)):
        return None
    text, cause = str(error).partition("Config search path")[0], error.__cause__
    unknown = re.match(r"Could not override '(\S+)'", text)
    if unknown and isinstance(cause, OmegaConfBaseException) and cause.parent_node is not None:
        return ConfigError(_not_overridden(unknown[1], str(cause.full_key), cause.parent_node))
    group, _, given = str(getattr(error, "missing_cfg_file", None)).partition("/")
    if isinstance(error, MissingConfigException) and error.options:
        return ConfigError(_no_such_choice(group, given, error.options))
    if isinstance(cause, ValidationError) and isinstance(cause.full_key, str):
        return ConfigError(f"{cause.full_key}: {in_python(str(cause))}")
    if cause is not None and str(cause) not in text:
        text += f"\n{cause}"
    lines = [line.strip() for line in text.splitlines()]
    # These three are OmegaConf's own terms, of no use to a user.
    useful = [
        line for line in lines if line and not line.startswith(("full_key", "object_type", "reference_type"))
    ]
    return ConfigError(" ".join(useful))


def read_run_config(path: Path) -> dict[str, Any]:
    """The config.yaml that a run has left in its folder, as plain values. Raises ConfigError."""
    try:
        # The run wrote resolved values: what looks like an interpolation is a text, or was put there later.
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # OmegaConf lets errors of YAML through
        raise ConfigError(f"{path} can't be read ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise ConfigError(f"{path} is not the config.yaml of a run: it has no model")
    return {str(name): value for name, value in found.items() if name not in _OF_HYDRA}


# ---------------------------------------------------------------- help


def help_text(name: str, description: str, given: Sequence[str] = ()) -> str:
    """What a command does, the groups that its config chooses from, and its keys with their help.

    given: arguments; for those that choose from a group (model=huggingface), the choice's keys come first.
    """
    text = (config_folder() / f"{name}.yaml").read_text()
    groups = re.findall(r"^  - (\w+): (\w+)(.*)$", text, flags=re.M)
    chosen = dict(each.split("=", 1) for each in given if "=" in each)
    of_choices = [part for group, *_ in groups for part in choice_help(group, given)]
    return "\n".join(
        [
            description.strip(),
            "",
            *of_choices,
            f"Choices (group=choice; these are {'yours and ' if of_choices else ''}the defaults):",
            "",
            *(
                f"{group}={chosen.get(group, choice)}{comment}\n    {', '.join(choices(group))}"
                for group, choice, comment in groups
            ),
            "",
            "Keys (key=value; these are the defaults):",
            "",
            *(_line(key, each) for key, each in keys_of(_KINDS[name]) if each.default != "???"),
            "",
            *(
                []
                if of_choices
                else [f"zbpp {name} --help model=NAME data=NAME shows the keys of these choices."]
            ),
            "--config-dir FOLDER adds choices of yours: FOLDER/model/mine.yaml for model=mine.",
            "--cfg job prints the resulting config; -m key=a,b runs the command with key=a, then with key=b.",
            "--hydra-help shows more options. They stand behind the keys.",
        ]
    )


def choices(group: str) -> list[str]:
    """The names of a group's files."""
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def _line(key: str, declared: Field[Any]) -> str:
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    shown = {"None": "null", "True": "true", "False": "false", "{}": ""}.get(str(default), default)
    return f"  {f'{key}={shown}':<34} {help_of(declared)}".rstrip()
