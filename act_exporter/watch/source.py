"""Asks one exporter for its page, in the background, never twice at a time."""

from __future__ import annotations

import email.utils
import http.client
import math
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from act_exporter.environment import DEFAULT_PORT
from act_exporter.exceptions import SettingError
from act_exporter.watch.page import Page, PageError, clean, parse

# A page of 20,000 series, the exporter's own limit, has 2 MB. What is served by mistake may have
# any size.
_LARGEST_BYTES = 64_000_000

PATIENCE_SECONDS = 10.0
"""As long as the exporter itself waits for a request, and Prometheus for an answer."""

# The rate is taken over so many seconds, that one slow step does not make it jump.
_RATE_SECONDS = 60.0

# HTTP's dates are whole seconds: clocks that differ by less are taken to be right.
_CLOCK_SECONDS = 2.0

_METRICS = "/metrics"
_HEADERS = {"Accept": "text/plain;version=0.0.4", "User-Agent": "act-exporter-watch"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is known of an exporter at a moment.

    Attributes:
        address: where it is, as people wrote it.
        page: the newest page that could be read.
        read_at: when that was, by this machine's monotonic clock.
        rate: steps a second over the last minute, NaN before there were two.
        problem: why there is no newer page, in words that go on from the address; or None.
        away_since: Unix seconds since which there is a problem.
    """

    address: str
    page: Page | None = None
    read_at: float = math.nan
    rate: float = math.nan
    problem: str | None = None
    away_since: float = math.nan

    def age(self, now: float) -> float:
        """Seconds since the last step ended, at a time of the monotonic clock."""
        return math.nan if self.page is None else self.page.age + now - self.read_at


class Source:
    """One exporter.

    Args:
        address: `host:port` or an http address, with /metrics or without.
        changed: called in the background when an answer or an error has come.

    Attributes:
        reading: replaced with each answer, never changed.

    Raises:
        SettingError: that is no address.
    """

    def __init__(self, address: str, changed: Callable[[], None]) -> None:
        self.reading = Reading(address=clean(address))
        self._url = url_of(address)
        self._changed = changed
        self._thread: threading.Thread | None = None
        self._steps: deque[tuple[float, float]] = deque()  # (when one was seen to end, how many)

    @property
    def asking(self) -> bool:
        """Whether a request is under way."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self, seconds: float) -> None:
        """Ask for the page and give up after `seconds`; nothing while the one before is under way.

        Args:
            seconds: in which something must arrive; at most 10 are taken.
        """
        if not self.asking:
            # A daemon: an exporter that hangs must not hold the terminal at the end.
            self._thread = threading.Thread(
                target=self._ask, args=(min(seconds, PATIENCE_SECONDS),), daemon=True
            )
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the request that is under way."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _ask(self, seconds: float) -> None:
        before = self.reading
        try:
            page = _read(self._url, seconds)
        except PageError as error:
            since = time.time() if before.problem is None else before.away_since
            self.reading = replace(before, problem=str(error), away_since=since)
        else:
            self.reading = Reading(
                address=before.address,
                page=page,
                read_at=time.monotonic(),
                rate=self._rate(page),
            )
        self._changed()

    def _rate(self, page: Page) -> float:
        ended_at, steps = (
            page.value("act_last_step_timestamp_seconds"),
            page.value("act_steps_total"),
        )
        if self._steps and steps < self._steps[-1][1]:
            self._steps.clear()  # another process answers there now
        if not self._steps or steps > self._steps[-1][1]:
            self._steps.append((ended_at, steps))
        while len(self._steps) > 2 and self._steps[1][0] < ended_at - _RATE_SECONDS:
            self._steps.popleft()
        (first_at, first), (last_at, last) = self._steps[0], self._steps[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else math.nan


def url_of(address: str) -> str:
    """The full address of the page.

    Raises:
        SettingError: what was written is no address of HTTP.
    """
    text = address if "://" in address else f"http://{address}"
    wrong = SettingError(
        f"{clean(address)!r} is no exporter's address, such as node17:{DEFAULT_PORT} or"
        f" http://node17:{DEFAULT_PORT}/metrics"
    )
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise wrong
    if not text.isascii() or any(character.isspace() for character in text):
        raise wrong
    # A name alone is the usual port; an address of the web is what it says.
    usual = f":{DEFAULT_PORT}" if port is None and "://" not in address else ""
    path = parts.path.rstrip("/").removesuffix(_METRICS)
    return f"{parts.scheme}://{parts.netloc}{usual}{path}{_METRICS}"


# A proxy is for the web, and knows nothing of a cluster's nodes.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _read(url: str, seconds: float) -> Page:
    """The page there.

    Raises:
        PageError: there is none, or it did not come in time.
    """
    began = time.monotonic()
    request = urllib.request.Request(url, headers=_HEADERS)  # noqa: S310  # http only: see url_of
    body = bytearray()
    try:
        with _opener.open(request, timeout=seconds) as answer:
            # By parts, since a socket's own timeout is for each of them anew.
            while part := answer.read1(1 << 16):
                body += part
                if len(body) > _LARGEST_BYTES:
                    raise PageError("answers with more than any exporter has to say")
                if time.monotonic() > began + seconds:
                    raise TimeoutError
            date = answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        error.close()
        raise PageError(f"answers with HTTP status {error.code} in place of metrics") from error
    except (OSError, http.client.HTTPException) as error:
        raise PageError(_said(error, seconds)) from error
    return parse(body.decode(errors="replace"), _made_at(date))


def _made_at(date: str) -> float:
    """When an answer was made, by the trainer's clock."""
    now = time.time()
    try:
        said = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return now
    return now if abs(said - now) < _CLOCK_SECONDS else said


def _said(error: Exception, seconds: float) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"has not answered within {seconds:.3g} s"
    if isinstance(cause, ConnectionRefusedError):
        return "cannot be reached: nothing listens there"
    if isinstance(cause, OSError) and cause.strerror:
        return f"cannot be reached: {clean(cause.strerror)}"
    return f"does not speak HTTP as an exporter does: {type(error).__name__}"
