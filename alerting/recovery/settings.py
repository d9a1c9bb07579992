"""The guard's settings, checked before anything is built on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, get_args

from alerting.exceptions import ConfigError
from alerting.recovery.detector import Detector

RecoverBy = Literal["rollback", "restart"]


class GivenSettings(TypedDict, total=False):
    """Those of `Settings` that were given, by keyword."""

    save_every_steps: int
    save_every_seconds: float
    keep: int
    onset_margin_steps: int
    confirm_after_steps: int
    max_rollbacks: int
    check_every: int
    recover_by: RecoverBy
    detection_lag_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """As `TrainingGuard` documents them, which has a reason beside each default.

    Raises:
        ConfigError: one of them makes no sense.
    """

    save_every_steps: int = 500
    save_every_seconds: float = 900
    keep: int = 3
    onset_margin_steps: int = 10
    confirm_after_steps: int = 100
    max_rollbacks: int = 2
    check_every: int = 1
    recover_by: RecoverBy = "rollback"
    detection_lag_seconds: float = 60

    def __post_init__(self) -> None:
        require_whole("save_every_steps", self.save_every_steps, 1)
        require_seconds("save_every_seconds", self.save_every_seconds)
        require_whole("keep", self.keep, 2)
        require_whole("onset_margin_steps", self.onset_margin_steps, 0)
        require_whole("confirm_after_steps", self.confirm_after_steps, 1)
        require_whole("max_rollbacks", self.max_rollbacks, 0)
        require_whole("check_every", self.check_every, 1)
        require_seconds("detection_lag_seconds", self.detection_lag_seconds)
        if self.recover_by not in get_args(RecoverBy):
            choices = " or ".join(map(repr, get_args(RecoverBy)))
            raise ConfigError(f"recover_by is {self.recover_by!r}, must be {choices}")


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
