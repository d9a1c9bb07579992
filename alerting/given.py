"""A setting as it was given, and the kinds of it that several settings share.

Each error is one sentence that says where the setting was given; none shows a secret.
"""

from __future__ import annotations

import difflib
import ipaddress
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alerting.exceptions import ConfigError

MAX_TOKEN_BYTES = 4096
"""A token file is one line; a larger one is the wrong file."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given; `where` opens each message, `base` is what paths are relative to."""

    value: Any
    where: str
    base: Path

    def error(self, sentence: str) -> ConfigError:
        """The error that this value is."""
        return ConfigError(f"{self.where}: {sentence}")


def check_keys(content: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse a key that is not among `known`, with the one that may be meant."""
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def read_path(given: Given) -> Path:
    """A path, relative to the config's folder."""
    if not isinstance(given.value, str | Path) or not str(given.value).strip():
        raise given.error(f"must be a path, not {given.value!r}.")
    return (given.base / Path(given.value).expanduser()).absolute()


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name may resolve to anything, later too; this one is loopback by RFC 6761.
        return host == "localhost"


def read_secret(given: Given) -> str:
    """The one line of a file that nobody else may read: a token, or an address with a key."""
    path = read_path(given)
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
