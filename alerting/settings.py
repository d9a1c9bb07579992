"""The receiver's settings: read from a YAML file and the command line, checked once, then frozen.

Each error is one sentence that names the key and where it was given. The environment is not read
here; see `alerting.cli`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alerting.exceptions import ConfigError
from alerting.given import Given, check_keys, is_loopback, read_path, read_secret
from alerting.mode import MODES, Mode
from alerting.targets import Target, read_targets
from alerting.text import is_link

DEFAULT_LISTEN = "127.0.0.1:9464"
"""Loopback, and next to the trainers' 9460 and following."""
DEFAULT_ALERTS = (
    "ActLayerAboveBaseline",
    "ActLayerNonFinite",
    "ActLayerHeadroomLow",
    "ActLossNonFinite",
    "ActRunaway",
    "ActGradientRunaway",
)
"""The shipped rules that carry an `action` label."""
DEFAULT_BACKUP_INTERVAL_SECONDS = 900.0
"""15 minutes: a backup of a large model takes minutes and terabytes; alerts repeat every 5."""
DEFAULT_REPEAT_INTERVAL_SECONDS = 3600.0
"""The 60 minutes of alertmanager.yml."""

DEFAULT_WATCHDOG_SECONDS = 300.0
"""Five times the minute between two of alertmanager.yml's: three may be lost, or fall into a
restart of Alertmanager or Prometheus, before anybody is told."""

DEFAULT_REQUEST_DEADLINE_SECONDS = 600.0
"""A guard looks between two steps and answers when all is done. Ten minutes are enough for a step
and for loading a large checkpoint, and what ActTrainerStalled takes for a trainer that hangs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the receiver was told.

    Attributes:
        host: the address to listen on.
        port: the port; 0 takes a free one.
        runs: the folder that holds the run folders.
        database: the SQLite file.
        token: the bearer token that Alertmanager must send; never shown.
        alerts: names of the alerts that may ask for an action.
        backup_interval_seconds: least time between two backups of one run.
        notify: who gets messages.
        dashboard_url: linked in messages; `{run}` in it stands for the run. None: no link.
        repeat_interval_seconds: Alertmanager's `repeat_interval` for people.
        watchdog_seconds: how long the watchdog may stay away once it has come.
        request_deadline_seconds: how long a request may be open before people are told.
        mode: whether trainers are asked, unless it was switched since (see `alerting.mode`).
        escalate: program and arguments of a command that is run then; empty for none.
        shared: the folder by which several receivers agree who sends a message; None: there is one.
    """

    host: str
    port: int
    runs: Path
    database: Path
    token: str = field(repr=False)
    alerts: frozenset[str]
    backup_interval_seconds: float
    notify: tuple[Target, ...] = ()
    dashboard_url: str | None = None
    repeat_interval_seconds: float = DEFAULT_REPEAT_INTERVAL_SECONDS
    watchdog_seconds: float = DEFAULT_WATCHDOG_SECONDS
    request_deadline_seconds: float = DEFAULT_REQUEST_DEADLINE_SECONDS
    mode: Mode = "act"
    escalate: tuple[str, ...] = ()
    shared: Path | None = None


KEYS = (
    "listen",
    "allow_remote",
    "runs",
    "database",
    "token_file",
    "alerts",
    "backup_interval_seconds",
    "notify",
    "dashboard_url",
    "repeat_interval_seconds",
    "watchdog_seconds",
    "request_deadline_seconds",
    "escalate",
    "mode",
    "shared",
)


def load_settings(config: Path | None, options: Mapping[str, Any]) -> Settings:
    """Read and check the settings.

    Args:
        config: the YAML file (see receiver.yml), or None to go by `options` and defaults.
        options: keys of the file given on the command line; they win. None is "not given".

    Raises:
        ConfigError: a setting is missing, unknown or wrong.
    """
    given = _read(config, options)

    def require(key: str) -> Given:
        return _require(given, key, config)

    def default(key: str, value: Any) -> Given:
        return given.get(key, Given(value, f"the default of {key}", Path()))

    allow_remote = _boolean(default("allow_remote", False))
    host, port = _address(default("listen", DEFAULT_LISTEN), allow_remote=allow_remote)
    runs = read_path(require("runs"))
    if runs.exists() and not runs.is_dir():
        raise given["runs"].error(f"{runs} is not a folder.")
    return Settings(
        host=host,
        port=port,
        runs=runs,
        database=read_path(require("database")),
        token=read_secret(require("token_file")),
        alerts=_names(default("alerts", list(DEFAULT_ALERTS))),
        backup_interval_seconds=_seconds(
            default("backup_interval_seconds", DEFAULT_BACKUP_INTERVAL_SECONDS)
        ),
        notify=read_targets(default("notify", [])),
        dashboard_url=_link(given["dashboard_url"]) if "dashboard_url" in given else None,
        repeat_interval_seconds=_seconds(
            default("repeat_interval_seconds", DEFAULT_REPEAT_INTERVAL_SECONDS)
        ),
        watchdog_seconds=_positive(default("watchdog_seconds", DEFAULT_WATCHDOG_SECONDS)),
        request_deadline_seconds=_positive(
            default("request_deadline_seconds", DEFAULT_REQUEST_DEADLINE_SECONDS)
        ),
        mode=_mode(default("mode", "act")),
        escalate=_arguments(default("escalate", [])),
        shared=read_path(given["shared"]) if "shared" in given else None,
    )


