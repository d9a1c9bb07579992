"""The receiver's settings: read from a YAML file and the command line, checked once, then frozen.

Each error is one sentence that names the key and where it was given. The environment is not read
here; see `alerting.cli`.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from alerting.exceptions import ConfigError
from alerting.message import is_link
from alerting.notifiers import KINDS, Notifier
from alerting.phrases import LANGUAGES, Language

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
MAX_TOKEN_BYTES = 4096
"""A token file is one line; a larger one is the wrong file."""
_TARGET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""It is a metric's label value and a word on the command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A group of people who are told.

    Attributes:
        name: unique among the targets.
        kind: one of `notifiers.KINDS`.
        language: of its messages.
        notifier: sends them; alone holds the address and the secret.
    """

    name: str
    kind: str
    language: Language
    notifier: Notifier = field(repr=False)


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


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was given; `where` opens each message, `base` is what paths are relative to."""

    value: Any
    where: str
    base: Path

    def error(self, sentence: str) -> ConfigError:
        return ConfigError(f"{self.where}: {sentence}")


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
)
TARGET_KEYS = ("kind", "name", "url_file", "secret_file", "language")


def load_settings(config: Path | None, options: Mapping[str, Any]) -> Settings:
    """Read and check the settings.

    Args:
        config: the YAML file (see receiver.yml), or None to go by `options` and defaults.
        options: keys of the file given on the command line; they win. None is "not given".

    Raises:
        ConfigError: a setting is missing, unknown or wrong.
    """
    given = _read_file(config) if config is not None else {}
    for key, value in options.items():
        if value is not None:
            given[key] = _Given(value, f"--{key.replace('_', '-')}", Path())

    def require(key: str) -> _Given:
        if key not in given:
            option = f"--{key.replace('_', '-')}"
            place = f"{config} nor as" if config is not None else "a --config file nor as"
            raise ConfigError(f"{key} is set neither in {place} {option}.")
        return given[key]

    def default(key: str, value: Any) -> _Given:
        return given.get(key, _Given(value, f"the default of {key}", Path()))

    allow_remote = _boolean(default("allow_remote", False))
    host, port = _address(default("listen", DEFAULT_LISTEN), allow_remote=allow_remote)
    runs = _path(require("runs"))
    if runs.exists() and not runs.is_dir():
        raise given["runs"].error(f"{runs} is not a folder.")
    return Settings(
        host=host,
        port=port,
        runs=runs,
        database=_path(require("database")),
        token=_token(require("token_file")),
        alerts=_names(default("alerts", list(DEFAULT_ALERTS))),
        backup_interval_seconds=_seconds(
            default("backup_interval_seconds", DEFAULT_BACKUP_INTERVAL_SECONDS)
        ),
        notify=_targets(default("notify", [])),
        dashboard_url=_link(given["dashboard_url"]) if "dashboard_url" in given else None,
        repeat_interval_seconds=_seconds(
            default("repeat_interval_seconds", DEFAULT_REPEAT_INTERVAL_SECONDS)
        ),
    )


def load_targets(config: Path) -> tuple[Target, ...]:
    """Read and check only who gets messages.

    Args:
        config: the YAML file.

    Raises:
        ConfigError: as `load_settings`, or nobody gets any.
    """
    given = _read_file(config)
    targets = _targets(given["notify"]) if "notify" in given else ()
    if not targets:
        raise ConfigError(f"{config}: notify: lists nobody to send to.")
    return targets


def _read_file(path: Path) -> dict[str, _Given]:
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
    _check_keys(content, KEYS, str(path))
    base = path.absolute().parent
    # A key with nothing after it counts as left out, as its author would expect.
    return {
        key: _Given(value, f"{path}: {key}", base)
        for key, value in content.items()
        if value is not None
    }


def _check_keys(content: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _boolean(given: _Given) -> bool:
    if not isinstance(given.value, bool):
        raise given.error(f"must be true or false, not {given.value!r}.")
    return given.value


def _path(given: _Given) -> Path:
    if not isinstance(given.value, str | Path) or not str(given.value).strip():
        raise given.error(f"must be a path, not {given.value!r}.")
    return (given.base / Path(given.value).expanduser()).absolute()


def _names(given: _Given) -> frozenset[str]:
    value = given.value
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise given.error(f"must be a list of alert names, not {value!r}.")
    if not value:
        raise given.error("is empty, so no alert could ever ask for anything.")
    return frozenset(value)


def _seconds(given: _Given) -> float:
    value = given.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise given.error(f"must be a number of seconds, not {value!r}.")
    if not math.isfinite(value) or value < 0:
        raise given.error(f"must be 0 or more seconds, not {value!r}.")
    return float(value)


def _address(given: _Given, *, allow_remote: bool) -> tuple[str, int]:
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
    if not allow_remote and not _is_loopback(host):
        raise given.error(
            f"{host} can be reached from other machines, and the token would cross the network "
            "unencrypted. Listen on 127.0.0.1 behind a proxy that speaks TLS, or set "
            "`allow_remote: true` in the config where the network itself is trusted."
        )
    return host, port


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name may resolve to anything, later too; this one is loopback by RFC 6761.
        return host == "localhost"


def _link(given: _Given) -> str:
    value = given.value
    if not isinstance(value, str) or not is_link(value.replace("{run}", "run")):
        raise given.error(
            "must be an address such as https://grafana.example.com/d/act?var-run={run}, "
            f"not {value!r}."
        )
    return value


def _targets(given: _Given) -> tuple[Target, ...]:
    if not isinstance(given.value, list):
        raise given.error("must be a list, each entry with kind and url_file.")
    targets: list[Target] = []
    for number, entry in enumerate(given.value, start=1):
        target = _target(_Given(entry, f"{given.where}: entry {number}", given.base))
        if any(target.name == other.name for other in targets):
            raise given.error(f"two entries have the name {target.name}; give one another `name`.")
        targets.append(target)
    return tuple(targets)


def _target(given: _Given) -> Target:
    entry = given.value
    if not isinstance(entry, dict):
        raise given.error("must have keys and values, such as `kind: feishu`.")
    _check_keys(entry, TARGET_KEYS, given.where)

    def part(key: str, default: Any = None) -> _Given:
        value = entry.get(key)
        return _Given(default if value is None else value, f"{given.where}: {key}", given.base)

    kind = part("kind")
    if kind.value not in list(KINDS):  # not the dict itself: a YAML list has no hash
        raise kind.error(f"must be one of {', '.join(KINDS)}, not {kind.value!r}.")
    name = part("name", kind.value)
    if not isinstance(name.value, str) or not _TARGET_NAME.fullmatch(name.value):
        raise name.error(
            f"must be a word of up to 40 letters, digits, - and _, not {name.value!r}."
        )
    language = part("language", "en")
    if language.value not in LANGUAGES:
        raise language.error(f"must be one of {', '.join(LANGUAGES)}, not {language.value!r}.")
    url_file, secret_file = part("url_file"), part("secret_file")
    if url_file.value is None:
        raise given.error("url_file is missing: the file that holds the bot's address.")
    url = _token(url_file)
    if kind.value != "apprise":
        _check_url(url, url_file)
    secret = None if secret_file.value is None else _token(secret_file)
    try:
        notifier = KINDS[kind.value](url, secret)
    except ConfigError as error:
        raise url_file.error(str(error)) from None
    except ValueError as error:
        raise secret_file.error(str(error)) from None
    return Target(name=name.value, kind=kind.value, language=language.value, notifier=notifier)


def _check_url(url: str, given: _Given) -> None:
    # Nothing of the file may be shown: the address is the key to the group.
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        parts.port  # noqa: B018  (raises where it is no number)
    except ValueError:
        raise given.error("the file holds no address such as https://HOST/PATH.") from None
    if parts.scheme not in ("http", "https") or not host:
        raise given.error("the file holds no address such as https://HOST/PATH.")
    if parts.scheme == "http" and not _is_loopback(host):
        raise given.error("the address in the file must be https: it is a secret itself.")


def _token(given: _Given) -> str:
    path = _path(given)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise given.error(f"{path} is not a file.")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise given.error(
                f"{path} is open to other users of this machine; run `chmod 600 {path}`."
            )
        with path.open("rb") as file:
            content = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise given.error(f"{path} cannot be read: {error.strerror}.") from error
    if len(content) > MAX_TOKEN_BYTES:
        raise given.error(f"{path} is too large to be a token file.")
    # Alertmanager trims its credentials_file in the same way.
    token = content.strip()
    if not token:
        raise given.error(f"{path} is empty.")
    # The message must not show what is wrong: it would print the secret.
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise given.error(f"{path} must hold one line of printable ASCII without spaces.")
    return token.decode("ascii")
