"""What the commands with a config share: their arguments, their help, and one line for a mistake."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile

from zbpp.config import Composed, ConfigError, command, composition_error, has_key, help_text, key_called
from zbpp.error_text import did_you_mean
from zbpp.launch import (
    RankError,
    discard_output,
    end_with_launcher,
    failures,
    is_of_communication,
    mistakes,
    with_notes,
)
from zbpp.tracebacks import hide_own_frames, wants_traceback

GRACE = 3.0  # s in which the rank that caused a failure can end the job first
_BROKEN_PIPE = 128 + signal.SIGPIPE  # the exit status that shells show for it
_NAMED_BY_TARGET = ("model", "data")  # groups whose node may be a class of the user's
# Hydra's, see --hydra-help: flags, and flags that a value follows.
_ALONE = {
    "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc",
}  # fmt: skip
_WITH_VALUE = {
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
    "--experimental-rerun", "--info", "-i",
}  # fmt: skip
_FLAGS = _ALONE | _WITH_VALUE
_NUM_RANKS = {"train": "parallel.num_processes", "bench": "num_ranks", "measure": "num_ranks"}
_NUM_RANKS |= {"explain": "parallel.num_processes"}  # which zbpp explain leaves out
# Keys of `zbpp train`, and what the other commands call them.
_CALLED = {"parallel.num_processes": "num_ranks", "parallel.device": "device", "parallel.timeout": "timeout"}


def run(
    main: Callable[[Composed], None], name: str, description: str | None, given: Sequence[str] | None = None
) -> None:
    """Call `main` with the config that configs/NAME.yaml and a command line make.

    given: the arguments; None: those of this process. Classes that they name are found in the current
    folder, too. A mistake in the command line or in the config ends the process with status 2, a failure of
    the run with status 1, and one line on standard error; with ZBPP_TRACEBACK=1 in the environment, the
    traceback is shown instead.
    """
    end_with_launcher()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then lets its own errors through
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # "generated new fontManager"
    given = list(sys.argv[1:] if given is None else given)
    with _ended_in_order():
        if {"-h", "--help"} & set(given):
            sys.path.insert(0, os.getcwd())  # for classes of the user's
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
        told = composition_error(error) or error
        is_mistake, is_lost = isinstance(told, mistakes()), is_of_communication(told)
        if wants_traceback():
            raise
        if not (is_mistake or is_lost or isinstance(told, (RankError, *failures()))):
            hide_own_frames(error)
            # Raised, it would get Hydra's frames, too.
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)
        _end_with(with_notes(told), status=2 if is_mistake else 1, is_of_all=not is_lost)


# ---------------------------------------------------------------- arguments


def arguments(given: Sequence[str], name: str = "train") -> list[str]:
    """Hydra's arguments for this process.

    `-n 4` becomes the command's key for the number of ranks. A run's folder stands for all keys that the run
    had. Keys of `zbpp train` that another command does not need are dropped, and a line names them. If the
    model or the data is named by `_target_` alone, the keys of the default choice are dropped. Of torchrun's
    ranks only rank 0 logs.

    Raises ConfigError for an unknown option, for a key without its value, and for a sweep (-m) inside
    torchrun: each rank would sweep.
    """
    found = _with_num_ranks(_with_keys_of_run(list(given), name), name)
    found = found if name == "train" else _without_unneeded(found, name)
    for place, each in enumerate(found):
        if each.startswith("-") and each.partition("=")[0] not in _FLAGS:
            raise ConfigError(f"{each} is no option{_instead(each, found[place + 1 :], name)}")
    _refuse_spaces(found)
    for group in _NAMED_BY_TARGET:
        found = _without_the_default(group, found)
    if "RANK" in os.environ:
        if {"-m", "--multirun"} & set(found):
            raise ConfigError("-m sweeps inside one torchrun job can't work: call torchrun once per setting")
        if os.environ["RANK"] != "0":
            found = ["hydra/job_logging=none", "hydra/hydra_logging=none", *found]
    # Hydra takes overrides on one side of its flags only.
    overrides = [each for each in found if re.match(r"~|[^-].*=", each)]
    return [*overrides, *(each for each in found if each not in overrides)]


def _instead(option: str, following: Sequence[str], command: str) -> str:
    """What to write for an unknown option: the key of this name, or the nearest option."""
    name, is_whole, value = option.lstrip("-").replace("-", "_").partition("=")
    key = key_called(name, command)
    if key:
        given = value if is_whole else next(iter(following), "...")
        return f": write {key}={'...' if given.startswith('-') else given}"
    return did_you_mean(option, ("-n", *_FLAGS)) or f": zbpp {command} --help shows the options and keys"


def _refuse_spaces(given: Sequence[str]) -> None:
    """Raise ConfigError for `steps = 10` and `steps 10`."""
    for place, each in enumerate(given):
        if not _is_bare(each) or (place and given[place - 1] in _WITH_VALUE):
            continue
        words = " ".join(takewhile(_is_bare, given[place:]))
        key, _, rest = re.sub(r"\s*=\s*|\s+", "=", words).partition("=")
        value = rest.partition("=")[0]
        if value or not each.endswith("="):  # `key=` alone is an empty text
            raise ConfigError(f"{words}: write {key}={value or '...'}, without spaces")


def _is_bare(argument: str) -> bool:
    """Whether it is a key without its value, or a value without its key, or a `=` between the two."""
    return not argument.startswith(("-", "~")) and "=" not in argument.strip("=")


def _with_num_ranks(given: list[str], name: str) -> list[str]:
    """`-n 4` or `-n4` as the override that it is short for."""
    flags = [place for place, argument in enumerate(given) if re.fullmatch(r"-n\d*", argument)]
    if not flags or name not in _NUM_RANKS:
        return given
    key = _NUM_RANKS[name]
    if any(argument.startswith(f"{key}=") for argument in given):
        raise ConfigError(f"-n is short for {key}: write one of the two")
    place = flags[0]
    value, rest = given[place].removeprefix("-n"), given[place + 1 :]
    if not value and rest:
        value, *rest = rest
    if not value.isdecimal():
        raise ConfigError(f"-n {value}: write how many ranks to start, such as -n 4")
    return [f"{key}={value}", *given[:place], *rest]


def _with_keys_of_run(given: list[str], name: str) -> list[str]:
    """The arguments with a run's folder replaced by those that compose its config again.

    Without another run_dir, `zbpp train FOLDER` goes on with the run.
    """
    folders = [each for each in given if _is_bare(each) and os.path.isfile(os.path.join(each, "config.yaml"))]
    if name != "train" or len(folders) != 1:
        return given
    (folder,) = folders
    place = given.index(folder)
    if place and given[place - 1] in _WITH_VALUE:
        return given
    rest = [*given[:place], *given[place + 1 :]]
    if not any(each.startswith("run_dir=") for each in rest):
        rest = [f"run_dir={folder}", "resume=auto", *rest]
    return [*rest, "--config-dir", folder, "--config-name", "config"]


def _without_unneeded(given: list[str], name: str) -> list[str]:
    """The arguments of a command that is not `zbpp train`, without the keys that only `zbpp train` has."""
    kept, dropped = [], []
    for argument in given:
        found = re.fullmatch(r"(\+{0,2})([\w.]+)=(.*)", argument, flags=re.S)
        sign, key, value = found.groups() if found else ("", "", "")
        key = _CALLED.get(key, key) if has_key(name, _CALLED.get(key, key)) else key
        if key == "precision" and value == "mixed_bfloat16":
            print("precision=bfloat16, in which mixed_bfloat16 computes: no float32 masters", file=sys.stderr)
            value = "bfloat16"
        if found and not has_key(name, key) and has_key("train", key):
            dropped.append(key)
        else:
            kept.append(f"{sign}{key}={value}" if found else argument)
    if dropped:
        print(f"zbpp {name} does not need, and leaves out: {', '.join(dropped)}", file=sys.stderr)
    return kept


def _without_the_default(group: str, given: list[str]) -> list[str]:
    """`model._target_=my_file.Tower` replaces the group's default choice, together with its keys.

    The keys of such a node are not known beforehand: any may be given.
    """
    chosen = [argument.partition("=")[2] for argument in given if argument.startswith(f"{group}=")]
    has_target = any(argument.startswith(f"{group}._target_=") for argument in given)
    if chosen != ["custom"] and (chosen or not has_target):
        return given
    opened = [f"++{argument}" if argument.startswith(f"{group}.") else argument for argument in given]
    return opened if chosen else [f"{group}=custom", *opened]


# ---------------------------------------------------------------- mistakes


def _end_with(text: str, *, status: int, is_of_all: bool) -> None:
    """Print the text, once for all ranks, and end the process.

    torchrun prints a traceback of its own, about 35 lines, that includes the text which rank 0 leaves in its
    error file. is_of_all: rank 0 may end for the same reason: the other ranks wait for GRACE seconds. If rank
    0 ends, too, torchrun ends them in that time, in silence; else each prints its own line.
    """
    if os.environ.get("RANK", "0") != "0" and is_of_all:
        # torchrun sends SIGTERM once rank 0 has ended.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(GRACE)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        message = {"message": f"error: {text}", "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": message}, file)
    print(f"error: {text}", file=sys.stderr)
    sys.exit(status)
