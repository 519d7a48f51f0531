"""What the Hydra scripts share around their `main`: arguments, help, and one line for a mistake."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zbpp.config import composition_error, config_folder, entry
from zbpp.launch import RankError, Refusal, refusals, wants_traceback
from zbpp.planning import canonical_name
from zbpp.schedule import PlanError

GRACE = 3.0  # s in which rank 0 can bring the job down first
_NAMED_BY_TARGET = ("model", "data")  # groups whose node may be a class of the user's


def run(main: Callable[[Any], None], name: str, description: str) -> None:
    """Call a script's `main` with the config that the command line makes of configs/NAME.yaml.

    Classes are found in the current folder, too. A mistake ends the process with one line, on standard
    error; with ZBPP_TRACEBACK=1 in the environment, its traceback is shown instead.
    """
    sys.path.insert(0, os.getcwd())
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then lets its own errors through
    with _one_line():
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(help_text(name, description))
        else:
            sys.argv[1:] = arguments(sys.argv[1:])
            # Inside Hydra as well: it would announce the error in a line of its own.
            entry(_one_line()(main), name)()


@contextmanager
def _one_line() -> Iterator[None]:
    """End the process with one line where a mistake of the user is raised inside."""
    try:
        yield
    except Exception as error:
        told = composition_error(error) or error
        if wants_traceback() or not isinstance(told, (RankError, *refusals())):
            raise
        _refuse(str(told))


def arguments(given: list[str]) -> list[str]:
    """Hydra's arguments for this process.

    A model or data named by `_target_` alone has no keys but its own. Schedules go by any of their spellings.
    Of torchrun's ranks only rank 0 logs. Raises Refusal for a sweep (-m) inside torchrun, whose
    ranks would sweep each by itself.
    """
    for group in _NAMED_BY_TARGET:
        given = _without_the_default(group, given)
    given = [_in_our_spelling(each) for each in given]
    for each in given:
        _check_choice(each)
    if "RANK" not in os.environ:
        return given
    if {"-m", "--multirun"} & set(given):
        raise Refusal("-m sweeps inside one torchrun job can't work: call torchrun once per setting")
    return (
        given if os.environ["RANK"] == "0" else [*given, "hydra/job_logging=none", "hydra/hydra_logging=none"]
    )


def _without_the_default(group: str, given: list[str]) -> list[str]:
    """`model._target_=my_file.Tower` replaces the default choice of the group with all its keys.

    The keys of such a node are not known beforehand: any may be given.
    """
    chosen = [each.partition("=")[2] for each in given if each.startswith(f"{group}=")]
    targeted = any(re.match(rf"\+{{0,2}}{group}\._target_=", each) for each in given)
    if chosen != ["custom"] and (chosen or not targeted):
        return given
    opened = [f"++{each}" if each.startswith(f"{group}.") else each for each in given]
    return opened if chosen else [*opened, f"{group}=custom"]


def _in_our_spelling(argument: str) -> str:
    """`schedule=ZB_H1`, `schedule=ZBVZeroBubble`: as the file is called; others as they are."""
    if not argument.startswith("schedule="):
        return argument
    return "schedule=" + ",".join(map(_file_of, argument.partition("=")[2].split(",")))


def _check_choice(argument: str) -> None:
    """Refuse `optimizer=null` and `optimizer=3`, which no file is called and Hydra fails on."""
    group, _, choice = argument.partition("=")
    if group.isidentifier() and (config_folder() / group).is_dir() and re.fullmatch(_NO_NAME, choice):
        raise Refusal(f"{argument}: choose one of {', '.join(_choices(group))}")


_NO_NAME = r"(?i:null|true|false|)|[-+]?[\d.]+(e[-+]?\d+)?"


def _file_of(name: str) -> str:
    if name.lower() in _choices("schedule"):
        return name.lower()
    try:
        return canonical_name(name)
    except PlanError:
        return name  # a file of the user's, or Hydra says what there is


def help_text(name: str, description: str) -> str:
    """What a script does, the groups that its config chooses from, and its values with their comments."""
    text = (config_folder() / f"{name}.yaml").read_text()
    groups = re.findall(r"^  - (\w+): (\w+)(.*)$", text, flags=re.M)
    values = text.partition("- _self_\n")[2].partition("\nhydra:")[0].strip()
    lines = [
        f"{group}={choice}{comment}\n    {', '.join(_choices(group))}" for group, choice, comment in groups
    ]
    return "\n".join(
        [
            description.strip(),
            "",
            "Choices (group=choice; these are the defaults):",
            "",
            *lines,
            "",
            "Values (key=value; those of a choice, too: group.key=value):",
            "",
            values,
            "",
            "--cfg job prints the resulting config, -m runs key=a,b for a and for b; see --hydra-help.",
        ]
    )


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def _refuse(text: str) -> None:
    """Say it, once for all ranks, and end the process.

    torchrun shows its own traceback in any case, about 35 lines, and in it what rank 0 left as its error
    file. Other ranks wait: where rank 0 refuses too, they end in silence, else with a line of their own.
    """
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # torchrun's, once rank 0 has ended
        time.sleep(GRACE)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        message = {"message": f"error: {text}", "extraInfo": {"timestamp": str(int(time.time()))}}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": message}, file)
    sys.exit(f"error: {text}")
