"""Configs as the command line makes them, in this process."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from zbpp import config as configs
from zbpp.commands import command_line

FOLDER = Path(__file__).parents[2] / "configs"
SLOW_LINKS = f"schedule.costs={Path(__file__).with_name('slow_links.json')}"
FREE_COPIES = f"schedule.costs={Path(__file__).with_name('free_copies.json')}"  # for memory.offload


def composed(*given, name="train"):
    """The checked config of a command with these arguments."""
    return all_forms(*given, name=name).tree


def all_forms(*given, name="train"):
    """The config as what runs a command takes it."""
    configs.register()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return configs.Composed.of(compose(name, overrides=command_line.arguments(list(given), name)))
