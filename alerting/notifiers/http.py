"""One POST to a chat tool, and what its answer means; addresses are secrets and are never shown."""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3

from alerting.exceptions import NotSentError

CONNECT_SECONDS = 5.0
READ_SECONDS = 10.0
"""Chat tools answer within a second; what has no answer by then is tried again."""
MAX_ANSWER_BYTES = 65_536
"""Their answers are a line of JSON; more is somebody else's page."""
RATE_SECONDS = 60.0
"""The tools count by the minute."""
_SHOWN_CHARACTERS = 200
"""Of a tool's own words about an error that is not known here."""

# Its debug messages hold the path and the query, which are the bots' keys.
logging.getLogger("urllib3").setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What one of a tool's error codes means.

    Attributes:
        sentence: says what to change.
        after: seconds after which the message may be sent again, None where that can't help.
    """

    sentence: str
    after: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What came back: the HTTP status, the body's start and the header Retry-After."""

    status: int
    body: bytes
    retry_after: str


def post(url: str, body: str, headers: Mapping[str, str] | None = None) -> Reply:
    """POST a JSON text; follows no redirect, and trusts the CAs of this system.

    Raises:
        NotSentError: there was no answer.
    """
    try:
        with requests.Session() as session:
            response = session.post(
                url,
                data=body.encode(),
                headers={"Content-Type": "application/json; charset=utf-8", **(headers or {})},
                timeout=(CONNECT_SECONDS, READ_SECONDS),
                allow_redirects=False,
                stream=True,
                verify=_system_authorities(),
                # None would let an entry of ~/.netrc replace our own token.
                auth=lambda request: request,
            )
            return Reply(
                status=response.status_code,
                body=_read(response),
                retry_after=response.headers.get("Retry-After", ""),
            )
    except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
        # The exceptions' own texts have the address in them.
        sentence = _unreached(error)
    # Outside of `except`, so that the error has no context that a traceback would print.
    raise NotSentError(sentence, retry=True)


def judge(
    reply: Reply, names: tuple[str, ...], faults: Mapping[int, Fault], secrets: tuple[str, ...]
) -> str:
    """Read a bot's answer, in which errors are codes inside of an HTTP 200.

    Args:
        reply: the answer.
        names: under which the body may hold its code; the first that is there counts.
        faults: the codes that are known, 0 aside.
        secrets: the address and the secret, which must not be shown should they be repeated.

    Returns:
        What came back.

    Raises:
        NotSentError: the message was not taken.
    """
    content = _object(reply.body)
    code = next((content[name] for name in names if name in content), None)
    if isinstance(code, int) and code != 0:
        if (fault := faults.get(code)) is not None:
            raise NotSentError(
                f"error {code}: {fault.sentence}", retry=fault.after is not None, after=fault.after
            )
        words = words_of(content, secrets)
        # What is not known may pass, and is tried a bounded number of times.
        raise NotSentError(f"error {code}, not known here: {words}", retry=True)
    judge_status(reply)
    if code != 0 or isinstance(code, bool):
        raise NotSentError(
            f"HTTP {reply.status} without the bot's code: this is not its address, or something "
            "in between answered; see url_file",
            retry=True,
        )
    return f"HTTP {reply.status}, code 0"


def judge_status(reply: Reply) -> None:
    """Accept a 2xx.

    Raises:
        NotSentError: it is another status.
    """
    status = reply.status
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise NotSentError(
            f"HTTP {status}: it redirects, which is not followed; put the address that it leads "
            "to into url_file",
            retry=False,
        )
    if status == 429:
        seconds = float(reply.retry_after) if reply.retry_after.isdecimal() else RATE_SECONDS
        raise NotSentError("HTTP 429: too many messages", retry=True, after=seconds)
    if status == 408 or status >= 500:
        raise NotSentError(f"HTTP {status}: it is out of order just now", retry=True)
    hint = {
        401: "it wants another token; see secret_file",
        403: "it wants another token, or does not let this machine in; see secret_file",
        404: "there is nothing at this address; see url_file",
        413: "the message is too large for it",
    }.get(status, "it does not take this message; see url_file")
    raise NotSentError(f"HTTP {status}: {hint}", retry=False)


def words_of(content: Mapping[str, Any], secrets: tuple[str, ...]) -> str:
    """A bot's own words about an error, on one short line and without the secrets."""
    text = next((str(content[key]) for key in ("errmsg", "msg") if key in content), "")
    for secret in secrets:
        for part in (secret, *_keys(secret)):
            text = text.replace(part, "***")
    # repr: it may hold line breaks, and it goes to a log.
    return repr(text[:_SHOWN_CHARACTERS])


def _keys(url: str) -> list[str]:
    """The parts of an address that give access."""
    parts = urlsplit(url)
    values = [pair.partition("=")[2] for pair in parts.query.split("&")]
    # Shorter ones are words such as `send`.
    return [value for value in (*parts.path.split("/"), *values) if len(value) >= 8]


def _object(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _read(response: requests.Response) -> bytes:
    deadline = time.monotonic() + READ_SECONDS
    body = b""
    # The socket's own timeout begins anew with each byte.
    while len(body) < MAX_ANSWER_BYTES and time.monotonic() < deadline:
        chunk = response.raw.read1(MAX_ANSWER_BYTES - len(body), decode_content=True)
        if not chunk:
            break
        body += chunk
    return body


def _system_authorities() -> str | bool:
    # requests would take a bundle of its own, which lacks the CA of a company's proxy. It is what
    # is left where the system has none.
    paths = ssl.get_default_verify_paths()  # of a file or folder that is not there, None
    for place in (paths.cafile, paths.capath):
        if place and (Path(place).is_file() or any(Path(place).iterdir())):
            return place
    return True


def _unreached(error: Exception) -> str:
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {CONNECT_SECONDS:g} s"
    if isinstance(error, requests.Timeout | urllib3.exceptions.ReadTimeoutError):
        return f"no answer within {READ_SECONDS:g} s"
    if isinstance(error, requests.exceptions.SSLError):
        return "its TLS certificate is not one that this system trusts"
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy does not let it through; see the variable HTTPS_PROXY"
    if isinstance(error, urllib3.exceptions.HTTPError):
        return "the answer broke off"
    if isinstance(error, requests.ConnectionError):
        return "no connection: the name is unknown, nobody listens, or it hung up"
    return f"no answer that is HTTP ({type(error).__name__})"
