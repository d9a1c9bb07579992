"""Who may see the pages: TLS, client certificates and a token.

They stand in a file as Prometheus' own programs take it by `--web.config.file`
(https://prometheus.io/docs/prometheus/latest/configuration/https/). Certificates, keys and tokens
are read anew when their files change, as they do when they are renewed; where the new ones cannot
be read, those before stay in force.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from act_exporter.exceptions import SettingError

log = logging.getLogger(__name__)

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENTS = ("NoClientCert", "RequireAndVerifyClientCert")
_TLS_KEYS = {"cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version"}

T = TypeVar("T")


class Access:
    """What a web config file asks for.

    Args:
        path: the file; paths in it are relative to its folder.

    Attributes:
        scheme: "https" or "http".

    Raises:
        SettingError: it cannot be read, or says what cannot be; names the key.
    """

    def __init__(self, path: Path) -> None:
        config = _mapping(path, _parsed(path), {"tls_server_config", "bearer_token_file"})
        tls = config.get("tls_server_config")
        self._context = None if tls is None else _tls(path, tls)
        token = config.get("bearer_token_file")
        self._token = None if token is None else _Kept([_file(path, token)], _token)
        self.scheme = "http" if self._context is None else "https"

    def wrap(self, connection: socket.socket) -> socket.socket:
        """The connection, once both sides have shown what they must; waits for the client.

        Raises:
            OSError: the client does not speak TLS, or has no certificate that is accepted.
        """
        if self._context is None:
            return connection
        return self._context.now().wrap_socket(connection, server_side=True)

    def allows(self, authorization: str) -> bool:
        """Whether a request with that header may be answered.

        The token is taken as a bearer's, and as a password of any user, which browsers can send.
        """
        if self._token is None:
            return True
        kind, _, given = authorization.partition(" ")
        said = given.strip().encode()
        if kind.lower() == "basic":
            try:
                said = base64.b64decode(said, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != "bearer":
            return False
        return hmac.compare_digest(said, self._token.now())


class _Kept(Generic[T]):
    """What was made of some files, made anew when one of them has changed."""

    def __init__(self, files: Sequence[Path], make: Callable[[Sequence[Path]], T]) -> None:
        self._files, self._make = files, make
        self._seen = self._state()
        self._made = make(files)

    def now(self) -> T:
        try:
            if (state := self._state()) != self._seen:
                self._seen = state
                self._made = self._make(self._files)
                log.info("read %s anew", self._files[0])
        except (SettingError, OSError) as error:  # half written: the next request tries again
            log.warning("%s; what was read before stays in force", error)
        return self._made

    def _state(self) -> list[tuple[int, int]]:
        return [(found.st_mtime_ns, found.st_ino) for found in map(Path.stat, self._files)]


def _parsed(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingError(f"web config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingError(f"web config {path}: no YAML: {error}") from error


def _mapping(path: Path, found: Any, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(found, dict) or not found:
        raise SettingError(f"web config {path}: expected some of {', '.join(sorted(known))}")
    for key in found:
        if key == "basic_auth_users":
            raise SettingError(
                f"web config {path}: basic_auth_users needs bcrypt, which this package has not;"
                " a token in bearer_token_file is taken as a password too"
            )
        if key not in known:
            raise SettingError(f"web config {path}: {key!r} is none of {', '.join(sorted(known))}")
    return found


def _file(path: Path, name: Any) -> Path:
    if not isinstance(name, str) or not name:
        raise SettingError(f"web config {path}: {name!r} is no file's name")
    found = path.parent / name
    try:
        found.read_bytes()
    except OSError as error:
        raise SettingError(f"web config {path}: {found}: {error.strerror}") from error
    return found


def _token(files: Sequence[Path]) -> bytes:
    token = files[0].read_bytes().strip()
    if not token:
        raise SettingError(f"{files[0]}: the token is empty")
    return token


def _tls(path: Path, found: Any) -> _Kept[ssl.SSLContext]:
    config = _mapping(path, found, _TLS_KEYS)
    missing = {"cert_file", "key_file"} - set(config)
    if missing:
        raise SettingError(f"web config {path}: tls_server_config has no {missing.pop()}")
    clients = config.get("client_auth_type", _CLIENTS["client_ca_file" in config])
    if clients not in _CLIENTS or (clients == _CLIENTS[1]) != ("client_ca_file" in config):
        raise SettingError(
            f"web config {path}: client_auth_type {clients!r}: it is {_CLIENTS[1]} with a"
            f" client_ca_file, and {_CLIENTS[0]} without"
        )
    version = config.get("min_version", "TLS12")
    if version not in _VERSIONS:
        raise SettingError(f"web config {path}: min_version {version!r} is no {list(_VERSIONS)}")
    names = [name for name in ("cert_file", "key_file", "client_ca_file") if name in config]

    def make(files: Sequence[Path]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[version]
        try:
            # A key with a password is an error, and not a question at the trainer's terminal.
            context.load_cert_chain(files[0], files[1], password=lambda: "")
            if len(files) > 2:
                context.load_verify_locations(files[2])
                context.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError as error:
            raise SettingError(f"web config {path}: {files[0]}: {error.reason or error}") from error
        return context

    return _Kept([_file(path, config[name]) for name in names], make)
