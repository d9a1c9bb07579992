"""The guard's settings, checked before anything is built on them."""

from __future__ import annotations

from pathlib import Path

from alerting.exceptions import ConfigError
from alerting.recovery.detector import Detector


def require_whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number, or too small.

    Raises:
        ConfigError: names the setting.
    """
    # bool is an int to isinstance.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, must be a whole number")
    if value < least:
        raise ConfigError(f"{name} is {value}, must be at least {least}")


def require_seconds(name: str, value: object) -> None:
    """Refuse what is no number, or negative; infinity stands for never.

    Raises:
        ConfigError: names the setting.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, must be a number")
    # Asked so that nan fails.
    if not value >= 0:
        raise ConfigError(f"{name} is {value}, must be at least 0")


def run_name(run: str | None, exporter: Detector | None, folder: Path) -> str:
    """The run's name: as given, else the exporter's, else the folder's.

    Raises:
        ConfigError: two names are given; alerts carry the exporter's, and no run of that name
            would be registered.
    """
    if exporter is None:
        return run or folder.resolve().name
    if run and run != exporter.run:
        raise ConfigError(
            f"run is {run!r} and the exporter's is {exporter.run!r}: give the run one name, to the "
            "exporter"
        )
    return exporter.run