def load_targets(config: Path) -> tuple[Target, ...]:
    """Read and check only who gets messages.

    Args:
        config: the YAML file.

    Raises:
        ConfigError: as `load_settings`, or nobody gets any.
    """
    if not (targets := load_notify(config)):
        raise ConfigError(f"{config}: notify: lists nobody to send to.")
    return targets


def load_notify(config: Path) -> tuple[Target, ...]:
    """The same where nobody may be listed."""
    given = _read_file(config)
    return read_targets(given["notify"]) if "notify" in given else ()


def load_places(config: Path | None, options: Mapping[str, Any]) -> tuple[Path, Path]:
    """Read and check only where the run folders and the database are, for who has no secret.

    Args:
        config: as for `load_settings`.
        options: likewise.

    Returns:
        The folder that holds the run folders, and the database.

    Raises:
        ConfigError: as `load_settings`.
    """
    given = _read(config, options)
    return read_path(_require(given, "runs", config)), read_path(
        _require(given, "database", config)
    )


def load_mode(config: Path | None, options: Mapping[str, Any]) -> tuple[Path, Mode]:
    """Read and check only the database and the mode, as `load_places` does.

    Raises:
        ConfigError: as `load_settings`.
    """
    given = _read(config, options)
    mode = given.get("mode", Given("act", "the default of mode", Path()))
    return read_path(_require(given, "database", config)), _mode(mode)


def _read(config: Path | None, options: Mapping[str, Any]) -> dict[str, Given]:
    given = _read_file(config) if config is not None else {}
    for key, value in options.items():
        if value is not None:
            given[key] = Given(value, f"--{key.replace('_', '-')}", Path())
    return given


def _require(given: Mapping[str, Given], key: str, config: Path | None) -> Given:
    if key not in given:
        option = f"--{key.replace('_', '-')}"
        place = f"{config} nor as" if config is not None else "a --config file nor as"
        raise ConfigError(f"{key} is set neither in {place} {option}.")
    return given[key]


def _read_file(path: Path) -> dict[str, Given]:
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"The config {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "mangled"
        raise ConfigError(f"The config {path} is not valid YAML: {problem}{line}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"The config {path} must hold keys and values, such as `runs: ../runs`.")
    check_keys(content, KEYS, str(path))
    base = path.absolute().parent
    # A key with nothing after it counts as left out, as its author would expect.
    return {
        key: Given(value, f"{path}: {key}", base)
        for key, value in content.items()
        if value is not None
    }


def _boolean(given: Given) -> bool:
    if not isinstance(given.value, bool):
        raise given.error(f"must be true or false, not {given.value!r}.")
    return given.value


def _names(given: Given) -> frozenset[str]:
    value = given.value
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise given.error(f"must be a list of alert names, not {value!r}.")
    if not value:
        raise given.error("is empty, so no alert could ever ask for anything.")
    return frozenset(value)


def _seconds(given: Given) -> float:
    value = given.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise given.error(f"must be a number of seconds, not {value!r}.")
    if not math.isfinite(value) or value < 0:
        raise given.error(f"must be 0 or more seconds, not {value!r}.")
    return float(value)


def _mode(given: Given) -> Mode:
    for mode in MODES:
        if given.value == mode:
            return mode
    raise given.error(f"must be one of {', '.join(MODES)}, not {given.value!r}.")


def _arguments(given: Given) -> tuple[str, ...]:
    value = given.value
    # A line for a shell is refused: there is none, so it would be the name of a program.
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise given.error(f"must be a list of a program and its arguments, not {value!r}.")
    if value and not value[0]:
        raise given.error("names no program.")
    return tuple(value)


def _positive(given: Given) -> float:
    if (seconds := _seconds(given)) == 0:
        raise given.error("must be more than 0 seconds.")
    return seconds


def _address(given: Given, *, allow_remote: bool) -> tuple[str, int]:
    value = given.value
    host, colon, port_text = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not (colon and host and port_text.isascii() and port_text.isdigit()):
        raise given.error(f"must be HOST:PORT, such as {DEFAULT_LISTEN}, not {value!r}.")
    port = int(port_text)
    if port > 65535:
        raise given.error(f"there is no port {port}; ports go from 0 (any free one) to 65535.")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise given.error(f"an IPv6 address needs brackets, such as [::1]:9464, not {value!r}.")
    if not allow_remote and not is_loopback(host):
        raise given.error(
            f"{host} can be reached from other machines, and the token would cross the network "
            "unencrypted. Listen on 127.0.0.1 behind a proxy that speaks TLS, or set "
            "`allow_remote: true` in the config where the network itself is trusted."
        )
    return host, port


def _link(given: Given) -> str:
    value = given.value
    if not isinstance(value, str) or not is_link(value.replace("{run}", "run")):
        raise given.error(
            "must be an address such as https://grafana.example.com/d/act?var-run={run}, "
            f"not {value!r}."
        )
    return value
