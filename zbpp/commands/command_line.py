"""What the commands with a config share: their arguments, their help, and one line for a mistake."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from zbpp.config import Composed, command, composition_error, config_folder
from zbpp.launch import (
    RankError,
    Refusal,
    discard_output,
    end_with_launcher,
    is_of_communication,
    refusals,
    wants_traceback,
    with_notes,
)
from zbpp.planning import canonical_name
from zbpp.schedule import PlanError

GRACE = 3.0  # s in which the rank that caused a failure can end the job first
_BROKEN_PIPE = 128 + signal.SIGPIPE  # the exit status that shells show for it
_NAMED_BY_TARGET = ("model", "data")  # groups whose node may be a class of the user's
# Hydra's flags that stand alone, and those that a value follows.
# Not --experimental-rerun: it unpickles a file.
_SWITCHES = ("--resolve", "-r", "--run", "-m", "--multirun", "-sc", "--shell-completion", "--hydra-help")
_WITH_VALUE = (
    "-c", "--cfg", "-p", "--package", "-i", "--info", "-cp", "--config-path", "-cn", "--config-name", "-cd",
    "--config-dir",
)  # fmt: skip
_NUM_RANKS = {"train": "parallel.num_processes", "bench": "num_ranks", "measure": "num_ranks"}


def run(
    main: Callable[[Composed], None], name: str, description: str | None, given: Sequence[str] | None = None
) -> None:
    """Call `main` with the config that configs/NAME.yaml and a command line make.

    given: the arguments; None: those of this process. Classes that they name are found in the current
    folder, too. A mistake ends the process with one line, on standard error; with ZBPP_TRACEBACK=1 in the
    environment, its traceback is shown instead.
    """
    end_with_launcher()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then lets its own errors through
    given = list(sys.argv[1:] if given is None else given)
    with _ended_in_order():
        if {"-h", "--help"} & set(given):
            print(help_text(name, str(description), given))
        else:
            sys.argv = [f"zbpp {name}", *arguments(given, name)]  # where Hydra looks
            sys.path.insert(0, os.getcwd())  # for classes of the user's, as `python -m zbpp` does
            command(main, name, guard=_ended_in_order)()


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """End the process with one line if a mistake is raised inside, in silence if nobody reads the output."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # `zbpp train ... | head`
        discard_output()
        sys.exit(_BROKEN_PIPE)
    except KeyboardInterrupt:
        if "RANK" in os.environ or wants_traceback():  # torchrun says what stopped its ranks
            raise
        print("stopped by SIGINT", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        mistake = composition_error(error) or error
        is_lost = is_of_communication(mistake)
        if wants_traceback() or not (is_lost or isinstance(mistake, (RankError, *refusals()))):
            raise
        _end_with(with_notes(mistake), is_of_all=not is_lost)


# ---------------------------------------------------------------- arguments


def arguments(given: Sequence[str], name: str = "train") -> list[str]:
    """Hydra's arguments for this process.

    `-n 4` becomes the command's key for the number of ranks. If the model or the data is named by `_target_`
    alone, the keys of the default choice are dropped. If a Hugging Face model comes from a folder, the
    default config is dropped, and the folder's vocabulary size is added. Schedules may be spelled as in
    torch, and values keep their spaces. Of torchrun's ranks only rank 0 logs. Raises Refusal for a sweep (-m)
    inside torchrun: each rank would sweep by itself.
    """
    overrides, flags = _sorted_apart(_with_num_ranks(list(given), name))
    for group in _NAMED_BY_TARGET:
        overrides = _without_the_default(group, overrides)
    overrides = _without_the_default_config(overrides)
    overrides = [_with_its_spaces(_in_our_spelling(override)) for override in overrides]
    for override in overrides:
        _check_choice(override, flags)
    if "RANK" in os.environ:
        if {"-m", "--multirun"} & set(flags):
            raise Refusal("-m sweeps inside one torchrun job can't work: call torchrun once per setting")
        if os.environ["RANK"] != "0":
            overrides += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    return [*overrides, *flags]


def _sorted_apart(given: list[str]) -> tuple[list[str], list[str]]:
    """(overrides, flags with their values): Hydra refuses overrides on both sides of a flag.

    Raises Refusal for a flag that does not exist, for which Hydra prints 20 lines of its own flags.
    """
    overrides, flags, rest = [], [], list(given)
    while rest:
        argument = rest.pop(0)
        flag, _, value = argument.partition("=")
        if not re.match(r"--?[a-z]", flag):
            overrides.append(argument)
            continue
        if flag not in (*_SWITCHES, *_WITH_VALUE):
            raise Refusal(
                f"there is no option {flag}: write values as key=value, such as steps=3; see --help"
            )
        flags.append(argument)
        if flag in _WITH_VALUE and not value and rest and "=" not in rest[0]:  # --info may stand alone
            flags.append(rest.pop(0))
    return overrides, flags


def _with_num_ranks(given: list[str], name: str) -> list[str]:
    """`-n 4` or `-n4` as the override that it is short for."""
    flags = [place for place, argument in enumerate(given) if re.fullmatch(r"-n\S*", argument)]
    if not flags or name not in _NUM_RANKS:
        return given
    place = flags[0]
    value, rest = given[place].removeprefix("-n"), given[place + 1 :]
    if not value and rest:
        value, *rest = rest
    if any(each.startswith(f"{_NUM_RANKS[name]}=") for each in given):
        raise Refusal(f"-n {value} is short for {_NUM_RANKS[name]}={value}: leave one of the two out")
    if not value.isdecimal():
        raise Refusal(f"-n {value}: write how many ranks to start, such as -n 4")
    return [*given[:place], f"{_NUM_RANKS[name]}={value}", *rest]


def _without_the_default(group: str, given: list[str]) -> list[str]:
    """`model._target_=my_file.Tower` replaces the group's default choice, together with its keys.

    The keys of such a node are not known beforehand: any may be given.
    """
    chosen = [argument.partition("=")[2] for argument in given if argument.startswith(f"{group}=")]
    has_target = any(re.match(rf"\+{{0,2}}{group}\._target_=", argument) for argument in given)
    if chosen != ["custom"] and (chosen or not has_target):
        return given
    opened = [f"++{argument}" if argument.startswith(f"{group}.") else argument for argument in given]
    return opened if chosen else [*opened, f"{group}=custom"]


def _without_the_default_config(given: list[str]) -> list[str]:
    """`model.path=FOLDER` replaces the config that model=huggingface has: the folder has its own."""
    paths = [argument.partition("=")[2] for argument in given if re.match(r"\+{0,2}model\.path=", argument)]
    has_config = any(re.match(r"~?\+{0,2}model\.config\b", argument) for argument in given)
    is_ours = "model=huggingface" in given
    if not is_ours or paths in ([], ["null"]) or has_config:
        return given
    has_size = any(re.match(r"\+{0,2}model\.vocab_size=", argument) for argument in given)
    return [*given, "~model.config", *([] if has_size else _vocab_size(Path(paths[-1])))]


def _vocab_size(folder: Path) -> list[str]:
    """The size of the vocabulary in a model's folder; nothing if the folder does not say it."""
    try:
        config = json.loads((folder / "config.json").read_text())
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []  # what is wrong with the folder is said where it is loaded
    return [f"model.vocab_size={size}"] if isinstance(size, int) else []


def _with_its_spaces(argument: str) -> str:
    """`key="The "`, typed in a shell, arrives without quotes, and Hydra would drop the space at the end."""
    key, equals, value = argument.partition("=")
    is_plain = bool(equals) and value != value.strip() and re.fullmatch(r"[\w .,:;!?-]*", value)
    return f"{key}='{value}'" if is_plain else argument


def _in_our_spelling(argument: str) -> str:
    """`schedule=ZB_H1` and `schedule=ZBVZeroBubble` name the file that is meant; other arguments stay."""
    if not argument.startswith("schedule="):
        return argument
    return "schedule=" + ",".join(map(_schedule_file, argument.partition("=")[2].split(",")))


def _schedule_file(name: str) -> str:
    if name.lower() in _choices("schedule"):
        return name.lower()
    try:
        return canonical_name(name)
    except PlanError:
        return name  # a file of the user's; if there is none, Hydra says what there is


_NO_FILE_NAME = r"(?i:null|true|false|)|[-+]?[\d.]+(e[-+]?\d+)?"


def _check_choice(argument: str, flags: Sequence[str]) -> None:
    """Refuse `model=my_file.MyModel`, a class, and `optimizer=null` and `optimizer=3`.

    No file is called null or 3, and Hydra ends in a traceback.
    """
    group, _, choice = argument.partition("=")
    is_class = re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", choice) is not None
    if group in _NAMED_BY_TARGET and is_class and choice not in _choices(group, flags):
        raise Refusal(f"{argument}: there is no such choice; a class is named by {group}._target_={choice}")
    if group.isidentifier() and (config_folder() / group).is_dir() and re.fullmatch(_NO_FILE_NAME, choice):
        raise Refusal(f"{argument}: choose one of {', '.join(_choices(group, flags))}")


# ---------------------------------------------------------------- help


def help_text(name: str, description: str, given: Sequence[str] = ()) -> str:
    """What a command does, the groups that its config chooses from, and its values with their comments."""
    text = (config_folder() / f"{name}.yaml").read_text()
    groups = re.findall(r"^  - (\w+): (\w+)(.*)$", text, flags=re.M)
    values = text.partition("- _self_\n")[2].partition("\nhydra:")[0].strip()
    return "\n".join(
        [
            description.strip(),
            "",
            "Choices (group=choice; these are the defaults):",
            "",
            *(
                f"{group}={choice}{comment}\n    {', '.join(_choices(group, given))}"
                for group, choice, comment in groups
            ),
            "",
            "Values (key=value; a value inside a choice is group.key=value):",
            "",
            values,
            "",
            "--config-dir FOLDER adds choices of yours: FOLDER/model/mine.yaml for model=mine.",
            "--cfg job prints the resulting config; -m key=a,b runs the command with key=a, then with key=b.",
            "--hydra-help shows more options.",
        ]
    )


def _choices(group: str, given: Sequence[str] = ()) -> list[str]:
    """The choices of a group: ours, and those in the folder that --config-dir names."""
    folders = [config_folder(), *map(Path, _config_dirs(given))]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _config_dirs(given: Sequence[str]) -> Iterator[str]:
    for argument, following in pairwise([*given, ""]):
        if argument in ("--config-dir", "-cd"):
            yield following
        elif argument.startswith("--config-dir="):
            yield argument.partition("=")[2]


# ---------------------------------------------------------------- mistakes


def _end_with(mistake: str, *, is_of_all: bool) -> None:
    """Print the mistake, once for all ranks, and end the process.

    torchrun prints a traceback of its own, about 35 lines, that includes the text which rank 0 leaves in its
    error file. is_of_all: rank 0 may make the same mistake: the other ranks wait for GRACE seconds. If rank 0
    refuses, too, torchrun ends them in that time, in silence; else each prints its own line.
    """
    if os.environ.get("RANK", "0") != "0" and is_of_all:
        # torchrun sends SIGTERM once rank 0 has ended.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(GRACE)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        message = {"message": f"error: {mistake}", "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": message}, file)
    sys.exit(f"error: {mistake}")
